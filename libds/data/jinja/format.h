// SPDX-License-Identifier: Apache-2.0
#pragma once
// Python's two ways to put values into a text, and HTML's escapes.

#include <string>
#include <string_view>

#include "data/jinja/value.h"

namespace ds::jinja {

class Interpreter;

std::string format_percent(Interpreter& in, const Text& form,
                           const Value& values);  // form % values
std::string format_braces(Interpreter& in, std::string_view form,
                          const Arguments& arguments);  // form.format(..)
std::string escape_html(Budget& budget, std::string_view text);

}  // namespace ds::jinja
