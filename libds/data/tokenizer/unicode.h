// SPDX-License-Identifier: Apache-2.0
#pragma once
// UTF-8 and the properties of characters that tokenizers ask for. Text is valid UTF-8 everywhere below Tokenizer, which
// sees to it.

#include <string>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds::tokenizer {

using CodePoint = char32_t;

bool is_utf8(std::string_view text) noexcept;
// With U+FFFD for each maximal part of what is not UTF-8 (Unicode, chapter 3, "U+FFFD Substitution of Maximal
// Subparts"), as Python's errors="replace" does.
std::string replace_invalid_utf8(std::string_view text);
// The prefix of `text` that ends with a whole character; what cannot become one counts as whole.
std::string_view whole_characters(std::string_view text) noexcept;

// Bytes of the character that starts at text[at].
inline size_t char_bytes(std::string_view text, size_t at) noexcept {
  const auto lead = static_cast<u8>(text[at]);
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}
// The character at text[at]; `at` moves past it.
CodePoint next_char(std::string_view text, size_t& at) noexcept;
// The end of the extended grapheme cluster (UAX #29) that starts at text[at].
size_t end_of_grapheme(std::string_view text, size_t at) noexcept;
// The start of the character that ends at `at` > 0.
size_t previous_char(std::string_view text, size_t at) noexcept;
void append_char(std::string& text, CodePoint c);

bool is_white_space(CodePoint c) noexcept;      // White_Space
bool is_letter(CodePoint c) noexcept;           // L*
bool is_mark(CodePoint c) noexcept;             // M*
bool is_nonspacing_mark(CodePoint c) noexcept;  // Mn
bool is_number(CodePoint c) noexcept;           // N*
bool is_punctuation(CodePoint c) noexcept;      // P*, and all of ASCII's that is no letter, digit or control
bool is_other(CodePoint c) noexcept;            // Cc, Cf, Co
bool is_word(CodePoint c) noexcept;             // \w: Alphabetic, M*, Nd, Pc, Join_Control

// Lower case of each character by itself.
std::string lower_case(std::string_view text);

enum class Form : u8 { NFC, NFD, NFKC, NFKD };
std::string normalize(std::string_view text, Form form);

}  // namespace ds::tokenizer
