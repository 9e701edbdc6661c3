// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes by tag as stacked bars, one for each rank: for a terminal, as SVG and as HTML. All are pure functions of plain
// data, and their numbers read the same under every locale. A tag has the same letter and colour in all three.

#include <optional>
#include <string>
#include <vector>

#include "chart/chart.h"

namespace ds::chart {

struct BarSegment {
  std::string tag;  // as tag_name() has them; others get letters and colours of their own
  i64 bytes = 0;
  bool operator==(const BarSegment&) const = default;
};

struct Bar {
  std::string label;
  std::vector<BarSegment> predicted = {};  // in stacking order
  std::vector<BarSegment> measured = {};   // empty: nothing was counted
  bool worst = false;
  i64 count = 1;  // equal bars that this one stands for
};

struct BarChart {
  std::string title;
  std::vector<Bar> bars = {};
  std::optional<i64> limit = {};  // bytes that each bar has
  std::string limit_label = {};   // what the limit is of, such as "H100"
};

// Equal neighbours become one bar: "rank 0" to "rank 7" are "ranks 0-7", labels without such numbers "first..last". It
// is the worst one if one of them was.
BarChart merge_equal(BarChart);

// A row for each bar, and a second one where something was counted; beneath, the legend with the sums over all bars:
//   P G M    bytes of a tag, one letter each
//   .        free, up to the limit
//   |        the limit: between two cells of a row, never in place of one
//   *        the worst bar
//   !        over the limit, be it by less than a cell
// A cell is the same number of bytes in all rows; what is drawn of a segment is within one cell of its share. No line
// is wider than style.width. The functions throw Errc::Corrupt for negative bytes and for sums beyond 2^63.
std::string bar_text(const BarChart&, const TextStyle& style = {});

// The same as an SVG that needs nothing else, light or dark as the reader's system is; a tooltip tells the numbers of
// each segment. At most about 1500 pixels wide; a row takes 14 to 28 pixels, so merge before you draw thousands.
std::string bar_svg(const BarChart&);

// A page that needs nothing else either: the SVG and a table of all its numbers.
std::string bar_html(const BarChart&);

}  // namespace ds::chart
