// SPDX-License-Identifier: Apache-2.0
// A prediction as a bar chart.

#include <fmt/format.h>

#include "chart/bar_chart.h"
#include "ds/memreport.h"

namespace ds::memreport {
namespace {

chart::BarChart chart_of(const Prediction& p, i64 limit) {
  chart::BarChart chart{
      .title = fmt::format("memory of each rank, predicted: {} parameters over {} ranks", p.num_params, p.world.ranks)};
  std::vector<chart::Bar> bars(static_cast<size_t>(p.world.ranks));
  for (const RankGroup& g : p.groups) {
    chart::Bar bar{.label = {}, .worst = p.groups.size() > 1 && &g == &p.worst_group()};
    for (const TagBytes& t : g.memory) {
      if (p.device == "cpu" || t.tag != "host") bar.predicted.push_back({t.tag, t.bytes});
    }
    for (const int rank : g.ranks) {
      chart::Bar& of_rank = bars[rank] = bar;
      of_rank.label = fmt::format("rank {}", rank);
    }
  }
  chart.bars = std::move(bars);
  if (limit > 0) chart.limit = limit;
  return chart::merge_equal(std::move(chart));
}

chart::BarChart chart_of(const Measured& m, i64 limit) {
  chart::BarChart chart{.title = fmt::format("memory of each rank, predicted and counted: {}", m.name)};
  for (const MeasuredRank& r : m.ranks) {
    chart::Bar bar{.label = fmt::format("rank {}", r.rank)};
    for (const TagMemory& t : r.tags) {
      if (t.predicted > 0) bar.predicted.push_back({t.tag, t.predicted});
      if (r.counted && t.counted > 0) bar.measured.push_back({t.tag, t.counted});
    }
    chart.bars.push_back(std::move(bar));
  }
  if (limit > 0) chart.limit = limit;
  return chart::merge_equal(std::move(chart));
}

}  // namespace

std::string plot_text(const Prediction& p, i64 limit, int columns, bool colour) {
  return chart::bar_text(chart_of(p, limit), {.width = columns, .colour = colour});
}
std::string plot_svg(const Prediction& p, i64 limit) { return chart::bar_svg(chart_of(p, limit)); }
std::string plot_html(const Prediction& p, i64 limit) { return chart::bar_html(chart_of(p, limit)); }

std::string plot_text(const Measured& m, i64 limit, int columns, bool colour) {
  return chart::bar_text(chart_of(m, limit), {.width = columns, .colour = colour});
}
std::string plot_svg(const Measured& m, i64 limit) { return chart::bar_svg(chart_of(m, limit)); }
std::string plot_html(const Measured& m, i64 limit) { return chart::bar_html(chart_of(m, limit)); }

}  // namespace ds::memreport
