// SPDX-License-Identifier: Apache-2.0
#pragma once
// The layout of the logits of linear_cross_entropy in their workspace.

#include <cstdint>

#include "ds/kernels/ops.h"

namespace ds::cuda {

// Rows of logits at distance `stride`, as many as fit the workspace.
struct LogitsLayout {
  i64 rows, stride;

  // logits: the workspace, of so many rows of V logits.
  static LogitsLayout of(const TensorView& logits, i64 rows, i64 V) noexcept {
    // A vocabulary such as 50257 would leave rows unaligned and their products slow. Therefore use fewer rows with a
    // few unused elements between them, unless there are so few rows that this wastes too much.
    constexpr i64 kUnit = 8, kFewRows = 16;
    const i64 stride = (V + kUnit - 1) / kUnit * kUnit, fit = rows * V / stride;
    if (V % kUnit == 0 || fit < kFewRows || reinterpret_cast<std::uintptr_t>(logits.data) % 16 != 0) return {rows, V};
    return {fit, stride};
  }
};

}  // namespace ds::cuda
