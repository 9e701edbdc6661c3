// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cctype>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/utf8.h"

namespace ds::testing {

// Nothing if `text` is well-formed XML of the kind that we write (no comments, no CDATA), else what is wrong.
inline std::optional<std::string> malformed(std::string_view text) {
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(utf8_length(rest))) {
    if (utf8_length(rest) == 0) return "not UTF-8";
    if (static_cast<unsigned char>(rest[0]) < 0x20 && rest[0] != '\n') return "control character";
  }
  std::vector<std::string> open;
  bool had_root = false;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '&') {
      const std::string_view rest = text.substr(at);
      if (!rest.starts_with("&amp;") && !rest.starts_with("&lt;") && !rest.starts_with("&gt;") &&
          !rest.starts_with("&quot;")) {
        return "entity";
      }
    }
    if (text[at] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(text[at]))) return "text outside";
      ++at;
      continue;
    }
    const size_t end = text.find('>', at);
    if (end == std::string_view::npos) return "no >";
    std::string_view tag = text.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag == "!DOCTYPE html" && !had_root) continue;
    if (tag.starts_with('/')) {
      if (open.empty() || open.back() != tag.substr(1)) return "unbalanced: " + std::string(tag);
      open.pop_back();
      continue;
    }
    const bool leaf = tag.ends_with('/');
    if (leaf) tag.remove_suffix(1);
    const std::string name(tag.substr(0, tag.find(' ')));
    if (open.empty() && std::exchange(had_root, true)) return "two roots";
    for (std::string_view rest = tag.substr(name.size()); !rest.empty();) {
      const size_t equals = rest.find("=\""), close = rest.find('"', equals + 2);
      if (rest[0] != ' ' || equals == std::string_view::npos || close == std::string_view::npos) return "attributes";
      if (rest.substr(0, close).find('<') != std::string_view::npos) return "< in an attribute";
      rest.remove_prefix(close + 1);
    }
    if (!leaf) open.push_back(name);
  }
  return open.empty() ? std::nullopt : std::optional("not closed: " + open.back());
}

}  // namespace ds::testing
