// SPDX-License-Identifier: Apache-2.0
#include "base/relaxed_json.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ds {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool begins_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$'; }
bool in_word(char c) { return begins_word(c) || (c >= '0' && c <= '9') || c == '-' || c == '.'; }

// Rewrites a text to JSON, byte by byte, keeping its lines.
class Rewriter {
 public:
  explicit Rewriter(std::string_view text) : text_(text) {}

  std::string run() {
    while (at_ < text_.size()) step();
    return std::move(out_);
  }
  bool changed() const noexcept { return changed_; }

  // Maps a place in the rewritten text to the original text. Line numbers are the same.
  JsonPlace original(JsonPlace p) const {
    // The last shift before it, on its line.
    auto it = std::upper_bound(shifts_.begin(), shifts_.end(), std::pair(p.line, p.column),
                               [](const auto& at, const Shift& s) { return at < std::pair(s.line, s.column); });
    if (it == shifts_.begin() || (--it)->line != p.line) return p;
    return {p.line, std::max<i64>(1, p.column - it->by)};
  }

 private:
  // From this column of the rewritten line on, text is shifted by this many columns.
  struct Shift {
    i64 line, column, by;
  };

  void put(char c) {
    out_ += c;
    if (c == '\n') {
      ++line_;
      line_start_ = out_.size();
      shift_ = 0;
    }
  }
  void copy() { put(text_[at_++]); }
  // Inserts a character that the text lacks.
  void insert(char c) {
    put(c);
    changed_ = true;
    shift_by(1);
  }
  void shift_by(i64 n) {
    shift_ += n;
    shifts_.push_back({line_, static_cast<i64>(out_.size() - line_start_) + 1, shift_});
  }
  void replace(char c) {
    ++at_;
    put(c);
    changed_ = true;
  }
  bool starts(std::string_view what) const { return text_.substr(at_).starts_with(what); }

  // Keeps comments that the parser knows and blanks out the others. Returns whether there was a comment.
  bool comment(bool write) {
    const size_t begin = at_;
    if (starts("//") || starts("#")) {
      const bool blank = starts("#");
      while (at_ < text_.size() && text_[at_] != '\n') {
        if (!write)
          ++at_;
        else if (blank)
          replace(' ');
        else
          copy();
      }
    } else if (starts("/*")) {
      const size_t end = std::min(text_.find("*/", at_ + 2), text_.size() - 2) + 2;
      while (at_ < end) write ? copy() : void(++at_);
    }
    return at_ > begin;
  }

  // The next byte outside blanks and comments.
  char peek(size_t from) {
    const size_t here = std::exchange(at_, from);
    while (at_ < text_.size() && (is_space(text_[at_]) ? (++at_, true) : comment(false))) {
    }
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    at_ = here;
    return c;
  }

  void double_quoted() {
    copy();
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\n') {
      if (text_[at_] == '\\') copy();
      if (at_ < text_.size()) copy();
    }
    if (at_ < text_.size()) copy();
  }

  void single_quoted() {
    const size_t line_end = std::min(text_.find('\n', at_), text_.size());
    size_t end = at_ + 1;
    while (end < line_end && text_[end] != '\'') end += text_[end] == '\\' ? 2 : 1;
    if (end >= line_end) return copy();  // unterminated; the parser reports it
    replace('"');
    while (at_ < end) {
      if (text_[at_] == '"') {
        insert('\\');
        copy();
      } else if (starts("\\'")) {
        ++at_;
        shift_by(-1);
        copy();
      } else {
        if (text_[at_] == '\\') copy();
        copy();
      }
    }
    replace('"');
  }

  void word() {
    size_t end = at_;
    while (end < text_.size() && in_word(text_[end])) ++end;
    const bool is_key = key_next_ && peek(end) == ':';
    if (is_key) insert('"');
    while (at_ < end) copy();
    if (is_key) insert('"');
  }

  void step() {
    const char c = text_[at_];
    if (is_space(c)) return copy();
    if (comment(true)) return;
    const char before = std::exchange(before_, c);
    const bool in_object = !open_.empty() && open_.back() == '{';
    key_next_ = in_object && (before == '{' || before == ',');
    if (c == '"') return double_quoted();
    if (c == '\'') return single_quoted();
    if (begins_word(c)) return word();
    if (c == ',') {
      const char next = peek(at_ + 1);
      const bool nothing_before = before == ',' || before == '{' || before == '[' || before == ':';
      if ((next == '}' || next == ']') && !nothing_before) return replace(' ');
    }
    if (c == '{' || c == '[') open_ += c;
    if ((c == '}' || c == ']') && !open_.empty()) open_.pop_back();
    copy();
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string out_, open_;
  char before_ = '\0';  // the previous character outside blanks and comments
  bool key_next_ = false, changed_ = false;
  i64 line_ = 1, shift_ = 0;
  size_t line_start_ = 0;
  std::vector<Shift> shifts_;
};

}  // namespace

JsonDocument parse_relaxed_json(std::string_view text, std::string_view name, const JsonOptions& options) {
  try {
    return parse_json(text, name, options);
  } catch (const JsonError&) {
    if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
    Rewriter rewriter(text);
    const std::string json = rewriter.run();
    if (!rewriter.changed()) throw;
    try {
      JsonDocument document = parse_json(json, name, options);
      for (auto& [path, place] : document.places) place = rewriter.original(place);
      return document;
    } catch (const JsonError& e) {
      throw JsonError(e.code(), name, rewriter.original(e.place()), e.message());
    }
  }
}

}  // namespace ds
