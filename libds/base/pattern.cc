// SPDX-License-Identifier: Apache-2.0
#include "base/pattern.h"

#include <array>
#include <locale>
#include <numeric>

namespace ds {

std::regex compile_pattern(std::string_view text) {
  // libstdc++'s scanner narrows characters through a cache of the locale, which is filled without a lock: it is full
  // before the first thread reads it.
  [[maybe_unused]] static const bool filled = [] {
    std::array<char, 256> all{}, narrowed{};
    std::iota(all.begin(), all.end(), '\0');
    std::use_facet<std::ctype<char>>(std::locale()).narrow(all.begin(), all.end(), ' ', narrowed.data());
    return true;
  }();
  return {text.begin(), text.end(), std::regex::ECMAScript | std::regex::icase};
}

}  // namespace ds
