// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text of bytes from elsewhere.

#include <cstddef>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

// Length of the UTF-8 sequence that begins a text; 0: none does. (RFC 3629: no surrogates, nothing overlong.)
std::size_t utf8_length(std::string_view text) noexcept;

constexpr u32 kNotUtf8 = 0xffffffff;

struct Utf8Character {
  std::string_view bytes;
  u32 code;  // kNotUtf8: one byte that begins no sequence
};

// Of a text that is not empty.
Utf8Character first_character(std::string_view text) noexcept;

}  // namespace ds
