// SPDX-License-Identifier: Apache-2.0
#include "chart/pattern_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "model/models.h"

namespace ds::chart {

using model::AttentionPattern;

namespace {

constexpr i64 kPlainBlock = 64;  // of patterns without a layout

std::string range_name(std::string_view what, i64 first, i64 last) {
  return first == last ? fmt::format("{} {}", what, first) : fmt::format("{}s {} to {}", what, first, last);
}

// Cells of several blocks where there are more than `most` of them, with the share of their pairs that are seen.
struct Cells {
  i64 blocks = 1, count = 0;  // of a cell, along a side; cells along a side
  std::vector<double> share;  // [count, count]
};
Cells cells_of(const PatternPanel& panel, i64 most) {
  const AttentionPattern& p = panel.pattern;
  Cells cells;
  cells.blocks = (p.count() + most - 1) / most;
  cells.count = (p.count() + cells.blocks - 1) / cells.blocks;
  cells.share.resize(static_cast<size_t>(cells.count * cells.count));
  for (i64 i = 0; i < p.count(); ++i) {
    const i64 row = i / cells.blocks * cells.count;
    for (const AttentionPattern::Met& met : p.keys_of(panel.head, i))
      cells.share[static_cast<size_t>(row + met.block / cells.blocks)] += met.whole ? 1 : 0.5;
  }
  const auto side = [&](size_t cell) {
    return static_cast<double>(std::min(cells.blocks, p.count() - static_cast<i64>(cell) * cells.blocks));
  };
  const size_t n = static_cast<size_t>(cells.count);
  for (size_t c = 0; c < cells.share.size(); ++c) cells.share[c] /= side(c / n) * side(c % n);
  return cells;
}

std::string cell_name(const PatternPanel& panel, const Cells& cells) {
  const i64 tokens = panel.pattern.block() * cells.blocks;
  return cells.blocks == 1 ? fmt::format("blocks of {} tokens", tokens)
                           : fmt::format("cells of {} tokens, {} blocks a side", tokens, cells.blocks);
}

}  // namespace

std::vector<PatternPanel> pattern_panels(const Config& config) {
  const ModelConfig& m = config.model;
  std::shared_ptr<const model::AttentionLayout> layout;
  if (config.sparse_attention.mode != SparseAttentionMode::None) layout = model::attention_layout_of(config);
  const bool causal = m.causal();
  // Layers that have the same window, and heads that have the same layout.
  std::map<i64, std::vector<i64>> layers;
  for (i64 l = 0; l < m.layers; ++l) layers[causal ? m.window(l) : 0].push_back(l);
  std::map<std::vector<u64>, std::vector<i64>> heads;
  std::vector<const std::vector<i64>*> order;
  for (i64 h = 0; layout != nullptr && h < layout->layouts(); ++h) {
    const auto begin = layout->keys().begin() + h * layout->count() * layout->words();
    auto& same = heads[std::vector<u64>(begin, begin + layout->count() * layout->words())];
    if (same.empty()) order.push_back(&same);
    same.push_back(h);
  }
  const std::vector<i64> all = {0};
  const bool one = order.size() <= 1;
  if (order.empty()) order.push_back(&all);
  std::vector<PatternPanel> panels;
  for (const auto& [window, of] : layers) {
    for (const std::vector<i64>* same : order) {
      std::string title;
      if (layers.size() > 1)
        title = of.back() - of.front() + 1 == std::ssize(of)
                    ? range_name("layer", of.front(), of.back())
                    : fmt::format("{} layers from {} on", of.size(), of.front());
      if (!one) {
        if (!title.empty()) title += ", ";
        title += same->size() == 1 ? fmt::format("head {}", same->front())
                                   : fmt::format("head {} and {} more", same->front(), same->size() - 1);
      }
      if (title.empty()) title = "all layers and heads";
      panels.push_back({title,
                        AttentionPattern(layout, layout != nullptr ? layout->block() : kPlainBlock,
                                         config.data.seq_length, causal, window),
                        same->front()});
    }
  }
  return panels;
}

std::string pattern_text(const Config& config, const TextStyle& style) {
  const std::vector<PatternPanel> panels = pattern_panels(config);
  const PatternPanel& panel = panels.front();
  const Cells cells = cells_of(panel, std::clamp<i64>((style.width - 2) / 2, 8, 32));
  std::string text = fmt::format("attention of {}: {:.3g} of all pairs, {}{}\n", panel.title,
                                 panel.pattern.share(panel.head), cell_name(panel, cells),
                                 panels.size() > 2   ? fmt::format("; {} other patterns", panels.size() - 1)
                                 : panels.size() > 1 ? "; 1 other pattern"
                                                     : "");
  for (i64 i = 0; i < cells.count; ++i) {
    std::string line = "  ";
    for (i64 j = 0; j < cells.count; ++j) {
      const double share = cells.share[static_cast<size_t>(i * cells.count + j)];
      line += share == 0 ? "  " : share < 0.2 ? ".." : share <= 0.5 ? "--" : share < 1 ? "++" : "##";
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string pattern_svg(const Config& config) {
  std::vector<PatternPanel> panels = pattern_panels(config);
  constexpr size_t kMost = 32, kColumns = 4;
  constexpr int kSide = 384, kGap = 24, kTitle = 40;
  const size_t left_out = panels.size() > kMost ? panels.size() - kMost : 0;
  panels.resize(panels.size() - left_out, panels.front());
  const int columns = static_cast<int>(std::min(panels.size(), kColumns));
  const int rows = static_cast<int>((panels.size() + kColumns - 1) / kColumns);
  const int width = columns * (kSide + kGap) + kGap,
            height = rows * (kSide + kTitle + kGap) + kGap + (left_out > 0 ? 20 : 0);
  std::string svg;
  const auto out = std::back_inserter(svg);
  fmt::format_to(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
                 "role=\"img\" font-family=\"sans-serif\" font-size=\"13\">\n<title>Who attends to what: rows are "
                 "queries, columns are keys</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n",
                 width, height);
  for (size_t n = 0; n < panels.size(); ++n) {
    const PatternPanel& panel = panels[n];
    const Cells cells = cells_of(panel, 128);
    const int x = kGap + static_cast<int>(n % kColumns) * (kSide + kGap);
    const int y = kGap + static_cast<int>(n / kColumns) * (kSide + kTitle + kGap);
    fmt::format_to(
        out,
        "<g transform=\"translate({} {})\">\n<text y=\"12\">{}</text>\n<text y=\"28\" fill=\"#666666\">{:.3g} "
        "of all pairs, {}</text>\n<rect y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#f2f2f2\"/>\n<g "
        "transform=\"translate(0 {}) scale({:.6g})\" fill=\"#1f4e9c\">\n",
        x, y, panel.title, panel.pattern.share(panel.head), cell_name(panel, cells), kTitle, kSide, kSide, kTitle,
        static_cast<double>(kSide) / static_cast<double>(cells.count));
    for (i64 i = 0; i < cells.count; ++i) {
      // Neighbours of one shade are one box.
      const auto at = [&](i64 j) { return cells.share[static_cast<size_t>(i * cells.count + j)]; };
      for (i64 j = 0; j < cells.count;) {
        i64 end = j + 1;
        while (end < cells.count && at(end) == at(j)) ++end;
        if (at(j) > 0) {
          fmt::format_to(out, "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"1\"", j, i, end - j);
          if (at(j) < 1) fmt::format_to(out, " opacity=\"{:.3g}\"", 0.2 + 0.8 * at(j));
          svg += "/>\n";
        }
        j = end;
      }
    }
    svg += "</g>\n</g>\n";
  }
  if (left_out > 0)
    fmt::format_to(out, "<text x=\"{}\" y=\"{}\">{} more patterns are not drawn.</text>\n", kGap, height - 12,
                   left_out);
  return svg + "</svg>\n";
}

}  // namespace ds::chart
