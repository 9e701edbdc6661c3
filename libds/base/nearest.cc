// SPDX-License-Identifier: Apache-2.0
#include "ds/nearest.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace ds {
namespace {

std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

}  // namespace

i64 edit_distance(std::string_view first, std::string_view second) {
  const std::string a = lower(first), b = lower(second);
  // Three rows of the table of distances between prefixes: two back (for swaps), one back, current.
  std::vector<i64> two_back(b.size() + 1), back(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) back[j] = static_cast<i64>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<i64>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({back[j] + 1, row[j - 1] + 1, back[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], two_back[j - 2] + 1);
    }
    std::swap(two_back, back);
    std::swap(back, row);
  }
  return back[b.size()];
}

bool resembles(std::string_view typed, std::string_view name) {
  constexpr size_t kMaxLength = 64;  // longer than any of our names with typing errors; the table is quadratic
  if (typed.empty() || typed.size() > kMaxLength) return false;
  const std::string a = lower(typed), b = lower(name);
  const std::string& shorter = a.size() < b.size() ? a : b;
  const std::string& longer = a.size() < b.size() ? b : a;
  if (shorter.size() >= 4 && longer.find(shorter) != std::string::npos) return true;
  return edit_distance(a, b) <= static_cast<i64>(std::max<size_t>(1, longer.size() / 3));
}

std::string_view nearest(std::string_view typed, std::span<const std::string_view> candidates) {
  std::string_view best;
  i64 best_distance = std::numeric_limits<i64>::max();
  for (std::string_view c : candidates) {
    if (!resembles(typed, c)) continue;
    if (const i64 d = edit_distance(typed, c); d < best_distance) {
      best = c;
      best_distance = d;
    }
  }
  return best;
}

}  // namespace ds
