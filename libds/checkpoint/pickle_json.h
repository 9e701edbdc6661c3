// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pickled values as JSON.

#include <optional>

#include "base/json.h"
#include "formats/pickle.h"

namespace ds {

// Whether every key of the Dict is a String.
bool has_string_keys(const PickleValue& dict) noexcept;

// Nothing if the value contains something that JSON cannot hold (tensors, objects, keys other than strings, NaN), is
// nested deeper than 32, or expands to more than 2^20 values and characters (a value may be shared).
std::optional<Json> pickle_json(const PickleValue& value);

}  // namespace ds
