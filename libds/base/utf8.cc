// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

namespace ds {

std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xc2 && first <= 0xdf   ? 2
                             : first >= 0xe0 && first <= 0xef ? 3
                             : first >= 0xf0 && first <= 0xf4 ? 4
                                                              : 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool beyond = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return overlong || beyond ? 0 : length;
}

Utf8Character first_character(std::string_view text) noexcept {
  const std::size_t length = utf8_length(text);
  if (length == 0) return {text.substr(0, 1), kNotUtf8};
  u32 code = static_cast<u8>(text[0]);
  if (length > 1) code &= 0x7fu >> length;
  for (std::size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<u8>(text[i]) & 0x3f);
  return {text.substr(0, length), code};
}

}  // namespace ds
