// SPDX-License-Identifier: Apache-2.0
// A bar chart for a terminal.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "chart/bar_chart.h"
#include "chart/bar_chart_parts.h"
#include "ds/printable.h"
#include "ds/units.h"

namespace ds::chart {
namespace {

constexpr std::string_view kReset = "\x1b[0m", kBold = "\x1b[1m", kCounted = "counted";

size_t to_size(i64 n) { return narrow<size_t>(n); }

// The letter in black or white on the colour of its tag.
std::string ansi(const Look& look) {
  constexpr std::string_view kLevels("\x00\x5f\x87\xaf\xd7\xff", 6);
  size_t index = 0;
  for (const int shift : {16, 8, 0}) {
    const size_t level = kLevels.find(static_cast<char>(look.rgb >> shift & 0xff));
    DS_ASSERT(level != std::string_view::npos);
    index = 6 * index + level;
  }
  return fmt::format("\x1b[48;5;{};38;5;{}m", 16 + index, is_light(look.rgb) ? 16 : 231);
}

std::string painted(const Look& look, size_t cells, bool colour) {
  const std::string letters(cells, look.letter);
  return colour && cells > 0 ? fmt::format("{}{}{}", ansi(look), letters, kReset) : letters;
}

// The columns of a row: mark of the worst, label, two spaces, cells with the mark of the limit, two spaces, total, mark
// of what is over the limit, be it by less than a cell.
struct Grid {
  bool has_worst = false, has_over = false;
  size_t label = 0, cells = 0, total = 0;
  std::optional<size_t> limit = {};  // cells before its mark
  i64 scale = 0;                     // bytes of all cells

  size_t cell_at(i64 bytes) const {
    if (scale == 0) return 0;
    return to_size(std::llround(static_cast<double>(bytes) / static_cast<double>(scale) * static_cast<double>(cells)));
  }
};

Grid make_grid(const BarChart& chart, const Sums& sums, size_t width) {
  Grid grid{.scale = sums.scale};
  for (const Bar& bar : chart.bars) {
    grid.has_worst = grid.has_worst || bar.worst;
    grid.has_over = grid.has_over || is_over(chart, bar.predicted) || is_over(chart, bar.measured);
    grid.label = std::max(grid.label, num_columns(printable(bar.label)));
    grid.total =
        std::max({grid.total, bytes_text(total(bar.predicted)).size(), bytes_text(total(bar.measured)).size()});
  }
  if (sums.has_measured()) grid.label = std::max(grid.label, kCounted.size());
  grid.label = std::min(grid.label, width / 4);
  grid.cells =
      width - (grid.has_worst ? 2 : 0) - (grid.has_over ? 2 : 0) - grid.label - 4 - grid.total - (chart.limit ? 1 : 0);
  if (chart.limit) grid.limit = grid.cell_at(*chart.limit);
  return grid;
}

// A segment has the cells between the roundings of where it begins and where it ends, so that errors do not add up.
std::string cells_text(const std::vector<BarSegment>& segments, const Sums& sums, const Grid& grid, bool colour) {
  std::string text;
  size_t at = 0;
  const auto fill = [&](size_t end, const auto& piece) {
    if (grid.limit && at <= *grid.limit && *grid.limit < end) {
      text += piece(*grid.limit - at);
      text += '|';
      at = *grid.limit;
    }
    text += piece(end - at);
    at = end;
  };
  i64 bytes = 0;
  for (const BarSegment& s : segments) {
    bytes += s.bytes;
    const size_t end = grid.cell_at(bytes);
    if (end > at) fill(end, [&](size_t n) { return painted(look_of(sums, s.tag), n, colour); });
  }
  if (grid.limit && at < *grid.limit) fill(*grid.limit, [](size_t n) { return std::string(n, '.'); });
  if (at < grid.cells) fill(grid.cells, [](size_t n) { return std::string(n, ' '); });
  if (grid.limit == at) text += '|';  // at the very end
  return text;
}

std::string row_text(const BarChart& chart, const Bar& bar, bool counted, const Sums& sums, const Grid& grid,
                     bool colour) {
  const std::vector<BarSegment>& segments = counted ? bar.measured : bar.predicted;
  std::string text;
  if (grid.has_worst) text += bar.worst && !counted ? "* " : "  ";
  const std::string label = counted ? fmt::format("{:>{}}", kCounted, grid.label)
                                    : fmt::format("{:<{}}", clip(printable(bar.label), grid.label), grid.label);
  text += bar.worst && colour ? fmt::format("{}{}{}", kBold, label, kReset) : label;
  return text + fmt::format("  {}  {:>{}}{}\n", cells_text(segments, sums, grid, colour), bytes_text(total(segments)),
                            grid.total, is_over(chart, segments) ? " !" : "");
}

// The table of sums: columns of text beside the letters of the tags.
struct Table {
  std::vector<std::vector<std::string>> rows;  // the first is the heading; each begins with a name

  size_t column_width(size_t column) const {
    size_t most = 0;
    for (const auto& row : rows) most = std::max(most, num_columns(row[column]));
    return most;
  }
  // Loses its last column first, as that follows from the others, then the middle of its names.
  void fit(size_t width) {
    const auto others = [&] {
      size_t sum = 0;
      for (size_t c = 1; c < rows[0].size(); ++c) sum += 2 + column_width(c);
      return sum;
    };
    constexpr size_t kLeastName = 6;
    if (others() + std::min(column_width(0), kLeastName) > width) {
      for (auto& row : rows) row.pop_back();
    }
    const size_t room = std::max(kLeastName, width - std::min(width, others()));
    for (auto& row : rows) row[0] = clip(row[0], room);
  }
  std::string line(size_t row) const {
    std::string text = fmt::format("{:<{}}", rows[row][0], column_width(0));
    for (size_t c = 1; c < rows[row].size(); ++c) text += fmt::format("  {:>{}}", rows[row][c], column_width(c));
    return text;
  }
};

Table make_table(const Sums& sums) {
  Table table;
  const bool all_counted = sums.measured_bars == sums.bars;
  const auto add = [&](const std::string& name, i64 predicted, i64 measured) {
    if (sums.has_measured()) {
      table.rows.push_back({name, bytes_text(predicted), bytes_text(measured),
                            all_counted ? difference_text(measured, predicted) : "-"});
    } else {
      table.rows.push_back({name, bytes_text(predicted), share_text(predicted, sums.predicted)});
    }
  };
  if (sums.has_measured()) {
    table.rows = {{sum_heading(sums), "predicted", std::string(kCounted), "difference"}};
  } else {
    table.rows = {{sum_heading(sums), "bytes", "share"}};
  }
  for (const TagSum& t : sums.tags) add(printable(t.look.tag), t.predicted, t.measured);
  add("total", sums.predicted, sums.measured);
  return table;
}

// Letters of the tags that nowhere fill a cell.
std::string not_drawn(const BarChart& chart, const Sums& sums, const Grid& grid) {
  std::string letters;
  for (const TagSum& t : sums.tags) {
    bool drawn = false;
    for (const Bar& bar : chart.bars) {
      for (const auto* segments : {&bar.predicted, &bar.measured}) {
        i64 bytes = 0;
        for (const BarSegment& s : *segments) {
          drawn = drawn || (s.tag == t.look.tag && grid.cell_at(bytes + s.bytes) > grid.cell_at(bytes));
          bytes += s.bytes;
        }
      }
    }
    if (!drawn) letters += fmt::format(" {}", t.look.letter);
  }
  return letters;
}

std::string legend_text(const BarChart& chart, const Sums& sums, const Grid& grid, const TextStyle& style,
                        size_t width) {
  std::string text;
  const auto note = [&](const std::string& line) { text += clip(line, width) + '\n'; };
  if (chart.limit) note("| " + limit_text(chart));
  if (grid.has_over) note("! " + (sums.bars_over > 0 ? over_text(sums) : "over the limit"));
  if (sums.bars_over < sums.bars && chart.limit) note(". free");
  if (grid.has_worst) note("* the worst");
  if (sums.has_measured() && sums.measured_bars < sums.bars)
    note(fmt::format("counted: {} of {}", sums.measured_bars, sums.bars));
  if (const std::string letters = not_drawn(chart, sums, grid); !letters.empty()) note("less than a cell:" + letters);
  if (!text.empty()) text += '\n';

  Table table = make_table(sums);
  table.fit(width - 2);
  for (size_t row = 0; row < table.rows.size(); ++row) {
    const bool is_tag = row > 0 && row <= sums.tags.size();
    text += is_tag ? painted(sums.tags[row - 1].look, 1, style.colour) : " ";
    text += fmt::format(" {}\n", clip(table.line(row), width - 2));
  }
  return text;
}

}  // namespace

std::string bar_text(const BarChart& chart, const TextStyle& style) {
  const size_t width = to_size(std::max(style.width, 40));
  const Sums sums = sums_of(chart);
  const Grid grid = make_grid(chart, sums, width);
  std::string text = clip(printable(chart.title), width) + "\n\n";
  if (chart.bars.empty()) return text + "no bars\n";
  for (const Bar& bar : chart.bars) {
    text += row_text(chart, bar, false, sums, grid, style.colour);
    if (!bar.measured.empty()) text += row_text(chart, bar, true, sums, grid, style.colour);
  }
  return text + '\n' + legend_text(chart, sums, grid, style, width);
}

}  // namespace ds::chart
