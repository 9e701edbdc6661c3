// SPDX-License-Identifier: Apache-2.0
#include "chart/bar_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "chart/bar_chart_parts.h"
#include "device/memory.h"
#include "ds/printable.h"
#include "ds/units.h"

namespace ds::chart {
namespace {

// Chosen by a search through the terminals' colours: under CIEDE2000, the least difference of any two is 11.9, and of
// neighbours in this order 23, to normal eyes and to simulated protanopia, deuteranopia and tritanopia (Machado 2009).
// All stand out from white and from a dark ground.
struct TagLook {
  Tag tag;
  char letter;
  u32 rgb;
};
constexpr std::array<TagLook, static_cast<size_t>(Tag::Count)> kTagLooks = {{
    {Tag::Params, 'P', 0x005fd7},
    {Tag::Grads, 'G', 0xaf5f5f},
    {Tag::GradAccum, 'g', 0x87afaf},
    {Tag::Master, 'M', 0xafaf00},
    {Tag::Optimizer, 'O', 0x5f5f00},
    {Tag::Offload, 'o', 0xd78700},
    {Tag::Buckets, 'B', 0x00d7ff},
    {Tag::Gathered, 'T', 0x005f5f},
    {Tag::Activations, 'A', 0xffd787},
    {Tag::Logits, 'L', 0x5f87ff},
    {Tag::Workspace, 'W', 0x878700},
    {Tag::Comm, 'C', 0xd7d7d7},
    {Tag::Data, 'D', 0xaf005f},
    {Tag::Scratch, 'S', 0xff8787},
    {Tag::Host, 'H', 0x8787af},
}};
static_assert([] {
  for (size_t i = 0; i < kTagLooks.size(); ++i) {
    if (kTagLooks[i].tag != static_cast<Tag>(i)) return false;
  }
  return true;
}());

// Colours of tags that are not in that list, by order of appearance; the last one is for all further tags.
constexpr std::array<u32, 4> kOtherColours = {0x875f87, 0xd7d700, 0xaf875f, 0x878787};
constexpr std::string_view kOtherLetters = "NXVKEFIJQRUYZabcdefhijklmnpqrstuvwxyz0123456789";

i64 add(i64 a, i64 b) {
  i64 sum = 0;
  DS_CHECK(a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, &sum), Errc::Corrupt,
           "bar chart: bytes that are negative or add up to more than 2^63");
  return sum;
}

i64 times(i64 a, i64 b) {
  i64 product = 0;
  DS_CHECK(b >= 1 && !__builtin_mul_overflow(a, b, &product), Errc::Corrupt,
           "bar chart: counts below one, or bytes that add up to more than 2^63");
  return product;
}

Look look_of_next(const std::string& tag, size_t& others) {
  for (const TagLook& l : kTagLooks) {
    if (tag == tag_name(l.tag)) return {tag, l.letter, l.rgb};
  }
  const size_t i = others++;
  return {tag, i < kOtherLetters.size() ? kOtherLetters[i] : '?', kOtherColours[std::min(i, kOtherColours.size() - 1)]};
}

// "rank 12": what stands before the number, and the number.
struct Numbered {
  std::string_view name;
  i64 number;
};

std::optional<Numbered> numbered(std::string_view label) {
  const size_t at = label.find_last_not_of("0123456789") + 1;  // npos + 1 is 0
  const std::string_view digits = label.substr(at);
  i64 number = 0;
  if (digits.empty() || std::from_chars(digits.data(), digits.data() + digits.size(), number).ec != std::errc{})
    return std::nullopt;
  return Numbered{label.substr(0, at), number};
}

std::string merged_label(const std::vector<Bar>& bars) {
  const std::string &first = bars.front().label, &last = bars.back().label;
  const auto begin = numbered(first);
  for (size_t i = 0; i < bars.size(); ++i) {
    const auto n = numbered(bars[i].label);
    if (!begin || !n || n->name != begin->name || n->number != begin->number + narrow<i64>(i))
      return first + ".." + last;
  }
  std::string name(begin->name);
  if (name.size() > 1 && name.ends_with(' ')) name.insert(name.size() - 1, "s");
  return fmt::format("{}{}-{}", name, begin->number, numbered(last)->number);
}

}  // namespace

BarChart merge_equal(BarChart chart) {
  std::vector<Bar> merged;
  for (size_t begin = 0, end = 0; begin < chart.bars.size(); begin = end) {
    const Bar& first = chart.bars[begin];
    for (end = begin + 1; end < chart.bars.size(); ++end) {
      if (chart.bars[end].predicted != first.predicted || chart.bars[end].measured != first.measured) break;
    }
    const std::vector<Bar> run(chart.bars.begin() + narrow<std::ptrdiff_t>(begin),
                               chart.bars.begin() + narrow<std::ptrdiff_t>(end));
    Bar bar = first;
    if (run.size() > 1) bar.label = merged_label(run);
    for (size_t i = 1; i < run.size(); ++i) {
      bar.worst = bar.worst || run[i].worst;
      bar.count = add(bar.count, run[i].count);
    }
    merged.push_back(std::move(bar));
  }
  chart.bars = std::move(merged);
  return chart;
}

Sums sums_of(const BarChart& chart) {
  Sums sums;
  size_t others = 0;
  const auto add_all = [&](const std::vector<BarSegment>& segments, i64 count, i64 TagSum::*of_tag, i64& of_all) {
    i64 of_bar = 0;
    size_t place = 0;  // of a tag that is new, among the others: after the one before it in its bar
    for (const BarSegment& s : segments) {
      of_bar = add(of_bar, s.bytes);
      if (s.bytes == 0) continue;
      auto at = std::find_if(sums.tags.begin(), sums.tags.end(), [&](const TagSum& t) { return t.look.tag == s.tag; });
      if (at == sums.tags.end()) {
        at = sums.tags.insert(sums.tags.begin() + narrow<std::ptrdiff_t>(place), {.look = look_of_next(s.tag, others)});
      }
      place = narrow<size_t>(at - sums.tags.begin()) + 1;
      (*at).*of_tag = add((*at).*of_tag, times(s.bytes, count));
      of_all = add(of_all, times(s.bytes, count));
    }
    sums.scale = std::max(sums.scale, of_bar);
  };
  for (const Bar& bar : chart.bars) {
    add_all(bar.predicted, bar.count, &TagSum::predicted, sums.predicted);
    add_all(bar.measured, bar.count, &TagSum::measured, sums.measured);
    sums.bars = add(sums.bars, bar.count);
    if (!bar.measured.empty()) sums.measured_bars += bar.count;
    if (is_over(chart, bar.measured.empty() ? bar.predicted : bar.measured)) sums.bars_over += bar.count;
  }
  if (chart.limit) sums.scale = std::max(sums.scale, add(*chart.limit, 0));
  return sums;
}

const Look& look_of(const Sums& sums, const std::string& tag) {
  const auto at = std::find_if(sums.tags.begin(), sums.tags.end(), [&](const TagSum& t) { return t.look.tag == tag; });
  DS_ASSERT(at != sums.tags.end());
  return at->look;
}

i64 total(const std::vector<BarSegment>& segments) {
  i64 sum = 0;
  for (const BarSegment& s : segments) sum += s.bytes;
  return sum;
}

bool is_over(const BarChart& chart, const std::vector<BarSegment>& segments) {
  return chart.limit && total(segments) > *chart.limit;
}

// By the relative luminance of WCAG 2: above 0.179 the contrast with black is the greater one.
bool is_light(u32 rgb) {
  const auto linear = [&](int shift) {
    const double c = static_cast<double>(rgb >> shift & 0xff) / 255;
    return c <= 0.03928 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4);
  };
  return 0.2126 * linear(16) + 0.7152 * linear(8) + 0.0722 * linear(0) > 0.179;
}

std::string share_text(i64 part, i64 whole) {
  if (part == 0 || whole == 0) return "-";
  const double percent = 100 * (static_cast<double>(part) / static_cast<double>(whole));
  return percent < 0.05 ? "<0.1 %" : fmt::format("{:.1f} %", percent);
}

std::string difference_text(i64 measured, i64 predicted) {
  if (measured == predicted) return "exact";
  if (predicted == 0) return "-";
  const double percent =
      100 * (static_cast<double>(measured) - static_cast<double>(predicted)) / static_cast<double>(predicted);
  if (percent > 999) return ">999 %";
  if (std::abs(percent) < 0.05) return "<0.1 %";
  return fmt::format("{:+.1f} %", percent);
}

std::string sum_heading(const Sums& sums) { return sums.bars == 1 ? "tag" : fmt::format("sum of {}", sums.bars); }

std::string limit_text(const BarChart& chart) {
  return fmt::format("{} {}", chart.limit_label.empty() ? "limit" : printable(chart.limit_label),
                     bytes_text(*chart.limit));
}

std::string over_text(const Sums& sums) {
  if (sums.bars_over == 0) return "";
  if (sums.bars == 1) return "over the limit";
  return fmt::format("{} of {} {} over the limit", sums.bars_over, sums.bars, sums.bars_over == 1 ? "is" : "are");
}

}  // namespace ds::chart
