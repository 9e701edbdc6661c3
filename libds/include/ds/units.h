// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers for people.

#include <string>
#include <string_view>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// "1.250 GiB", "63.300 MiB", "0.500 KiB": bytes in the largest unit, of these three, that they fill.
DS_API std::string bytes_text(i64 bytes);

// How a count of a run stands to a number that was predicted: equal to it, or that at most or at least.
enum class Bound : u8 { Exact, AtMost, AtLeast };
// "", "at most", "at least".
constexpr std::string_view bound_text(Bound b) noexcept {
  return b == Bound::AtMost ? "at most" : b == Bound::AtLeast ? "at least" : "";
}

}  // namespace ds
