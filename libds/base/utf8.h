// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decodes UTF-8 in untrusted bytes.

#include <cstddef>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

// Length of the UTF-8 sequence at the start of a text; 0: invalid. (RFC 3629: no surrogates, no overlong forms.)
std::size_t utf8_length(std::string_view text) noexcept;

constexpr u32 kNotUtf8 = 0xffffffff;

struct Utf8Character {
  std::string_view bytes;
  u32 code;  // kNotUtf8: one byte that starts no valid sequence
};

// Requires a nonempty text.
Utf8Character first_character(std::string_view text) noexcept;

}  // namespace ds
