// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <regex>
#include <string_view>

namespace ds {

// A regular expression of ECMAScript that does not heed case. Any thread may call it. Throws std::regex_error.
std::regex compile_pattern(std::string_view text);

}  // namespace ds
