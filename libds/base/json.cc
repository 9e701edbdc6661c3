// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <optional>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/content_kind.h"

namespace ds {
namespace {

// Feeds the parser and counts the consumed bytes, which gives our callbacks their position.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* consumed) : at_(at), consumed_(consumed) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*consumed_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }
  friend bool operator!=(const CountingIterator& a, const CountingIterator& b) { return a.at_ != b.at_; }

 private:
  const char* at_;
  size_t* consumed_;
};

// Places serve messages about values that a person wrote. For millions of values, or keys of a megabyte, they would
// take too much memory. A value without a place is reported at the nearest enclosing value that has one.
constexpr size_t kMostPlaces = 100'000, kLongestPath = 1000;

constexpr bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// The run of letters, digits and signs around a byte.
std::string word_at(std::string_view text, size_t at) {
  const auto in_word = [&](size_t i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    return std::isalnum(c) || c == '+' || c == '-' || c == '.' || c == '_';
  };
  size_t begin = at, end = at;
  while (begin > 0 && in_word(begin - 1)) --begin;
  while (end < text.size() && in_word(end)) ++end;
  return std::string(text.substr(begin, std::min<size_t>(end - begin, 40)));
}

struct Mistake {
  size_t offset;
  std::string message;
};

// Rewords the library's parse error for people. Its own text: "[json.exception.parse_error.101] parse error at line 1,
// column 2: syntax error while parsing object key - invalid literal; last read: '{x'; expected string literal".
Mistake mistake_of(std::string_view text, size_t position, const std::string& token,
                   const nlohmann::detail::exception& e) {
  const size_t at = std::min(position > 0 ? position - 1 : 0, text.size());
  const auto previous = [&] {
    size_t i = at;
    while (i > 0 && is_space(text[i - 1])) --i;
    return i > 0 ? text[i - 1] : '\0';
  };
  const char c = at < text.size() ? text[at] : '\0';
  if (e.id == 406)
    return {token.size() <= at + 1 ? at + 1 - token.size() : 0,
            fmt::format("the number {} does not fit a double", token)};
  if (c == '#') return {at, "'#' does not start a comment here; comments are // and /* */"};
  if (c == '\'') return {at, "strings are in double quotes"};
  if ((c == '}' || c == ']') && previous() == ',') return {at, fmt::format("a comma before '{}'", c)};
  std::string what = json_reason(e);
  const bool invalid = what.find("invalid literal") != what.npos || what.find("invalid number") != what.npos;
  if (const std::string word = word_at(text, at); invalid && !word.empty())
    return {at, fmt::format("'{}' is not JSON: numbers are finite decimals, words are true, false and null", word)};
  if (const size_t read = what.find("; last read: '"); read != what.npos) {
    const size_t expected = what.rfind("; expected ");
    what.erase(read, expected != what.npos && expected > read ? expected - read : what.npos);
  }
  if (const size_t dash = what.find(" - "); what.starts_with("syntax error") && dash != what.npos)
    what.erase(0, dash + 3);
  if (what.starts_with("invalid literal")) what.replace(0, 15, at < text.size() ? "this is not JSON" : "the text ends");
  return {at, std::move(what)};
}

std::vector<size_t> line_starts(std::string_view text) {
  std::vector<size_t> starts{0};
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\n') starts.push_back(i + 1);
  return starts;
}

JsonPlace place_at(const std::vector<size_t>& line_starts, size_t offset) {
  const auto line = std::upper_bound(line_starts.begin(), line_starts.end(), offset) - 1;
  return {line - line_starts.begin() + 1, static_cast<i64>(offset - *line) + 1};
}

template <class J>
struct Built {
  J root;
  std::map<std::string, JsonPlace, std::less<>> places;
};

// Builds the document, of ordered or of sorted members, from the parser's events.
template <class J>
class Builder {
 public:
  Builder(std::string_view text, std::string_view name, const JsonOptions& options)
      : text_(text), name_(name), options_(options), lines_(line_starts(text)) {}

  Built<J> build() {
    const CountingIterator begin(text_.data(), &consumed_), end(text_.data() + text_.size(), &consumed_);
    if (std::all_of(text_.begin(), text_.end(), is_space)) fail(0, "no JSON: the text is empty");
    if (const std::string_view kind = kind_of_content(text_); !kind.empty())
      fail(0, fmt::format("this is {}, not JSON", kind));
    J::sax_parse(begin, end, this, nlohmann::detail::input_format_t::json, true, options_.comments);
    return std::move(document_);
  }

  bool null() { return value(nullptr); }
  bool boolean(bool x) { return value(x); }
  bool number_integer(typename J::number_integer_t x) { return value(x); }
  bool number_unsigned(typename J::number_unsigned_t x) { return value(x); }
  bool number_float(typename J::number_float_t x, const std::string& token) {
    // The parser refuses numbers that are too large, and turns those that are too small into zero.
    const std::string_view digits = std::string_view(token).substr(0, token.find_first_of("eE"));
    if (x == 0 && digits.find_first_of("123456789") != digits.npos)
      fail(end_of_token() - token.size(), fmt::format("the number {} does not fit a double", token));
    return value(x);
  }
  bool string(std::string& x) { return value(std::move(x)); }
  bool binary(typename J::binary_t&) { return false; }  // not in text
  bool start_object(size_t) { return open(J::object()); }
  bool start_array(size_t) { return open(J::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& k) {
    const size_t at = string_start(consumed_);
    key_path_ = noted(stack_.back().path, k.size(), at, [&](const std::string& path) { return json_member(path, k); });
    if (!add_member(k)) fail(at, fmt::format("duplicate key {}", J(k).dump()));
    return true;
  }

  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception& e) {
    refuse_json(text_, name_, options_.error, position, token, e);
    return false;
  }

 private:
  struct Level {
    J* value;
    std::optional<std::string> path;       // empty: neither the value nor anything inside it has a place
    std::unordered_set<std::string> keys;  // of an object with ordered members, if it has many
  };

  // Returns false for a duplicate name. Ordered members are appended without a search if `keys` knows all names.
  bool add_member(std::string& name) {
    typename J::object_t& object = stack_.back().value->template get_ref<typename J::object_t&>();
    if constexpr (std::is_same_v<J, Json>) {
      constexpr size_t kFew = 16;
      std::unordered_set<std::string>& keys = stack_.back().keys;
      const auto same = [&](const auto& member) { return member.first == name; };
      if (object.size() < kFew) {
        if (std::any_of(object.begin(), object.end(), same)) return false;
      } else {
        if (keys.empty()) std::ranges::for_each(object, [&](const auto& member) { keys.insert(member.first); });
        if (!keys.insert(name).second) return false;
      }
      key_target_ = &object.emplace_back(std::move(name), nullptr).second;
      return true;
    } else {
      const auto [member, added] = object.try_emplace(std::move(name), nullptr);
      key_target_ = &member->second;
      return added;
    }
  }

  J& place_of_next_value() {
    if (stack_.empty()) return document_.root;
    Level& top = stack_.back();
    if (!top.value->is_array()) {
      value_path_ = std::move(key_path_);
      return *key_target_;
    }
    const size_t index = top.value->size();
    value_path_ = noted(top.path, 0, top.path ? value_start() : 0,
                        [&](const std::string& path) { return json_element(path, index); });
    return top.value->template get_ref<typename J::array_t&>().emplace_back(nullptr);
  }

  template <class T>
  bool value(T&& x) {
    place_of_next_value() = std::forward<T>(x);
    end_of_previous_ = end_of_token();
    return true;
  }

  bool open(J empty) {
    if (std::ssize(stack_) >= options_.max_depth)
      fail(consumed_ - 1, fmt::format("nested deeper than {} levels", options_.max_depth));
    J& at = place_of_next_value();
    at = std::move(empty);
    if (stack_.empty() && options_.places) value_path_ = "";
    stack_.push_back({&at, std::move(value_path_), {}});
    end_of_previous_ = consumed_;
    return true;
  }

  bool close() {
    stack_.pop_back();
    end_of_previous_ = consumed_;
    return true;
  }

  // The parser has read one character past a number.
  size_t end_of_token() const {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const bool past = consumed_ >= 2 && is_digit(text_[consumed_ - 2]) && !is_digit(text_[consumed_ - 1]);
    return past && text_[consumed_ - 1] != '"' ? consumed_ - 1 : consumed_;
  }

  // First byte of an element, found from the end of the previous token by skipping commas, blanks and comments.
  size_t value_start() const {
    size_t i = end_of_previous_;
    while (i < text_.size()) {
      if (is_space(text_[i]) || text_[i] == ',') {
        ++i;
      } else if (text_.substr(i, 2) == "//") {
        i = std::min(text_.find('\n', i), text_.size());
      } else if (text_.substr(i, 2) == "/*") {
        i = std::min(text_.find("*/", i + 2), text_.size() - 2) + 2;
      } else {
        break;
      }
    }
    return i;
  }

  // The opening quote of the string that ends before `end`: the last quote before the closing one that is not escaped
  // by an odd run of backslashes.
  size_t string_start(size_t end) const {
    for (size_t i = end - 2;; --i) {
      if (text_[i] != '"') continue;
      size_t backslashes = 0;
      while (backslashes < i && text_[i - 1 - backslashes] == '\\') ++backslashes;
      if (backslashes % 2 == 0) return i;
    }
  }

  // Records the place of a value, if it has one. `more`: how many bytes longer its path is than its parent's.
  template <class F>
  std::optional<std::string> noted(const std::optional<std::string>& parent, size_t more, size_t offset, F&& path_in) {
    if (!parent || parent->size() + more > kLongestPath || document_.places.size() >= kMostPlaces) return std::nullopt;
    std::string path = path_in(*parent);
    document_.places.emplace(path, place_at(lines_, offset));
    return path;
  }

  [[noreturn]] void fail(size_t offset, const std::string& message) const {
    throw JsonError(options_.error, name_, place_at(lines_, offset), message);
  }

  std::string_view text_;
  std::string_view name_;
  JsonOptions options_;
  std::vector<size_t> lines_;
  size_t consumed_ = 0;
  size_t end_of_previous_ = 0;
  Built<J> document_;
  std::vector<Level> stack_;
  std::optional<std::string> key_path_, value_path_;
  J* key_target_ = nullptr;
};

template <class J>
Built<J> parse(std::string_view text, std::string_view name, const JsonOptions& options) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  return Builder<J>(text, name, options).build();
}

}  // namespace

JsonError::JsonError(Errc code, std::string_view name, JsonPlace place, const std::string& message)
    : Error(code, fmt::format("{}:{}:{}: {}", name, place.line, place.column, message)),
      place_(place),
      message_(message) {}

JsonDocument parse_json(std::string_view text, std::string_view name, const JsonOptions& options) {
  Built<Json> built = parse<Json>(text, name, options);
  return {std::move(built.root), std::move(built.places)};
}

nlohmann::json parse_sorted_json(std::string_view text, std::string_view name, const JsonOptions& options) {
  JsonOptions without_places = options;
  without_places.places = false;
  return parse<nlohmann::json>(text, name, without_places).root;
}

void refuse_json(std::string_view text, std::string_view name, Errc code, size_t position, const std::string& token,
                 const nlohmann::detail::exception& e) {
  const Mistake mistake = mistake_of(text, position, token, e);
  throw JsonError(code, name, place_at(line_starts(text), mistake.offset), mistake.message);
}

std::string json_reason(const nlohmann::detail::exception& e) {
  std::string_view what(e.what());  // "[json.exception.type_error.302] type must be string, but is number"
  if (what.starts_with('[')) what.remove_prefix(std::min(what.find("] ") + 2, what.size()));
  if (what.starts_with("parse error")) what.remove_prefix(std::min(what.find(": ") + 2, what.size()));
  return std::string(what);
}

std::string json_member(std::string_view path, std::string_view key) {
  const auto blurs = [](unsigned char c) {
    return c <= ' ' || c == 127 || std::string_view(".[]\"").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!key.empty() && std::none_of(key.begin(), key.end(), blurs)) return json_join(path, key);
  return json_join(path, Json(key).dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::string json_join(std::string_view path, std::string_view below) {
  return path.empty() ? std::string(below) : fmt::format("{}.{}", path, below);
}

std::string json_element(std::string_view path, size_t index) { return fmt::format("{}[{}]", path, index); }

i64 json_integer(const Json& object, const char* key, i64 low, i64 high) {
  const Json& value = object.at(key);
  const bool fits = value.is_number_unsigned() ? std::in_range<i64>(value.get<u64>()) : value.is_number_integer();
  if (!fits || value.get<i64>() < low || value.get<i64>() > high)
    throw Error(Errc::Config, fmt::format("{} must be an integer, {} to {}", key, low, high));
  return value.get<i64>();
}

double shortest_decimal(float x) {
  char text[32];
  const auto end = std::to_chars(std::begin(text), std::end(text), x).ptr;
  double y = 0;
  std::from_chars(std::begin(text), end, y);
  return y;
}

}  // namespace ds
