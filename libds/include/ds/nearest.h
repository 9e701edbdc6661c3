// SPDX-License-Identifier: Apache-2.0
#pragma once
// "Did you mean ...?": which of the valid names somebody meant.

#include <span>
#include <string_view>

#include "ds/error.h"
#include "ds/kernels/dtype.h"

namespace ds {

// Insertions, deletions, substitutions and swaps of neighbours (each 1) that turn a into b; bytes, case ignored.
DS_API i64 edit_distance(std::string_view a, std::string_view b);

// True when the distance is small enough for a suggestion: a third of the longer name, or one contains the other.
DS_API bool resembles(std::string_view typed, std::string_view name);

// The candidate that resembles `typed` most, the first of equals; empty when none does.
DS_API std::string_view nearest(std::string_view typed, std::span<const std::string_view> candidates);

}  // namespace ds
