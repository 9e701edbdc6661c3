// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of pickled values that is JSON.

#include <optional>

#include "base/json.h"
#include "formats/pickle.h"

namespace ds {

// Whether every key of the Dict is a String.
bool has_string_keys(const PickleValue& dict) noexcept;

// Nothing where the value holds what JSON does not (tensors, objects, other keys than strings, NaN), is nested deeper
// than 32, or makes more than 2^20 values and characters (a value may be reached on many ways).
std::optional<Json> pickle_json(const PickleValue& value);

}  // namespace ds
