// SPDX-License-Identifier: Apache-2.0
#pragma once
// How problems are cut into tiles, and where tiles are in a worker's scratch.

#include <algorithm>

#include "cpu/tile.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

struct Range {
  i64 begin, end;
  i64 size() const noexcept { return end - begin; }
  bool empty() const noexcept { return begin >= end; }
};
inline Range intersect(Range a, Range b) noexcept { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }
// Part `index` of `count` of [0, n), cut at multiples of `unit`.
inline Range part_of(i64 n, i64 unit, i64 index, i64 count) noexcept {
  const i64 units = ceil_div(n, unit);
  return {std::min(n, units * index / count * unit), std::min(n, units * (index + 1) / count * unit)};
}

// Hands out parts of a worker's scratch; without memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) noexcept : memory_(static_cast<float*>(memory)) {}
  float* take(i64 n) noexcept {
    float* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up(n, 16);
    return piece;
  }
  i64 bytes() const noexcept { return used_ * i64{sizeof(float)}; }

 private:
  float* memory_;
  i64 used_ = 0;
};

}  // namespace ds::cpu::DS_ISA_NAMESPACE
