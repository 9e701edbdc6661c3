// SPDX-License-Identifier: Apache-2.0
#include "ds/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "base/utf8.h"

namespace ds {
namespace {

// C1, since U+009B starts a terminal escape as ESC [ does; marks and overrides of direction, since they let a text read
// as another (CVE-2021-42574); tags (U+E0000), since they are invisible; U+FFFE and U+FFFF, since XML does not allow
// them.
bool is_printable(u32 code) {
  constexpr std::array<std::pair<u32, u32>, 10> kEscaped = {{{0x00, 0x1f},
                                                             {0x7f, 0x9f},
                                                             {0x061c, 0x061c},
                                                             {0x200e, 0x200f},
                                                             {0x2028, 0x202e},
                                                             {0x2066, 0x2069},
                                                             {0xfeff, 0xfeff},
                                                             {0xfff9, 0xfffb},
                                                             {0xfffe, 0xffff},
                                                             {0xe0000, 0xe007f}}};
  return std::none_of(kEscaped.begin(), kEscaped.end(),
                      [&](const auto& r) { return code >= r.first && code <= r.second; });
}

bool is_plain(char c) { return c >= 0x20 && c < 0x7f; }

bool stays(Breaks breaks, std::string_view rest) {
  if (breaks == Breaks::None) return false;
  return rest[0] == '\t' || (rest[0] == '\n' && (breaks == Breaks::All || rest.starts_with("\n  ")));
}

void append_escaped(std::string& out, const Utf8Character& c) {
  const auto to = std::back_inserter(out);
  if (c.code == kNotUtf8) {
    fmt::format_to(to, "\\x{:02x}", static_cast<unsigned char>(c.bytes[0]));
  } else if (c.code == '\n' || c.code == '\r' || c.code == '\t') {
    out += c.code == '\n' ? "\\n" : c.code == '\r' ? "\\r" : "\\t";
  } else if (c.code < 0x80) {
    fmt::format_to(to, "\\x{:02x}", c.code);
  } else if (c.code < 0x10000) {
    fmt::format_to(to, "\\u{:04x}", c.code);
  } else {
    fmt::format_to(to, "\\U{:08x}", c.code);
  }
}

}  // namespace

std::string printable(std::string_view text, Breaks breaks) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto plain = static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_plain) - text.begin());
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const Utf8Character c = first_character(text);
    if (stays(breaks, text) || (c.code != kNotUtf8 && is_printable(c.code))) {
      out += c.bytes;
    } else {
      append_escaped(out, c);
    }
    text.remove_prefix(c.bytes.size());
  }
  return out;
}

std::string shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  const auto inside = [&](size_t i) { return i < text.size() && (text[i] & 0xc0) == 0x80; };  // inside a character
  size_t head = most * 2 / 3, tail = text.size() - (most - head);
  while (head > 0 && inside(head)) --head;
  while (inside(tail)) ++tail;
  return fmt::format("{} ... ({} bytes) ... {}", text.substr(0, head), text.size(), text.substr(tail));
}

std::string quoted_lines(std::string_view text) {
  std::string out;
  while (text.ends_with('\n') || text.ends_with('\r')) text.remove_suffix(1);
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    out.append("\n  | ").append(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

std::string printable_json(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  while (!json.empty()) {
    const Utf8Character c = first_character(json);
    if (c.code < 0x20 || is_printable(c.code) || c.code == kNotUtf8) {  // line breaks between values
      out += c.bytes;
    } else if (c.code < 0x10000) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", c.code);
    } else {  // as a UTF-16 surrogate pair
      fmt::format_to(std::back_inserter(out), "\\u{:04x}\\u{:04x}", 0xd7c0 + (c.code >> 10), 0xdc00 + (c.code & 0x3ff));
    }
    json.remove_prefix(c.bytes.size());
  }
  return out;
}

}  // namespace ds
