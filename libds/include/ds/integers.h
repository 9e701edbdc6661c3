// SPDX-License-Identifier: Apache-2.0
#pragma once
// Integer arithmetic of sizes. base/check.h has the functions that throw.

#include "ds/kernels/dtype.h"

namespace ds {

constexpr i64 div_ceil(i64 a, i64 b) noexcept { return (a + b - 1) / b; }
constexpr i64 align_up(i64 a, i64 alignment) noexcept { return div_ceil(a, alignment) * alignment; }

}  // namespace ds
