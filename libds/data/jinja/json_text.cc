// SPDX-License-Identifier: Apache-2.0
// json.dumps, as transformers gives it to templates: without the escapes for
// HTML of Jinja's own filter.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "data/jinja/text.h"
#include "data/jinja/value.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

class JsonWriter {
 public:
  JsonWriter(Builder& out, const JsonStyle& style) : out_(out), style_(style) {}

  void write(const Value& value) {
    out_.budget().step();
    if (value.is<None>()) {
      out_.add("null");
    } else if (value.is<bool>()) {
      out_.add(value.as<bool>() ? "true" : "false");
    } else if (value.is<i64>()) {
      out_.add(fmt::format("{}", value.as<i64>()));
    } else if (value.is<double>()) {
      out_.add(number(value.as<double>()));
    } else if (value.is_text()) {
      string(value.as_text().bytes);
    } else if (value.is_list() &&
               (value.as_list().kind == List::Kind::List || value.as_list().kind == List::Kind::Tuple)) {
      array(value.as_list().items);
    } else if (value.is_dict()) {
      object(value.as_dict());
    } else {
      throw Error(Errc::Config, fmt::format("a value of type {} cannot be written as JSON", type_name(value)));
    }
  }

 private:
  static std::string number(double x) {
    if (std::isnan(x)) return "NaN";
    if (std::isinf(x)) return x < 0 ? "-Infinity" : "Infinity";
    return repr(x);
  }

  void string(std::string_view text) {
    out_.add('"');
    size_t from = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const char32_t c = tokenizer::next_char(text, at);
      const std::string escaped = escape(c);
      if (escaped.empty()) continue;
      out_.add(text.substr(from, begin - from));
      out_.add(escaped);
      from = at;
    }
    out_.add(text.substr(from));
    out_.add('"');
  }

  std::string escape(char32_t c) const {
    switch (c) {
      case '"': return "\\\"";
      case '\\': return "\\\\";
      case '\n': return "\\n";
      case '\r': return "\\r";
      case '\t': return "\\t";
      case '\f': return "\\f";
      case '\b': return "\\b";
      default: break;
    }
    const auto code = static_cast<u32>(c);
    if (code < 0x20 || (style_.ascii && code >= 0x7F && code < 0x10000)) return fmt::format("\\u{:04x}", code);
    if (style_.ascii && code >= 0x10000)
      return fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + ((code - 0x10000) & 0x3FF));
    return {};
  }

  void new_line() {
    if (!style_.indent) return;
    out_.add('\n');
    out_.repeat(*style_.indent, depth_);
  }

  void array(const std::vector<Value>& items) {
    if (items.empty()) return out_.add("[]");
    out_.add('[');
    ++depth_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_.add(style_.between);
      new_line();
      write(items[i]);
    }
    --depth_;
    new_line();
    out_.add(']');
  }

  std::string key_of(const Value& key) const {
    if (key.is_text()) return key.as_text().bytes;
    if (key.is<None>()) return "null";
    if (key.is<bool>()) return key.as<bool>() ? "true" : "false";
    if (key.is<i64>()) return fmt::format("{}", key.as<i64>());
    if (key.is<double>()) return number(key.as<double>());
    throw Error(Errc::Config, fmt::format("a key of type {} cannot be written as JSON", type_name(key)));
  }

  void object(const Dict& dict) {
    if (dict.members.empty()) return out_.add("{}");
    std::vector<const std::pair<Value, Value>*> members;
    for (const auto& member : dict.members) members.push_back(&member);
    if (style_.sorted)
      std::ranges::stable_sort(
          members, [&](const auto* a, const auto* b) { return is_less(out_.budget(), a->first, b->first); });
    out_.add('{');
    ++depth_;
    bool is_first = true;
    for (const auto* member : members) {
      if (!std::exchange(is_first, false)) out_.add(style_.between);
      new_line();
      string(key_of(member->first));
      out_.add(style_.after_key);
      write(member->second);
    }
    --depth_;
    new_line();
    out_.add('}');
  }

  Builder& out_;
  const JsonStyle& style_;
  i64 depth_ = 0;
};

}  // namespace

void write_json(Builder& out, const Value& value, const JsonStyle& style) { JsonWriter(out, style).write(value); }

}  // namespace ds::jinja
