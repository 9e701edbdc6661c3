// SPDX-License-Identifier: Apache-2.0
#pragma once
// "Did you mean ...?": suggests the valid name that is closest to a mistyped one.

#include <span>
#include <string_view>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// The number of insertions, deletions, substitutions and swaps of neighbouring bytes that turn a into b, ignoring case.
DS_API i64 edit_distance(std::string_view a, std::string_view b);

// True if the distance is at most a third of the longer name's length (at least 1), or the shorter name has at least 4
// bytes and is contained in the longer one.
DS_API bool resembles(std::string_view typed, std::string_view name);

// The candidate that resembles `typed` most, the first among equals; empty if none does.
DS_API std::string_view nearest(std::string_view typed, std::span<const std::string_view> candidates);

}  // namespace ds
