// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared parts of the three forms of a bar chart (bar_chart.h): the looks of tags, the sums, the words.

#include "chart/bar_chart.h"

namespace ds::chart {

// How a tag looks; `rgb` is of the terminals' cube of 6 x 6 x 6 colours, so that they show it exactly.
struct Look {
  std::string tag;
  char letter;
  u32 rgb;
};

struct TagSum {
  Look look;
  i64 predicted = 0, measured = 0;  // over all bars, with their counts
};

struct Sums {
  std::vector<TagSum> tags;         // with bytes somewhere, as they are stacked
  i64 predicted = 0, measured = 0;  // of all tags
  i64 bars = 0, measured_bars = 0;  // with their counts
  i64 bars_over = 0;                // the limit: by what is counted, else by what is predicted
  i64 scale = 0;                    // largest total, or the limit if that is larger
  bool has_measured() const { return measured_bars > 0; }
};

// Throws Errc::Corrupt for negative bytes and sums beyond 2^63.
Sums sums_of(const BarChart&);
const Look& look_of(const Sums&, const std::string& tag);  // of a tag that has bytes
i64 total(const std::vector<BarSegment>&);                 // of bytes that sums_of() has seen

bool is_over(const BarChart&, const std::vector<BarSegment>&);
bool is_light(u32 rgb);  // black reads better on it than white

// "12.5 %", "<0.1 %" for what would round to nothing, "-" of nothing.
std::string share_text(i64 part, i64 whole);
// "+1.5 %": what was counted against what was predicted; "exact", "<0.1 %" either way, "-" against nothing.
std::string difference_text(i64 measured, i64 predicted);
// "sum of 8", or "tag" where there is only one bar.
std::string sum_heading(const Sums&);
std::string limit_text(const BarChart&);  // "H100 80.000 GiB"
std::string over_text(const Sums&);       // "2 of 8 are over the limit"; "": none is

}  // namespace ds::chart
