// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/check.h"

namespace ds::tokenizer {
namespace {

// Bytes of the well-formed character at text[at], or, negated, of the maximal part of one (at least 1). Table 3-7 of
// the Unicode standard.
int scan_char(std::string_view text, size_t at) noexcept {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<u8>(text[i]) : u8{0}; };
  const u8 lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  const u8 low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const u8 high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    const u8 b = byte(at + static_cast<size_t>(i));
    if (b < (i == 1 ? low : 0x80) || b > (i == 1 ? high : 0xBF)) return -i;
  }
  return length;
}

// The end of the run of ASCII that starts at `at`.
size_t end_of_ascii(std::string_view text, size_t at) noexcept {
  for (u64 word; at + 8 <= text.size(); at += 8) {
    std::memcpy(&word, text.data() + at, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (at < text.size() && static_cast<u8>(text[at]) < 0x80) ++at;
  return at;
}

utf8proc_category_t category(CodePoint c) noexcept { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

}  // namespace

bool is_utf8(std::string_view text) noexcept {
  for (size_t at = 0; (at = end_of_ascii(text, at)) < text.size();) {
    const int n = scan_char(text, at);
    if (n < 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const int n = scan_char(text, at);
    if (n > 0) {
      out.append(text, at, static_cast<size_t>(n));
    } else {
      append_char(out, 0xFFFD);
    }
    at += static_cast<size_t>(std::abs(n));
  }
  return out;
}

std::string_view whole_characters(std::string_view text) noexcept {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const size_t at = text.size() - back;
    const auto lead = static_cast<u8>(text[at]);
    if (lead >= 0x80 && lead < 0xC0) continue;
    // A lead byte: is what follows it the beginning of a character, and only that?
    const int n = scan_char(text, at);
    const bool unfinished = n < 0 && static_cast<size_t>(-n) == back && lead >= 0xC2 && lead <= 0xF4;
    return unfinished ? text.substr(0, at) : text;
  }
  return text;
}

CodePoint next_char(std::string_view text, size_t& at) noexcept {
  const auto byte = [&](size_t i) { return static_cast<CodePoint>(static_cast<u8>(text[at + i])); };
  const size_t n = char_bytes(text, at);
  CodePoint c = byte(0);
  if (n == 2) c = (c & 0x1F) << 6 | (byte(1) & 0x3F);
  if (n == 3) c = (c & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
  if (n == 4) c = (c & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
  at += n;
  return c;
}

size_t end_of_grapheme(std::string_view text, size_t at) noexcept {
  utf8proc_int32_t state = 0;
  CodePoint before = next_char(text, at);
  while (at < text.size()) {
    size_t next = at;
    const CodePoint c = next_char(text, next);
    const bool is_ascii = before < 0x80 && c < 0x80;
    if (is_ascii ? before != '\r' || c != '\n'
                 : utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(before),
                                                    static_cast<utf8proc_int32_t>(c), &state))
      break;
    before = c;
    at = next;
  }
  return at;
}

size_t previous_char(std::string_view text, size_t at) noexcept {
  do --at;
  while (at > 0 && (static_cast<u8>(text[at]) & 0xC0) == 0x80);
  return at;
}

void append_char(std::string& text, CodePoint c) {
  utf8proc_uint8_t bytes[4];
  const auto n = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(n));
}

bool is_white_space(CodePoint c) noexcept {
  return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_letter(CodePoint c) noexcept {
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

// Characters that Unicode has moved to another category since 8.0 stay where the reference's tables have them.
bool is_mark(CodePoint c) noexcept {
  if (c == 0x111C9) return false;
  const auto k = category(c);
  return (k >= UTF8PROC_CATEGORY_MN && k <= UTF8PROC_CATEGORY_ME) || c == 0x1CF2 || c == 0x1CF3;
}

bool is_nonspacing_mark(CodePoint c) noexcept {
  if (c == 0x1885 || c == 0x1886 || c == 0xA9BD || c == 0x111C9) return false;
  return category(c) == UTF8PROC_CATEGORY_MN || c == 0x1734;
}

bool is_number(CodePoint c) noexcept {
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(CodePoint c) noexcept {
  if (c < 0x80) return (c > 32 && c < '0') || (c > '9' && c < 'A') || (c > 'Z' && c < 'a') || (c > 'z' && c < 127);
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

bool is_other(CodePoint c) noexcept {
  const auto k = category(c);
  return k == UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CF || k == UTF8PROC_CATEGORY_CO;
}

bool is_word(CodePoint c) noexcept {
  const auto k = category(c);
  return is_letter(c) || is_mark(c) || k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL ||
         k == UTF8PROC_CATEGORY_PC || c == 0x200C || c == 0x200D ||
         // Symbols that are Alphabetic: letters in circles and squares.
         (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189);
}

std::string lower_case(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = next_char(text, at);
    if (c < 0x80) {
      out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    } else if (c == 0x130) {  // the one character whose lower case is two
      out += "i\u0307";
    } else {
      append_char(out, static_cast<CodePoint>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
    }
  }
  return out;
}

namespace {

int combining_class(CodePoint c) noexcept {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

// utf8proc orders marks by exchanging neighbours. Where there are very many on one character they are put in order
// before, which changes nothing else (UAX #15: canonical order is stable).
std::string with_marks_in_order(std::string_view text) {
  constexpr size_t kMany = 100;
  std::string out;
  std::vector<CodePoint> run;
  const auto end_run = [&] {
    if (run.size() > kMany)
      std::stable_sort(run.begin(), run.end(),
                       [](CodePoint a, CodePoint b) { return combining_class(a) < combining_class(b); });
    for (const CodePoint c : run) append_char(out, c);
    run.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = next_char(text, at);
    if (combining_class(c) == 0) {
      end_run();
      append_char(out, c);
    } else {
      run.push_back(c);
    }
  }
  end_run();
  return out;
}

}  // namespace

std::string normalize(std::string_view text, Form form) {
  int options = UTF8PROC_STABLE;
  options |= form == Form::NFC || form == Form::NFKC ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == Form::NFKC || form == Form::NFKD) options |= UTF8PROC_COMPAT;
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    // ASCII stays what it is, except that its last character may take marks. No character before ASCII changes with it.
    size_t begin = end_of_ascii(text, at);
    if (begin == text.size()) {
      out.append(text, at);
      break;
    }
    if (begin > at) --begin;
    out.append(text, at, begin - at);
    size_t end = begin + 1;
    while (end < text.size() && static_cast<u8>(text[end]) >= 0x80) ++end;
    const std::string part = with_marks_in_order(text.substr(begin, end - begin));
    utf8proc_uint8_t* mapped = nullptr;
    const auto length =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(part.data()), static_cast<utf8proc_ssize_t>(part.size()),
                     &mapped, static_cast<utf8proc_option_t>(options));
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
    if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
    DS_ASSERT(length >= 0);
    out.append(reinterpret_cast<const char*>(mapped), static_cast<size_t>(length));
    at = end;
  }
  return out;
}

}  // namespace ds::tokenizer
