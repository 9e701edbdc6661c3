// SPDX-License-Identifier: Apache-2.0
#pragma once
// Formats numbers for people.

#include <string>
#include <string_view>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// "1.250 GiB", "63.300 MiB", "0.500 KiB": bytes in the largest of these units that they fill.
DS_API std::string bytes_text(i64 bytes);

// The relation of a measured number to its prediction: equal, at most, or at least.
enum class Bound : u8 { Exact, AtMost, AtLeast };
// Returns "", "at most" or "at least".
constexpr std::string_view bound_text(Bound b) noexcept {
  return b == Bound::AtMost ? "at most" : b == Bound::AtLeast ? "at least" : "";
}

}  // namespace ds
