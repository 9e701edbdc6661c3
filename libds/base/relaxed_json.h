// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON as people write configurations, of which Hjson (hjson.github.io) has the rules: beside what base/json takes, '#'
// comments, commas before '}' and ']', keys without quotes, and strings in single quotes. Values without quotes, and
// lines without commas, are mistakes here: they hide typing errors.

#include "base/json.h"

namespace ds {

// As parse_json, with places in the text as it stands. What is JSON means the same here.
JsonDocument parse_relaxed_json(std::string_view text, std::string_view name, const JsonOptions& options = {});

}  // namespace ds
