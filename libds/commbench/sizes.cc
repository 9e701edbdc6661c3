// SPDX-License-Identifier: Apache-2.0
#include "commbench/sizes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "base/check.h"

namespace ds::commbench {
namespace {

constexpr size_t kMostSizes = 100000;

}  // namespace

i64 parse_size(std::string_view text) {
  struct Unit {
    std::string_view name;
    double bytes;
  };
  static constexpr std::array kUnits = {
      Unit{"", 1},         Unit{"B", 1},    Unit{"K", 0x1p10}, Unit{"KiB", 0x1p10}, Unit{"KB", 1e3}, Unit{"M", 0x1p20},
      Unit{"MiB", 0x1p20}, Unit{"MB", 1e6}, Unit{"G", 0x1p30}, Unit{"GiB", 0x1p30}, Unit{"GB", 1e9}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  const auto same = [](char a, char b) { return (a | 0x20) == (b | 0x20); };
  for (const Unit& u : kUnits) {
    const double bytes = number * u.bytes;
    if (error == std::errc() && std::ranges::equal(unit, u.name, same) && bytes >= 1 && bytes <= 0x1p42 &&
        bytes == std::floor(bytes))
      return static_cast<i64>(bytes);
  }
  throw Error(Errc::Config,
              fmt::format("'{}' is not a size such as 8, 4K, 1M or 128MiB: a whole number of bytes, from 1 to "
                          "4 TiB",
                          text));
}

std::vector<i64> list_sizes(const Options& o) {
  std::vector<i64> sizes;
  for (i64 bytes = o.min_bytes; bytes <= o.max_bytes;) {
    sizes.push_back(bytes);
    DS_CHECK(sizes.size() <= kMostSizes, Errc::Config, "from {} to {} bytes in steps of {} are more than {} sizes",
             o.min_bytes, o.max_bytes, o.step_bytes, kMostSizes);
    if (bytes == o.max_bytes) break;
    bytes = o.step_bytes > 0 ? bytes + o.step_bytes : bytes * o.factor;
  }
  return sizes;
}

i64 whole_count(i64 bytes, i64 element_bytes) noexcept { return bytes / element_bytes; }

i64 slice_count(i64 bytes, i64 element_bytes, int ranks) noexcept {
  const i64 aligned = 16 / element_bytes;
  return bytes / element_bytes / ranks / aligned * aligned;
}

Share uneven_share(int ranks, int from, int to, i64 count) noexcept {
  const auto weight = [&](int q) { return i64{1} + (from + q) % 3; };
  i64 sum = 0;
  for (int q = 0; q < ranks; ++q) sum += weight(q);
  const auto share = [&](int q) { return ranks * count * weight(q) / sum; };
  i64 first = 0;
  for (int q = 0; q < to; ++q) first += share(q);
  return {first, share(to)};
}

}  // namespace ds::commbench
