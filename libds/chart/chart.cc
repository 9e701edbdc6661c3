// SPDX-License-Identifier: Apache-2.0
#include "chart/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "ds/printable.h"

namespace ds::chart {
namespace {

// The ranges that fmt pads as two columns.
bool is_wide(u32 code) {
  constexpr std::array<std::pair<u32, u32>, 14> kWide = {{{0x1100, 0x115f},
                                                          {0x2329, 0x232a},
                                                          {0x2e80, 0x303e},
                                                          {0x3040, 0xa4cf},
                                                          {0xac00, 0xd7a3},
                                                          {0xf900, 0xfaff},
                                                          {0xfe10, 0xfe19},
                                                          {0xfe30, 0xfe6f},
                                                          {0xff00, 0xff60},
                                                          {0xffe0, 0xffe6},
                                                          {0x1f300, 0x1f64f},
                                                          {0x1f900, 0x1f9ff},
                                                          {0x20000, 0x2fffd},
                                                          {0x30000, 0x3fffd}}};
  return std::any_of(kWide.begin(), kWide.end(), [&](const auto& r) { return code >= r.first && code <= r.second; });
}

std::vector<Utf8Character> characters(std::string_view text) {
  std::vector<Utf8Character> result;
  while (!text.empty()) {
    result.push_back(first_character(text));
    text.remove_prefix(result.back().bytes.size());
  }
  return result;
}

size_t width_of(const Utf8Character& c) { return is_wide(c.code) ? 2 : 1; }

}  // namespace

size_t num_columns(std::string_view text) {
  size_t n = 0;
  for (const Utf8Character& c : characters(text)) n += width_of(c);
  return n;
}

std::string clip(std::string_view text, size_t width) {
  if (num_columns(text) <= width) return std::string(text);
  const std::string_view mark = width < 5 ? "" : "~~";
  const size_t room = width - mark.size(), front = mark.empty() ? room : room / 2;
  const std::vector<Utf8Character> all = characters(text);
  std::string head, tail;
  size_t begin = 0, end = all.size(), used = 0;
  for (; begin < end && used + width_of(all[begin]) <= front; ++begin) {
    used += width_of(all[begin]);
    head += all[begin].bytes;
  }
  for (used = front; end > begin && used + width_of(all[end - 1]) <= room; --end) used += width_of(all[end - 1]);
  for (; end < all.size(); ++end) tail += all[end].bytes;
  return head + std::string(mark) + tail;
}

std::string xml(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

double hundredths(double x) { return std::round(x * 100) / 100; }

}  // namespace ds::chart
