// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text of bytes from elsewhere.

#include <cstddef>
#include <string_view>

namespace ds {

// Length of the UTF-8 sequence that begins a text; 0: none does. (RFC 3629: no surrogates, nothing overlong.)
std::size_t utf8_length(std::string_view text) noexcept;

}  // namespace ds
