// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ds {
namespace {

// Feeds the parser and counts what it has consumed, which tells our callbacks where they are.
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

// Places are for messages about a value that a person has written: a text of millions of values, or of values below
// keys of a megabyte, would take memory by the product. What has no place is told at the nearest value around it that
// has.
constexpr size_t kMostPlaces = 100'000, kLongestPath = 1000;

constexpr bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Builds the document from the parser's events.
class Builder {
 public:
  Builder(std::string_view text, std::string_view name, const JsonOptions& options)
      : text_(text), name_(name), options_(options) {
    for (size_t i = 0; i < text.size(); ++i)
      if (text[i] == '\n') lines_.push_back(i + 1);
  }

  JsonDocument build() {
    const CountingIterator begin(text_.data(), &consumed_), end(text_.data() + text_.size(), &consumed_);
    if (std::all_of(text_.begin(), text_.end(), is_space)) fail(0, "there is no JSON here: the text is empty");
    Json::sax_parse(begin, end, this, nlohmann::detail::input_format_t::json, true, options_.comments);
    return std::move(document_);
  }

  bool null() { return value(nullptr); }
  bool boolean(bool x) { return value(x); }
  bool number_integer(Json::number_integer_t x) { return value(x); }
  bool number_unsigned(Json::number_unsigned_t x) { return value(x); }
  bool number_float(Json::number_float_t x, const std::string& token) {
    // The parser refuses what is too large, and makes zero of what is too small.
    const std::string_view digits = std::string_view(token).substr(0, token.find_first_of("eE"));
    if (x == 0 && digits.find_first_of("123456789") != digits.npos)
      fail(end_of_token() - token.size(), fmt::format("the number {} does not fit a double", token));
    return value(x);
  }
  bool string(std::string& x) { return value(std::move(x)); }
  bool binary(Json::binary_t&) { return false; }  // not in text
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& k) {
    const size_t at = string_start(consumed_);
    if (!stack_.back().keys.insert(k).second) fail(at, fmt::format("the key {} is there twice", Json(k).dump()));
    key_path_ = noted(stack_.back().path, k.size(), at, [&](const std::string& path) { return json_member(path, k); });
    // The object is appended to without a search: `keys` knows that the name is new.
    key_target_ = &stack_.back().value->get_ref<Json::object_t&>().emplace_back(std::move(k), nullptr).second;
    return true;
  }

  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception& e) {
    const size_t at = std::min(position > 0 ? position - 1 : 0, text_.size());
    const auto previous = [&] {
      size_t i = at;
      while (i > 0 && is_space(text_[i - 1])) --i;
      return i > 0 ? text_[i - 1] : '\0';
    };
    const char c = at < text_.size() ? text_[at] : '\0';
    if (e.id == 406) {
      const size_t start = token.size() <= at + 1 ? at + 1 - token.size() : 0;
      fail(start, fmt::format("the number {} does not fit a double", token));
    }
    if (c == '#') fail(at, "'#' begins no comment here; comments are // and /* */");
    if (c == '\'') fail(at, "strings are in double quotes");
    if ((c == '}' || c == ']') && previous() == ',') fail(at, fmt::format("a comma before '{}'", c));
    const std::string_view what = e.what();
    const bool invalid = what.find("invalid literal") != what.npos || what.find("invalid number") != what.npos;
    if (const std::string word = word_at(at); invalid && !word.empty())
      fail(at, fmt::format("'{}' is not JSON: numbers are finite decimals, words are true, false and null", word));
    const size_t colon = what.find(": ");
    fail(at, std::string(colon == what.npos ? what : what.substr(colon + 2)));
  }

 private:
  struct Level {
    Json* value;
    std::optional<std::string> path;  // nothing: neither it nor what is in it has a place
    std::unordered_set<std::string> keys;
  };

  Json& place_of_next_value() {
    if (stack_.empty()) return document_.root;
    Level& top = stack_.back();
    if (!top.value->is_array()) {
      value_path_ = std::move(key_path_);
      return *key_target_;
    }
    const size_t index = top.value->size();
    value_path_ = noted(top.path, 0, top.path ? value_start() : 0,
                        [&](const std::string& path) { return json_element(path, index); });
    return top.value->get_ref<Json::array_t&>().emplace_back(nullptr);
  }

  template <class T>
  bool value(T&& x) {
    place_of_next_value() = std::forward<T>(x);
    end_of_previous_ = end_of_token();
    return true;
  }

  bool open(Json empty) {
    if (std::ssize(stack_) >= options_.max_depth)
      fail(consumed_ - 1, fmt::format("nested deeper than {} levels", options_.max_depth));
    Json& at = place_of_next_value();
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

  // The run of letters, digits and signs around a byte.
  std::string word_at(size_t at) const {
    const auto in_word = [&](size_t i) {
      const unsigned char c = static_cast<unsigned char>(text_[i]);
      return std::isalnum(c) || c == '+' || c == '-' || c == '.' || c == '_';
    };
    size_t begin = at, end = at;
    while (begin > 0 && in_word(begin - 1)) --begin;
    while (end < text_.size() && in_word(end)) ++end;
    return std::string(text_.substr(begin, std::min<size_t>(end - begin, 40)));
  }

  // The parser has read one character past a number.
  size_t end_of_token() const {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const bool past = consumed_ >= 2 && is_digit(text_[consumed_ - 2]) && !is_digit(text_[consumed_ - 1]);
    return past && text_[consumed_ - 1] != '"' ? consumed_ - 1 : consumed_;
  }

  // First byte of an element, from the end of what came before it: over commas, blanks and comments.
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

  // The opening quote of the string that ends before `end`: the last quote before the closing one that no odd run of
  // backslashes escapes.
  size_t string_start(size_t end) const {
    for (size_t i = end - 2;; --i) {
      if (text_[i] != '"') continue;
      size_t backslashes = 0;
      while (backslashes < i && text_[i - 1 - backslashes] == '\\') ++backslashes;
      if (backslashes % 2 == 0) return i;
    }
  }

  JsonPlace place(size_t offset) const {
    const auto line = std::upper_bound(lines_.begin(), lines_.end(), offset) - 1;
    return {line - lines_.begin() + 1, static_cast<i64>(offset - *line) + 1};
  }

  // Notes where a value stands: its path, if it has a place. `more`: bytes that it is longer than its parent's.
  template <class F>
  std::optional<std::string> noted(const std::optional<std::string>& parent, size_t more, size_t offset, F&& path_in) {
    if (!parent || parent->size() + more > kLongestPath || document_.places.size() >= kMostPlaces) return std::nullopt;
    std::string path = path_in(*parent);
    document_.places.emplace(path, place(offset));
    return path;
  }

  [[noreturn]] void fail(size_t offset, const std::string& message) const {
    throw JsonError(options_.error, name_, place(offset), message);
  }

  std::string_view text_;
  std::string_view name_;
  JsonOptions options_;
  std::vector<size_t> lines_{0};  // where each line begins
  size_t consumed_ = 0;
  size_t end_of_previous_ = 0;
  JsonDocument document_;
  std::vector<Level> stack_;
  std::optional<std::string> key_path_, value_path_;
  Json* key_target_ = nullptr;
};

}  // namespace

JsonError::JsonError(Errc code, std::string_view name, JsonPlace place, const std::string& message)
    : Error(code, fmt::format("{}:{}:{}: {}", name, place.line, place.column, message)),
      place_(place),
      message_(message) {}

JsonDocument parse_json(std::string_view text, std::string_view name, const JsonOptions& options) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  return Builder(text, name, options).build();
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
