// SPDX-License-Identifier: Apache-2.0
#pragma once
// A pattern in tokenizer.json: {"String": "x"} or {"Regex": "x"}.

#include <string>
#include <string_view>
#include <variant>

#include "data/tokenizer/regex.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {

class Pattern {
 public:
  Pattern(const Json& json, const Place& place) : Pattern(read(json, place)) {}
  explicit Pattern(Regex regex) : what_(std::move(regex)) {}
  explicit Pattern(std::string text) : what_(std::move(text)) {}

  // Calls part(begin, end, is_match) for the matches and the parts between them, in order. An empty match counts, but
  // not where the match before it ends.
  template <class Part>
  void each(std::string_view text, Part&& part) const {
    size_t done = 0;
    bool is_first = true;
    for (size_t at = 0; at <= text.size();) {
      const auto found = find(text, at);
      if (!found) break;
      const auto [begin, end] = *found;
      if (end > begin || end > done || is_first) {
        if (begin > done) part(done, begin, false);
        part(begin, end, true);
        done = end;
        is_first = false;
      }
      at = end > begin ? end : end < text.size() ? end + char_bytes(text, end) : end + 1;
    }
    if (done < text.size()) part(done, text.size(), false);
  }

 private:
  static Pattern read(const Json& json, const Place& place) {
    Fields f(json, place);
    if (f.find("String") != nullptr) {
      std::string text = f.text("String");
      f.done();
      return Pattern(std::move(text));
    }
    const std::string regex = f.text("Regex");
    f.done();
    return Pattern(Regex(regex, place));
  }
  std::optional<std::pair<size_t, size_t>> find(std::string_view text, size_t at) const {
    if (const auto* regex = std::get_if<Regex>(&what_)) return regex->find(text, at);
    const auto& literal = std::get<std::string>(what_);
    const size_t begin = text.find(literal, at);
    if (begin == text.npos) return std::nullopt;
    return std::pair{begin, begin + literal.size()};
  }

  std::variant<Regex, std::string> what_;
};

}  // namespace ds::tokenizer
