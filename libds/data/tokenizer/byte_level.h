// SPDX-License-Identifier: Apache-2.0
#pragma once
// GPT-2's alphabet of bytes: vocabularies write each byte as one printable character (Radford et al., "Language Models
// are Unsupervised Multitask Learners", 2019, and its encoder.py).

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {

// Printable bytes of Latin-1 stand for themselves; the others, in order, for U+0100 and on.
inline const std::array<CodePoint, 256>& byte_alphabet() {
  static const auto table = [] {
    std::array<CodePoint, 256> t{};
    CodePoint next = 0x100;
    for (CodePoint b = 0; b < 256; ++b)
      t[b] = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE ? b : next++;
    return t;
  }();
  return table;
}

inline std::string spelling_of(std::string_view bytes) {
  static const auto spellings = [] {
    std::array<std::string, 256> t;
    for (size_t b = 0; b < 256; ++b) append_char(t[b], byte_alphabet()[b]);
    return t;
  }();
  std::string spelt;
  for (const char c : bytes) spelt += spellings[static_cast<u8>(c)];
  return spelt;
}

// The bytes that `token` stands for; nothing if it has a character outside of the alphabet.
inline std::optional<std::string> bytes_of(std::string_view token) {
  static const auto byte_of = [] {
    std::array<i32, 0x144> t{};
    t.fill(-1);
    for (size_t b = 0; b < 256; ++b) t[byte_alphabet()[b]] = static_cast<i32>(b);
    return t;
  }();
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const CodePoint c = next_char(token, at);
    if (c >= byte_of.size() || byte_of[c] < 0) return std::nullopt;
    bytes += static_cast<char>(byte_of[c]);
  }
  return bytes;
}

}  // namespace ds::tokenizer
