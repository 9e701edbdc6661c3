// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/regex.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/pattern.h"

namespace ds::tokenizer {
namespace {

constexpr std::string_view kSpace =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
// PCRE2's \w is narrower: no marks, no letters in circles.
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
// Outside brackets, and only there, Oniguruma's has Latin-1's raised digits and fractions.
constexpr std::string_view kBareWord = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";

// Rewrites one expression, left to right.
class Translator {
 public:
  Translator(std::string_view pattern, const Place& place) : in_(pattern), place_(place) {}

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (is_repetition(c)) {
        repetition();
        continue;
      }
      if (const size_t begin = out_.size(); c == ')' && !groups_.empty()) {
        item_ = groups_.back();
        groups_.pop_back();
      } else {
        item_ = begin;
      }
      switch (c) {
        case '\\': escape(false); break;
        case '[': bracket(); break;
        case '(': group(); break;
        case '^':
        case '$': anchor(); break;
        default: character();
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    place_.unsupported(fmt::format("{} in the regular expression '{}' is not supported", what, in_));
  }
  char peek(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }

  // A whole one, so that a repetition is of all its bytes.
  void character() {
    do out_ += in_[at_++];
    while (at_ < in_.size() && (static_cast<u8>(in_[at_]) & 0xC0) == 0x80);
  }

  void escape(bool in_class) {
    const char c = peek(1);
    const auto set = [&](std::string_view members, bool negated) {
      if (!in_class) {
        out_ += fmt::format("[{}{}{}]", negated ? "^" : "", members, members == kWord ? kBareWord : "");
      } else if (!negated) {
        out_ += members;
      } else {
        refuse(fmt::format("'\\{}' in brackets", c));
      }
      at_ += 2;
    };
    switch (c) {
      case 's': return set(kSpace, false);
      case 'S': return set(kSpace, true);
      case 'w': return set(kWord, false);
      case 'W': return set(kWord, true);
      case 'd': return set(R"(\p{Nd})", false);
      case 'D': return set(R"(\p{Nd})", true);
      case 'p':
      case 'P': return property();
      case 'u':
      case 'x': return code_point();
      case 'n':
      case 'r':
      case 't':
      case 'f': break;
      case '\0': place_.corrupt(fmt::format("the regular expression '{}' ends with a backslash", in_));
      default:
        if (static_cast<unsigned char>(c) >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
            (c >= 'a' && c <= 'z'))
          refuse(fmt::format("'\\{}'", c));
    }
    out_ += in_.substr(at_, 2);
    at_ += 2;
  }

  // The start and the end of each line; an empty last line has no start, and has an end.
  void anchor() {
    const char c = in_[at_++];
    if (const char next = peek(); is_repetition(next)) refuse(fmt::format("'{}{}'", c, next));
    out_ += c == '^' ? R"((?:\A|(?<=\n)(?!\z)))" : R"((?=\n|\z))";
  }

  // \p{L}; a name of a script means the script alone, where PCRE2 would take its extensions.
  void property() {
    const size_t close = in_.find('}', at_);
    if (peek(2) != '{' || close == in_.npos) refuse("a property without braces");
    std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    const char* negation = "";
    if (name.starts_with('^')) {
      negation = "^";
      name.remove_prefix(1);
    }
    if (name.empty() || !std::all_of(name.begin(), name.end(), [](char c) {
          return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        }))
      refuse(fmt::format("the property '{}'", name));
    out_ += fmt::format("\\{}{{{}{}{}}}", in_[at_ + 1], negation, name.size() > 2 ? "sc:" : "", name);
    at_ = close + 1;
  }

  void code_point() {
    const bool braces = peek(2) == '{';
    size_t from = at_ + (braces ? 3 : 2), to = from;
    const auto hex = [&](size_t i) {
      return i < in_.size() && std::string_view("0123456789abcdefABCDEF").find(in_[i]) != std::string_view::npos;
    };
    const size_t most = braces ? 6 : in_[at_ + 1] == 'u' ? 4 : 2;
    while (to - from < most && hex(to)) ++to;
    const bool whole = braces ? to > from && to < in_.size() && in_[to] == '}' : to - from == most;
    // \x80 would be a byte.
    if (!whole || (in_[at_ + 1] == 'x' && !braces && in_[from] >= '8')) refuse("a character by number");
    out_ += fmt::format("\\x{{{}}}", in_.substr(from, to - from));
    at_ = to + (braces ? 1 : 0);
  }

  // A bracket inside a bracket adds its members to the outer one's.
  void bracket(bool is_inner = false) {
    ++at_;
    if (!is_inner) out_ += '[';
    if (peek() == '^') {
      if (is_inner) refuse("'[^' inside a bracket");
      out_ += in_[at_++];
    }
    if (is_inner && peek() == ':') refuse("'[:'");
    enum class Before : u8 { Nothing, Character, Set, Hyphen } before = Before::Nothing;
    for (;;) {
      const char c = peek();
      if (c == '\0' && at_ >= in_.size()) place_.corrupt(fmt::format("the regular expression '{}' lacks a ']'", in_));
      if (c == ']') {
        if (before == Before::Nothing) refuse("']' at the start of a bracket");
        ++at_;
        if (!is_inner) out_ += ']';
        return;
      }
      if (c == '&' && peek(1) == '&') refuse("'&&'");
      const bool is_set = c == '[' || (c == '\\' && is_set_escape(peek(1)));
      if (before == Before::Hyphen && is_set) refuse("'-' before a set in a bracket");
      if (c == '-') {
        const bool is_last = peek(1) == ']';
        if (before == Before::Set && !is_last) refuse("'-' after a set in a bracket");
        const bool is_range = before == Before::Character && !is_last;
        out_ += is_range ? "-" : "\\-";
        ++at_;
        before = is_range ? Before::Hyphen : Before::Character;
        continue;
      }
      if (c == '[') {
        bracket(true);
      } else if (c == '\\') {
        escape(true);
      } else {
        out_ += c;
        ++at_;
      }
      before = is_set ? Before::Set : Before::Character;
    }
  }
  static bool is_set_escape(char c) { return std::string_view("sSwWdDpP").find(c) != std::string_view::npos; }

  // (?: (?= (?! (?> and (?i: mean the same in both.
  void group() {
    groups_.push_back(out_.size());
    out_ += in_[at_++];
    if (peek() == '*') refuse("'(*'");  // a command to PCRE2
    if (peek() != '?') return;
    const std::string_view rest = in_.substr(at_ + 1);
    const bool known = rest.starts_with(':') || rest.starts_with('=') || rest.starts_with('!') ||
                       rest.starts_with('>') || rest.starts_with("i:");
    if (!known) refuse(fmt::format("'(?{}'", rest.substr(0, 1)));
    if (rest.starts_with("i:")) refuse_long_folds(rest.substr(2));
    const size_t n = rest.starts_with("i:") ? 3 : 2;
    out_ += in_.substr(at_, n);
    at_ += n;
  }

  // Without case, Oniguruma takes "ss" for a sharp s and "fi" for its ligature; PCRE2 folds single characters.
  void refuse_long_folds(std::string_view rest) const {
    std::string inside;
    for (int depth = 1; !rest.empty(); rest.remove_prefix(1)) {
      depth += rest.front() == '(' ? 1 : rest.front() == ')' ? -1 : 0;
      if (depth == 0) break;
      inside += static_cast<char>(rest.front() >= 'A' && rest.front() <= 'Z' ? rest.front() + 32 : rest.front());
    }
    const auto has = [&](std::string_view part) { return inside.find(part) != inside.npos; };
    for (const std::string_view fold : {"ss", "ff", "fi", "fl", "st"})
      if (has(fold)) refuse(fmt::format("'{}' in '(?i:'", fold));
    const bool is_ascii = std::all_of(inside.begin(), inside.end(), [](char c) { return static_cast<u8>(c) < 0x80; });
    if (!is_ascii || has("\\u") || has("\\x")) refuse("a character outside ASCII in '(?i:'");
  }

  // *, +, ?, {n}, {n,} and {n,m}, with a '?' or '+' that says how. A '?' behind {n} is a second repetition there, and a
  // '+' behind any of the braces is; both mean something else here.
  void repetition() {
    const bool braces = in_[at_] == '{';
    std::string_view count = in_.substr(at_, 1);
    if (braces) {
      const size_t close = in_.find('}', at_);
      const std::string_view inside = close == in_.npos ? "" : in_.substr(at_ + 1, close - at_ - 1);
      const bool digits = !inside.empty() && inside.find_first_not_of("0123456789,") == inside.npos &&
                          inside.front() != ',' && std::count(inside.begin(), inside.end(), ',') <= 1;
      if (!digits) refuse("'{'");
      count = in_.substr(at_, close + 1 - at_);
      check_bounds(inside);
    }
    at_ += count.size();
    const char how = peek() == '?' || peek() == '+' ? in_[at_++] : '\0';
    if (braces && how == '+') refuse("'+' behind '}'");
    if (is_repetition(peek())) refuse(fmt::format("'{}' behind a repetition", peek()));
    if (braces && how == '?' && count.find(',') == count.npos) {
      out_ = fmt::format("{}(?:{}{})?", out_.substr(0, item_), out_.substr(item_), count);
    } else {
      out_ += count;
      if (how != '\0') out_ += how;
    }
  }

  static bool is_repetition(char c) { return c == '*' || c == '+' || c == '?' || c == '{'; }

  // The reference takes larger ones, and {2,1} as {1,2} that gives nothing back.
  void check_bounds(std::string_view inside) const {
    constexpr u32 kMost = 65535;  // PCRE2's
    u32 low = 0, high = 0;
    const char* const end = inside.data() + inside.size();
    const auto first = std::from_chars(inside.data(), end, low);
    const bool has_high = first.ptr != end && first.ptr + 1 != end;
    const auto second = has_high ? std::from_chars(first.ptr + 1, end, high) : first;
    if (first.ec != std::errc() || second.ec != std::errc() || std::max(low, high) > kMost || (has_high && high < low))
      refuse(fmt::format("'{{{}}}'", inside));
  }

  std::string_view in_;
  const Place& place_;
  size_t at_ = 0;
  std::string out_;
  size_t item_ = 0;             // where the last item begins in out_: what a repetition repeats
  std::vector<size_t> groups_;  // where the open ones begin in it
};

}  // namespace

struct Regex::Code {
  ds::Pattern compiled;
  std::string pattern;
  Place place;
};

Regex::Regex(std::string_view pattern, const Place& place) {
  constexpr size_t kLongest = 20'000;
  if (pattern.size() > kLongest) place.unsupported(fmt::format("a regular expression of {} bytes", pattern.size()));
  const std::string translated = Translator(pattern, place).run();
  try {
    code_ = std::make_unique<Code>(ds::Pattern(translated, ds::Pattern::Kind::Text), std::string(pattern), place);
  } catch (const Error& e) {
    const std::string what = fmt::format("the regular expression '{}' cannot be compiled: {}", pattern, e.what());
    if (e.code() == Errc::Unavailable) place.unsupported(what);
    place.corrupt(what);
  }
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

std::optional<std::pair<size_t, size_t>> Regex::find(std::string_view text, size_t at) const {
  try {
    return code_->compiled.find(text, at);
  } catch (const Error& e) {
    code_->place.unsupported(fmt::format("matching the regular expression '{}' against a text of {} bytes: {}",
                                         code_->pattern, text.size(), e.what()));
  }
}

}  // namespace ds::tokenizer
