// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>

#include "base/check.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {

using tokenizer::append_char;
using tokenizer::next_char;
using tokenizer::previous_char;

i64 count_chars(std::string_view text) noexcept {
  return std::ranges::count_if(text, [](char c) { return (static_cast<u8>(c) & 0xC0) != 0x80; });
}

size_t byte_of_char(std::string_view text, i64 index) noexcept {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += tokenizer::char_bytes(text, at);
  return at;
}

bool is_space(char32_t c) noexcept {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

namespace {

template <class IsStripped>
std::string_view strip_if(std::string_view text, bool begin, bool end, IsStripped&& is_stripped) {
  while (begin && !text.empty()) {
    size_t at = 0;
    if (!is_stripped(next_char(text, at))) break;
    text.remove_prefix(at);
  }
  while (end && !text.empty()) {
    const size_t last = previous_char(text, text.size());
    size_t at = last;
    if (!is_stripped(next_char(text, at))) break;
    text = text.substr(0, last);
  }
  return text;
}

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }
bool is_capital(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || category(c) == UTF8PROC_CATEGORY_LT; }

// Characters that are lower or upper case though they are no letters of that
// kind (Other_Lowercase, Other_Uppercase).
struct CharRange {
  char32_t first, last;
};
constexpr CharRange kOtherLower[] = {
    {0xAA, 0xAA},     {0xBA, 0xBA},     {0x2B0, 0x2B8},     {0x2C0, 0x2C1},     {0x2E0, 0x2E4},     {0x345, 0x345},
    {0x37A, 0x37A},   {0x1D2C, 0x1D6A}, {0x1D78, 0x1D78},   {0x1D9B, 0x1DBF},   {0x2071, 0x2071},   {0x207F, 0x207F},
    {0x2090, 0x209C}, {0x2170, 0x217F}, {0x24D0, 0x24E9},   {0x2C7C, 0x2C7D},   {0xA69C, 0xA69D},   {0xA770, 0xA770},
    {0xA7F8, 0xA7F9}, {0xAB5C, 0xAB5F}, {0x10780, 0x10780}, {0x10783, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}};
constexpr CharRange kOtherUpper[] = {
    {0x2160, 0x216F}, {0x24B6, 0x24CF}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};

template <class Ranges>
bool is_in(char32_t c, const Ranges& ranges) {
  return std::ranges::any_of(ranges, [&](const CharRange& range) { return c >= range.first && c <= range.last; });
}
bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || (c >= 0x80 && is_in(c, kOtherLower)); }
bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || (c >= 0x80 && is_in(c, kOtherUpper)); }
bool is_cased(char32_t c) { return is_lower(c) || is_upper(c) || category(c) == UTF8PROC_CATEGORY_LT; }

// Case folding of one character, which has several where its upper case has
// several.
std::string folded(char32_t c) {
  std::string text;
  append_char(text, c);
  utf8proc_uint8_t* out = nullptr;
  const auto bytes = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                  static_cast<utf8proc_ssize_t>(text.size()), &out, UTF8PROC_CASEFOLD);
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(out, std::free);
  return bytes < 0 ? text : std::string(reinterpret_cast<char*>(out), static_cast<size_t>(bytes));
}

char32_t simple_upper(char32_t c) { return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))); }
char32_t simple_lower(char32_t c) { return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))); }
char32_t simple_title(char32_t c) { return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))); }

// The characters that one becomes in upper case, more than one for a few: those
// whose folding has several, which utf8proc knows, while it maps single
// characters to single ones.
void append_upper(std::string& out, char32_t c) {
  if (c >= 0x80 && category(c) != UTF8PROC_CATEGORY_LU) {
    const std::string fold = folded(c);
    if (count_chars(fold) > 1) {
      for (size_t at = 0; at < fold.size();) append_char(out, simple_upper(next_char(fold, at)));
      return;
    }
  }
  append_char(out, simple_upper(c));
}

// Title case is that of the first letter of the folding; a Greek iota below its
// vowel stays below.
void append_title(std::string& out, char32_t c) {
  const bool may_be_several = c >= 0x80 && !is_capital(c) && (simple_title(c) == c || c == 0xDF);
  const std::string fold = may_be_several ? folded(c) : std::string();
  if (count_chars(fold) <= 1) return append_char(out, simple_title(c));
  bool is_first = true;
  for (size_t at = 0; at < fold.size();) {
    const char32_t part = next_char(fold, at);
    append_char(out, is_first ? simple_title(part) : part == 0x3B9 && c >= 0x1F80 ? 0x345 : part);
    is_first = is_first && category(part) == UTF8PROC_CATEGORY_LM;
  }
}

// Characters that a search for the end of a word skips (Case_Ignorable, as far
// as words have them).
bool is_ignorable(char32_t c) {
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_ME || kind == UTF8PROC_CATEGORY_CF ||
         kind == UTF8PROC_CATEGORY_LM || kind == UTF8PROC_CATEGORY_SK || c == '\'' || c == '.' || c == ':' ||
         c == 0xB7 || c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027;
}

bool is_final_sigma(std::string_view text, size_t begin, size_t end) {
  size_t at = begin;
  bool after_cased = false;
  while (at > 0) {
    at = previous_char(text, at);
    size_t next = at;
    const char32_t c = next_char(text, next);
    if (is_ignorable(c)) continue;
    after_cased = is_cased(c);
    break;
  }
  if (!after_cased) return false;
  while (end < text.size()) {
    const char32_t c = next_char(text, end);
    if (!is_ignorable(c)) return !is_cased(c);
  }
  return true;
}

void append_lower(std::string& out, std::string_view text, size_t begin, size_t end, char32_t c) {
  if (c == 0x3A3) return append_char(out, is_final_sigma(text, begin, end) ? 0x3C2 : 0x3C3);
  append_char(out, c == 0x130 ? U'i' : simple_lower(c));
  if (c == 0x130) append_char(out, 0x307);
}

bool is_printable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return false;
    case UTF8PROC_CATEGORY_ZS: return c == ' ';
    default: return true;
  }
}

bool is_line_end(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

// Without white space around and single underscores between digits; nothing for
// other underscores.
std::optional<std::string> plain_number(std::string_view text) {
  text = strip_end(strip_begin(text));
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_alnum_at = [&](size_t at) {
      return at < text.size() &&
             ((text[at] >= '0' && text[at] <= '9') || ((text[at] | 32) >= 'a' && (text[at] | 32) <= 'z'));
    };
    if (text[i] != '_') {
      plain += text[i];
    } else if (i == 0 || !is_alnum_at(i - 1) || !is_alnum_at(i + 1)) {
      return std::nullopt;
    }
  }
  return plain;
}

}  // namespace

std::string_view strip_begin(std::string_view text) noexcept { return strip_if(text, true, false, is_space); }
std::string_view strip_end(std::string_view text) noexcept { return strip_if(text, false, true, is_space); }

std::string_view strip_chars(std::string_view text, std::string_view chars, bool begin, bool end) noexcept {
  return strip_if(text, begin, end, [&](char32_t c) {
    for (size_t at = 0; at < chars.size();)
      if (next_char(chars, at) == c) return true;
    return false;
  });
}

std::string upper_case(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) append_upper(out, next_char(text, at));
  return out;
}

std::string lower_case(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    append_lower(out, text, begin, at, c);
  }
  return out;
}

std::string capitalized(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    if (begin == 0) {
      append_title(out, c);
    } else {
      append_lower(out, text, begin, at, c);
    }
  }
  return out;
}

std::string title_case(std::string_view text) {
  std::string out;
  bool is_inside = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    if (is_inside) {
      append_lower(out, text, begin, at, c);
    } else {
      append_title(out, c);
    }
    is_inside = is_cased(c);
  }
  return out;
}

bool is_all(std::string_view text, CharClass wanted) {
  bool has_cased = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    const bool is_decimal = category(c) == UTF8PROC_CATEGORY_ND;
    switch (wanted) {
      case CharClass::Alpha:
        if (!tokenizer::is_letter(c)) return false;
        break;
      case CharClass::Alnum:
        if (!tokenizer::is_letter(c) && !tokenizer::is_number(c)) return false;
        break;
      case CharClass::Digit:
        if (!is_decimal) return false;
        break;
      case CharClass::Space:
        if (!is_space(c)) return false;
        break;
      case CharClass::Upper:
      case CharClass::Lower: {
        const bool is_good = wanted == CharClass::Upper ? is_upper(c) : is_lower(c);
        if (is_cased(c) && !is_good) return false;
        has_cased = has_cased || is_good;
      }
    }
  }
  return wanted == CharClass::Upper || wanted == CharClass::Lower ? has_cased : !text.empty();
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const char32_t c = next_char(text, at);
    if (!is_line_end(c)) continue;
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    lines.push_back(text.substr(begin, (keep ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::vector<std::string_view> split_words(std::string_view text, i64 most, bool from_end) {
  std::vector<std::string_view> parts;
  for (text = from_end ? strip_end(text) : strip_begin(text); !text.empty(); --most) {
    if (most == 0) {
      parts.push_back(from_end ? strip_end(text) : text);
      break;
    }
    size_t cut = from_end ? text.size() : 0;  // the word's end that is not yet known
    while (from_end ? cut > 0 : cut < text.size()) {
      size_t next = from_end ? tokenizer::previous_char(text, cut) : cut;
      const size_t place = next;
      if (is_space(tokenizer::next_char(text, next))) break;
      cut = from_end ? place : next;
    }
    parts.push_back(from_end ? text.substr(cut) : text.substr(0, cut));
    text = from_end ? strip_end(text.substr(0, cut)) : strip_begin(text.substr(cut));
  }
  if (from_end) std::ranges::reverse(parts);
  return parts;
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view separator, i64 most, bool from_end) {
  std::vector<std::string_view> parts;
  for (; most != 0; --most) {
    const size_t at = from_end ? text.rfind(separator) : text.find(separator);
    if (at == text.npos) break;
    parts.push_back(from_end ? text.substr(at + separator.size()) : text.substr(0, at));
    text = from_end ? text.substr(0, at) : text.substr(at + separator.size());
  }
  parts.push_back(text);
  if (from_end) std::ranges::reverse(parts);
  return parts;
}

std::string replaced(Budget& budget, std::string_view text, std::string_view from, std::string_view to, i64 most) {
  Builder out(budget);
  if (most < 0) most = std::numeric_limits<i64>::max();
  budget.step(static_cast<i64>(text.size()) * static_cast<i64>(1 + from.size() / 64) / 16);
  if (from.empty()) {  // between all characters
    size_t at = 0;
    for (; most > 0; --most) {
      out.add(to);
      if (at == text.size()) break;
      const size_t bytes = tokenizer::char_bytes(text, at);
      out.add(text.substr(at, bytes));
      at += bytes;
    }
    out.add(text.substr(at));
    return out.finish();
  }
  for (; most > 0; --most) {
    const size_t at = text.find(from);
    if (at == text.npos) break;
    out.add(text.substr(0, at));
    out.add(to);
    text.remove_prefix(at + from.size());
    budget.step();
  }
  out.add(text);
  return out.finish();
}

std::string justified(Budget& budget, std::string_view text, i64 width, std::string_view fill, char side) {
  const i64 pad = std::max<i64>(width - count_chars(text), 0);
  budget.step(pad);
  const i64 left = side == 'r' ? pad : side == 'l' ? 0 : pad / 2 + (pad & width & 1);  // as Python rounds
  Builder out(budget);
  out.repeat(fill, left);
  out.add(text);
  out.repeat(fill, pad - left);
  return out.finish();
}

std::string repr_of_text(std::string_view text) {
  const bool has_single = text.find('\'') != text.npos;
  const char quote = has_single && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      out += text.substr(begin, at - begin);
    } else {
      const auto code = static_cast<u32>(c);
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    }
  }
  return out + quote;
}

std::string repr(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, x, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const std::string sign = text.starts_with('-') ? "-" : "";
  text.remove_prefix(sign.size());
  const size_t e = text.find('e');
  int exponent = 0;
  const char* const digits_begin = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(digits_begin, text.data() + text.size(), exponent);
  std::string digits(text.substr(0, e));
  std::erase(digits, '.');
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    std::string mantissa = digits.substr(0, 1);
    if (count > 1) mantissa += "." + digits.substr(1);
    return fmt::format("{}{}e{}{:02}", sign, mantissa, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1) return sign + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  return sign + digits.substr(0, static_cast<size_t>(exponent) + 1) + "." +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

std::optional<double> parse_real(std::string_view text) {
  const auto plain = plain_number(text);
  if (!plain) return std::nullopt;
  std::string_view rest = *plain;
  const bool is_negative = rest.starts_with('-');
  if (rest.starts_with('-') || rest.starts_with('+')) rest.remove_prefix(1);
  if (rest.empty() || rest[0] == '-' || rest[0] == '+') return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value, std::chars_format::general);
  if (end != rest.data() + rest.size() || rest.back() == ')') return std::nullopt;
  if (error == std::errc::result_out_of_range) {  // too large or too small: by
                                                  // its exponent
    const size_t e = rest.find_first_of("eE");
    const bool is_small = (e != rest.npos && e + 1 < rest.size() && rest[e + 1] == '-') || rest.starts_with("0.") ||
                          rest.starts_with('.');
    value = is_small ? 0.0 : INFINITY;
  } else if (error != std::errc{}) {
    return std::nullopt;
  }
  return is_negative ? -value : value;
}

std::optional<i64> parse_integer(std::string_view text, i64 base) {
  if (base != 0 && (base < 2 || base > 36)) return std::nullopt;
  const auto plain = plain_number(text);
  if (!plain) return std::nullopt;
  std::string digits = *plain, sign;
  if (digits.starts_with('-') || digits.starts_with('+')) {
    if (digits[0] == '-') sign = "-";
    digits.erase(0, 1);
  }
  const auto has_prefix = [&](char letter) {
    return digits.size() > 2 && digits[0] == '0' && (digits[1] | 32) == letter;
  };
  for (const auto& [letter, of] : {std::pair('x', 16), std::pair('o', 8), std::pair('b', 2)}) {
    if (!has_prefix(letter) || (base != 0 && base != of)) continue;
    base = of;
    digits.erase(0, 2);
    break;
  }
  if (base == 0) {
    if (digits.size() > 1 && digits[0] == '0' && digits.find_first_not_of('0') != digits.npos) return std::nullopt;
    base = 10;
  }
  if (digits.empty() || digits[0] == '-' || digits[0] == '+') return std::nullopt;
  digits = sign + digits;
  i64 value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value, static_cast<int>(base));
  if (stop != end) return std::nullopt;
  DS_CHECK(error != std::errc::result_out_of_range, Errc::Unavailable,
           "an integer of more than 64 bits is not supported");
  if (error != std::errc{}) return std::nullopt;
  return value;
}

}  // namespace ds::jinja
