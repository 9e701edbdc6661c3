// SPDX-License-Identifier: Apache-2.0
#pragma once
// The axes of a mesh of ranks.

#include <array>
#include <cstddef>
#include <iterator>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

enum class Axis : u8 {
  Dp,  // and sp, whose ranks have the same parameters
  Sp,
  Tp,
  Pp,
  Outer,  // DiLoCo's workers
  Near,   // the ranks that share ZeRO++'s second shards
  Ep,     // a split of dp of this name, whose ranks have different experts
  Split,  // a split of dp, whose name is the model's
};

inline constexpr std::string_view kAxes[] = {"dp", "sp", "tp", "pp", "outer", "hpz", "ep"};
// One T for each axis but Split.
template <class T>
class ByAxis {
 public:
  constexpr T& operator[](Axis axis) noexcept { return of_[static_cast<size_t>(axis)]; }
  constexpr const T& operator[](Axis axis) const noexcept { return of_[static_cast<size_t>(axis)]; }

 private:
  std::array<T, std::size(kAxes)> of_{};
};

constexpr std::string_view axis_name(Axis axis) noexcept { return kAxes[static_cast<size_t>(axis)]; }

}  // namespace ds
