// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/check.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c); }

std::string with_plain_newlines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      text += '\n';
      if (source.substr(i + 1).starts_with('\n')) ++i;
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view name) : source_(source), name_(name) {}

  std::vector<Lexeme> run() {
    while (at_ < source_.size()) text_and_tag();
    push(Token::End);
    return std::move(lexemes_);
  }

 private:
  [[noreturn]] void fail(std::string_view message, Errc code = Errc::Corrupt) const {
    throw Error(code, fmt::format("{}:{}: {}", name_, line_, message));
  }
  std::string_view rest() const { return source_.substr(at_); }
  bool starts(std::string_view text) const { return rest().starts_with(text); }
  void advance(size_t bytes) {
    line_ += static_cast<int>(std::ranges::count(source_.substr(at_, bytes), '\n'));
    line_begins_ = bytes > 0 && source_[at_ + bytes - 1] == '\n';
    at_ += bytes;
  }
  void push(Token token, std::string_view text = {}) { lexemes_.push_back({token, line_, std::string(text)}); }
  size_t blanks_at(size_t at) const { return at + source_.substr(at).size() - strip_begin(source_.substr(at)).size(); }

  // Text up to `end`, where a tag with this sign begins.
  void push_text(size_t end, char sign, bool is_variable) {
    const std::string_view whole = source_.substr(at_, end - at_);
    std::string_view text = whole;
    if (sign == '-') {
      text = strip_end(text);
    } else if (sign != '+' && !is_variable) {
      const size_t begin = text.rfind('\n') + 1;
      if ((begin > 0 || line_begins_) && strip_begin(text.substr(begin)).empty()) text = text.substr(0, begin);
    }
    if (!text.empty()) push(Token::Text, text);
    advance(whole.size());
  }

  // The bytes of the end of a tag at `at`, with the white space that it takes
  // along; 0: none.
  size_t end_of_tag(size_t at, std::string_view close, bool takes_newline, bool may_keep) const {
    const std::string_view text = source_.substr(at);
    if (text.starts_with('-') && text.substr(1).starts_with(close)) return blanks_at(at + 1 + close.size()) - at;
    if (may_keep && text.starts_with('+') && text.substr(1).starts_with(close)) return 1 + close.size();
    if (!text.starts_with(close)) return 0;
    return close.size() + (takes_newline && text.substr(close.size()).starts_with('\n') ? 1 : 0);
  }

  // The end of a tag that is only this word, {% raw %} or {% endraw %}, at
  // `at`; 0: it is another.
  size_t end_of_word(size_t at, std::string_view word, bool is_end) const {
    size_t i = at + 2;
    if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) ++i;
    i = blanks_at(i);
    if (!source_.substr(i).starts_with(word)) return 0;
    i = blanks_at(i + word.size());
    const size_t bytes = end_of_tag(i, "%}", is_end, is_end);
    return bytes == 0 ? 0 : i + bytes;
  }

  void text_and_tag() {
    size_t begin = at_;
    for (; begin < source_.size(); ++begin) {
      begin = std::min(source_.find('{', begin), source_.size());
      if (begin + 1 < source_.size() && std::string_view("{%#").find(source_[begin + 1]) != std::string_view::npos)
        break;
    }
    if (begin >= source_.size()) {
      push(Token::Text, rest());
      advance(rest().size());
      return;
    }
    const char kind = source_[begin + 1];
    const char after = begin + 2 < source_.size() ? source_[begin + 2] : '\0';
    const char sign = after == '-' || after == '+' ? after : '\0';
    push_text(begin, sign, kind == '{');
    if (const size_t end = kind == '%' ? end_of_word(at_, "raw", false) : 0; end > 0) return raw(end);
    if (kind == '%') push(Token::BlockBegin);
    if (kind == '{') push(Token::VariableBegin);
    advance(sign == '\0' ? 2 : 3);
    if (kind == '#') return comment();
    while (!tag_part(kind == '%')) {
    }
  }

  void raw(size_t begin) {
    advance(begin - at_);
    if (rest().empty()) return;  // for jinja2 no mistake, here and in a comment
    for (size_t at = source_.find("{%", at_); at != source_.npos; at = source_.find("{%", at + 1)) {
      const size_t end = end_of_word(at, "endraw", true);
      if (end == 0) continue;
      const char after = source_[at + 2];
      push_text(at, after == '-' || after == '+' ? after : '\0', false);
      return advance(end - at_);
    }
    fail("{% raw %} has no {% endraw %}");
  }

  void comment() {
    if (rest().empty()) return;
    for (size_t at = at_; at < source_.size(); ++at) {
      at = source_.find_first_of("-+#", at);
      if (at == source_.npos) break;
      if (const size_t bytes = end_of_tag(at, "#}", true, true); bytes > 0) return advance(at + bytes - at_);
    }
    fail("a comment that begins here has no end");
  }

  // Reads one lexeme or white space; returns whether it was the end of the tag.
  bool tag_part(bool is_block) {
    if (at_ >= source_.size()) fail(is_block ? "a tag has no %}" : "an expression has no }}");
    if (open_.empty()) {
      if (const size_t bytes = end_of_tag(at_, is_block ? "%}" : "}}", is_block, is_block); bytes > 0) {
        push(is_block ? Token::BlockEnd : Token::VariableEnd);
        advance(bytes);
        return true;
      }
    }
    const char c = source_[at_];
    if (const size_t blanks = blanks_at(at_); blanks > at_) {
      advance(blanks - at_);
    } else if (is_digit(c)) {
      number();
    } else if (is_name_char(c)) {
      size_t end = at_;
      while (end < source_.size() && is_name_char(source_[end])) ++end;
      push(Token::Name, source_.substr(at_, end - at_));
      advance(end - at_);
    } else if (c == '\'' || c == '"') {
      string(c);
    } else {
      punctuation();
    }
    return false;
  }

  // Digits with single underscores between them from `at` on; returns their
  // end.
  size_t digits(size_t at) const {
    size_t end = at;
    while (end < source_.size() &&
           (is_digit(source_[end]) || (source_[end] == '_' && end > at && is_digit(source_[end - 1]) &&
                                       end + 1 < source_.size() && is_digit(source_[end + 1]))))
      ++end;
    return end;
  }

  void number() {
    const std::string_view text = rest();
    if (text.size() > 2 && text[0] == '0' && std::string_view("bBoOxX").find(text[1]) != std::string_view::npos)
      return based_number(text[1] == 'b' || text[1] == 'B' ? 2 : text[1] == 'o' || text[1] == 'O' ? 8 : 16);
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    const size_t whole = digits(at_);
    size_t end = whole;
    if (!after_dot) {
      if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) end = digits(end + 1);
      if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        size_t exponent = end + 1;
        if (exponent < source_.size() && (source_[exponent] == '-' || source_[exponent] == '+')) ++exponent;
        if (exponent < source_.size() && is_digit(source_[exponent])) end = digits(exponent);
      }
    }
    std::string spelling(source_.substr(at_, end - at_));
    std::erase(spelling, '_');
    Lexeme lexeme{end == whole ? Token::Integer : Token::Real, line_};
    if (end == whole) {
      if (spelling.size() > 1 && spelling[0] == '0' && spelling.find_first_not_of('0') != spelling.npos)
        fail("a number must not begin with 0");
      read(spelling, lexeme.integer, 10);
    } else {
      lexeme.real = parse_real(spelling).value_or(0);
    }
    lexemes_.push_back(std::move(lexeme));
    advance(end - at_);
  }

  void based_number(int base) {
    size_t end = at_ + 2;
    while (end < source_.size() && is_name_char(source_[end])) ++end;
    std::string spelling(source_.substr(at_ + 2, end - at_ - 2));
    std::erase(spelling, '_');
    Lexeme lexeme{Token::Integer, line_};
    read(spelling, lexeme.integer, base);
    lexemes_.push_back(std::move(lexeme));
    advance(end - at_);
  }

  void read(const std::string& digits, i64& value, int base) const {
    const char* const end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
    if (error == std::errc::result_out_of_range)
      fail("an integer of more than 64 bits is not supported", Errc::Unavailable);
    if (error != std::errc{} || stop != end) fail(fmt::format("'{}' is no number", digits));
  }

  void string(char quote) {
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail("a string has no end");
    std::string text;
    for (size_t i = at_ + 1; i < end;)
      if (source_[i] == '\\') {
        escape(text, i, end);
      } else {
        text += source_[i++];
      }
    push(Token::String, text);
    advance(end + 1 - at_);
  }

  // Python's escapes; `i` moves past the one that it is at.
  void escape(std::string& text, size_t& i, size_t end) const {
    constexpr std::string_view kNames = "abfnrtv\\'\"", kMeanings = "\a\b\f\n\r\t\v\\'\"";
    const char c = source_[i + 1];
    i += 2;
    if (c == '\n') return;
    if (const size_t found = kNames.find(c); found != kNames.npos) {
      text += kMeanings[found];
      return;
    }
    const size_t most = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : c >= '0' && c <= '7' ? 3 : 0;
    if (c == 'N') fail("the escape \\N{..} is not supported", Errc::Unavailable);
    if (most == 0) {
      text += '\\';
      --i;  // any other character stands for itself, behind the backslash
      text += source_.substr(i, tokenizer::char_bytes(source_, i));
      i += tokenizer::char_bytes(source_, i);
      return;
    }
    const bool is_octal = most == 3;
    if (is_octal) --i;
    size_t stop = i;
    const auto is_digit_of = [&](char d) {
      return is_octal ? d >= '0' && d <= '7' : is_digit(d) || ((d | 32) >= 'a' && (d | 32) <= 'f');
    };
    while (stop < end && stop - i < most && is_digit_of(source_[stop])) ++stop;
    if (!is_octal && stop - i < most) fail("a string contains an escape that is cut off");
    u32 code = 0;
    std::from_chars(source_.data() + i, source_.data() + stop, code, is_octal ? 8 : 16);
    if (code > 0x10FFFF) fail("a string contains an escape of no character");
    if (code >= 0xD800 && code < 0xE000)
      fail(
          "a string contains half a character (a surrogate), which is not "
          "supported",
          Errc::Unavailable);
    tokenizer::append_char(text, code);
    i = stop;
  }

  void punctuation() {
    static constexpr std::string_view kOperators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "/",
                                                      "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                      ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto found = std::ranges::find_if(kOperators, [&](std::string_view op) { return starts(op); });
    if (found == std::end(kOperators))
      fail(fmt::format("unexpected character '{}'", source_.substr(at_, tokenizer::char_bytes(source_, at_))));
    const char c = found->front();
    if (c == '(' || c == '[' || c == '{') {
      open_ += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open_.empty() || open_.back() != c)
        fail(open_.empty() ? fmt::format("unexpected '{}'", c)
                           : fmt::format("unexpected '{}', expected '{}'", c, open_.back()));
      open_.pop_back();
    }
    push(Token::Operator, *found);
    advance(found->size());
  }

  std::string_view source_, name_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_begins_ = true;
  std::string open_;  // closing brackets that are due
  std::vector<Lexeme> lexemes_;
};

}  // namespace

std::vector<Lexeme> lex(std::string_view source, std::string_view name) {
  const std::string text = with_plain_newlines(source);
  return Lexer(text, name).run();
}

}  // namespace ds::jinja
