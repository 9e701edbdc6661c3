// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON as people write configurations, with rules from Hjson (hjson.github.io): in addition to base/json it accepts '#'
// comments, trailing commas, keys without quotes, and strings in single quotes. Values without quotes and lines without
// commas are errors, since they would hide typing errors.

#include "base/json.h"

namespace ds {

// Like parse_json, with places in the original text. Valid JSON keeps its meaning.
JsonDocument parse_relaxed_json(std::string_view text, std::string_view name, const JsonOptions& options = {});

}  // namespace ds
