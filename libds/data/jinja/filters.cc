// SPDX-License-Identifier: Apache-2.0
// The filters of jinja2 and, for tojson, of transformers.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "data/jinja/format.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/tables.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

void require_value(const Value& value) {
  if (value.is<Undefined>()) throw Error(Errc::Config, *value.as<Undefined>().message);
}

bool is_safe_text(const Value& value) { return value.is_text() && value.as_text().is_safe; }

// A filter of str(value), which stays safe where that is.
template <std::string (*Change)(std::string_view)>
Value change_text(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a filter of text", {});
  const std::string text = in.string(self);
  in.budget().step(static_cast<i64>(text.size()));
  return in.text(Change(text), is_safe_text(self));
}

// Jinja's own title case, of words that any of -, (, {, [, < and white space
// separate.
std::string filter_title(std::string_view text) {
  std::string out;
  const auto is_separator = [](char32_t c) {
    return is_space(c) || std::u32string_view(U"-({[<").find(c) != std::u32string_view::npos;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (is_separator(tokenizer::next_char(text, at))) {
      out += text.substr(begin, at - begin);
      continue;
    }
    const size_t second = at;
    for (size_t next = at; next < text.size() && !is_separator(tokenizer::next_char(text, next)); at = next) {
    }
    out += upper_case(text.substr(begin, second - begin)) + lower_case(text.substr(second, at - second));
  }
  return out;
}

Value title(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "title", {});
  const std::string text = in.string(self);
  in.budget().step(static_cast<i64>(text.size()));
  return in.text(filter_title(text));
}

Value trim(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "trim", {"chars"});
  const std::string text = in.string(self);
  if (bound.is_none(0)) return in.text(std::string(strip_end(strip_begin(text))), is_safe_text(self));
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(1 + bound.text(0).size() / 64));
  return in.text(std::string(strip_chars(text, bound.text(0), true, true)), is_safe_text(self));
}

Value string(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "string", {});
  return self.is_text() ? self : in.text(in.string(self));
}

Value safe(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "safe", {});
  return in.text(in.string(self), true);
}

Value escape(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "escape", {});
  return is_safe_text(self) ? self : in.text(escape_html(in.budget(), in.string(self)), true);
}

Value replace_text(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "replace", {"old", "new", "count"}, 2);
  const i64 most = bound.is_none(2) ? -1 : bound.integer(2, -1);
  return in.text(replaced(in.budget(), in.string(self), in.string(bound[0]), in.string(bound[1]), most));
}

Value center(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "center", {"width"});
  return in.text(justified(in.budget(), in.string(self), bound.integer(0, 80), " ", 'c'), is_safe_text(self));
}

Value indent(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "indent", {"width", "first", "blank"});
  DS_CHECK(self.is_text(), Errc::Config, "the filter indent needs a string, not a value of type {}", type_name(self));
  Builder blanks(in.budget());
  if (bound.has(0) && bound[0].is_text()) {
    blanks.add(bound.text(0));
  } else {
    blanks.repeat(" ", bound.integer(0, 4));
  }
  const std::string source = self.as_text().bytes + "\n";
  Builder out(in.budget());
  if (bound.flag(1)) out.add(blanks.text());
  bool is_first = true;
  for (const std::string_view line : split_lines(source, false)) {
    if (!std::exchange(is_first, false)) {
      out.add('\n');
      if (!line.empty() || bound.flag(2)) out.add(blanks.text());
    }
    out.add(line);
  }
  return in.text(out.finish(), self.as_text().is_safe);
}

Value format_values(Interpreter& in, const Value& self, Arguments& arguments) {
  DS_CHECK(arguments.positional.empty() || arguments.named.empty(), Errc::Config,
           "the filter format takes values or named values, not both");
  std::vector<std::pair<Value, Value>> named;
  for (auto& [name, value] : arguments.named) named.emplace_back(in.text(name), value);
  const Value form = in.text(in.string(self));
  const Value values = named.empty() ? in.list(arguments.positional, List::Kind::Tuple) : in.dict(std::move(named));
  return in.text(format_percent(in, form.as_text(), values));
}

Value to_json(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.ascii = bound.flag(0), .sorted = bound.flag(3)};
  if (!bound.is_none(1)) {
    const bool is_text = bound[1].is_text();
    style.indent =
        is_text ? bound.text(1) : std::string(static_cast<size_t>(std::clamp<i64>(bound.integer(1, 0), 0, 1000)), ' ');
    style.between = ",";
  }
  if (!bound.is_none(2)) {
    const std::vector<Value> two = in.elements(bound[2]);
    DS_CHECK(two.size() == 2 && two[0].is_text() && two[1].is_text(), Errc::Config,
             "separators of tojson must be two strings");
    style.between = two[0].as_text().bytes;
    style.after_key = two[1].as_text().bytes;
  }
  Builder out(in.budget());
  write_json(out, self, style);
  return in.text(out.finish());
}

// Numbers
// -------------------------------------------------------------------------------------------------------------

Value to_integer(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "int", {"default", "base"});
  require_value(self);
  const Value otherwise = bound.has(0) ? bound[0] : Value(i64{0});
  if (self.is_integer()) return Value(self.as_integer());
  std::optional<double> real;
  if (self.is_text()) {
    if (const auto value = parse_integer(self.as_text().bytes, bound.integer(1, 10))) return Value(*value);
    real = parse_real(self.as_text().bytes);
  } else if (self.is<double>()) {
    real = self.as<double>();
    DS_CHECK(!std::isinf(*real), Errc::Config, "an infinite number is no integer");
  }
  if (!real || !std::isfinite(*real)) return otherwise;
  DS_CHECK(std::abs(*real) < 9.2e18, Errc::Unavailable, "an integer of more than 64 bits is not supported");
  return Value(static_cast<i64>(*real));
}

Value to_real(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "float", {"default"});
  require_value(self);
  if (self.is_number()) return Value(self.as_real());
  if (self.is_text())
    if (const auto value = parse_real(self.as_text().bytes)) return Value(*value);
  return bound.has(0) ? bound[0] : Value(0.0);
}

Value absolute(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "abs", {});
  require_value(self);
  DS_CHECK(self.is_number(), Errc::Config, "the filter abs needs a number, not a value of type {}", type_name(self));
  if (self.is<double>()) return Value(std::abs(self.as<double>()));
  return self.as_integer() < 0 ? in.operate("-", Value(i64{0}), self) : Value(self.as_integer());
}

Value rounded(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "round", {"precision", "method"});
  require_value(self);
  DS_CHECK(self.is_number(), Errc::Config, "the filter round needs a number, not a value of type {}", type_name(self));
  const i64 precision = bound.integer(0, 0);
  const std::string method = bound.has(1) ? bound.text(1) : "common";
  DS_CHECK(method == "common" || method == "ceil" || method == "floor", Errc::Config,
           "the method of round must be common, ceil or floor");
  DS_CHECK(precision >= 0 && precision <= 300, Errc::Unavailable, "round to {} digits is not supported", precision);
  if (method == "common") {
    if (self.is_integer()) return Value(self.as_integer());
    return Value(parse_real(fmt::format("{:.{}f}", self.as<double>(), precision)).value_or(self.as<double>()));
  }
  const double scale = std::pow(10.0, static_cast<double>(precision)), scaled = self.as_real() * scale;
  DS_CHECK(std::isfinite(scaled), Errc::Config, "an infinite number cannot be rounded");
  return in.operate("/", Value(method == "ceil" ? std::ceil(scaled) : std::floor(scaled)), Value(scale));
}

// Sequences
// -----------------------------------------------------------------------------------------------------------

Value length(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "length", {});
  if (self.is<Undefined>()) return Value(i64{0});
  if (self.is_text()) return Value(self.as_text().num_chars);
  if (self.is_dict()) return Value(static_cast<i64>(self.as_dict().members.size()));
  DS_CHECK(self.is_list() && !self.as_list().is_generator(), Errc::Config, "a value of type {} has no length",
           type_name(self));
  return Value(static_cast<i64>(self.as_list().items.size()));
}

// The path "a.0.b" of an attribute, or an index.
class Getter {
 public:
  Getter(Interpreter& in, const Value& path) : in_(in) {
    if (path.is<None>()) return;
    if (!path.is_text()) {
      parts_.push_back(path);
      return;
    }
    for (const std::string_view part : split_at(path.as_text().bytes, ".", -1, false))
      parts_.push_back(is_all(part, CharClass::Digit) ? Value(parse_integer(part, 10).value_or(0))
                                                      : in.text(std::string(part)));
  }
  Value operator()(Value value, const Value* otherwise = nullptr) const {
    for (const Value& part : parts_) {
      value = in_.item(value, part);
      if (otherwise != nullptr && value.is<Undefined>()) value = *otherwise;
    }
    return value;
  }

 private:
  Interpreter& in_;
  std::vector<Value> parts_;
};

Value lowered(Interpreter& in, Value value, bool is_case_sensitive) {
  if (is_case_sensitive || !value.is_text()) return value;
  in.budget().step(value.as_text().num_chars);
  return in.text(lower_case(value.as_text().bytes));
}

Value first(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "first", {});
  const std::vector<Value> items = in.elements(self);
  return items.empty() ? Value::undefined("there is no first item, the sequence is empty") : items.front();
}

Value last(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "last", {});
  DS_CHECK(!self.is_list() || !self.as_list().is_generator(), Errc::Config, "a generator has no last item");
  const std::vector<Value> items = in.elements(self);
  return items.empty() ? Value::undefined("there is no last item, the sequence is empty") : items.back();
}

Value to_list(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "list", {});
  return in.list(in.elements(self));
}

Value item_pairs(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "items", {});
  if (self.is<Undefined>()) return in.generator({});
  DS_CHECK(self.is_dict(), Errc::Config, "the filter items needs a mapping, not a value of type {}", type_name(self));
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.as_dict().members) pairs.push_back(in.list({key, value}, List::Kind::Tuple));
  return in.generator(std::move(pairs));
}

Value reverse(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "reverse", {});
  std::vector<Value> items = in.elements(self);
  std::ranges::reverse(items);
  if (!self.is_text()) {
    const bool is_reversible = !self.is<Undefined>() && (!self.is_list() || !self.as_list().is_generator());
    return is_reversible ? in.generator(std::move(items)) : in.list(std::move(items));
  }
  Builder out(in.budget());
  for (const Value& item : items) out.add(item.as_text().bytes);
  return in.text(out.finish(), is_safe_text(self));
}

Value join_texts(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "join", {"d", "attribute"});
  const std::string between = bound.has(0) ? in.string(bound[0]) : std::string();
  const Getter get(in, bound.is_none(1) ? Value() : bound[1]);
  Builder out(in.budget());
  bool is_first = true;
  for (const Value& item : in.elements(self)) {
    if (!std::exchange(is_first, false)) out.add(between);
    write(out, get(item));
  }
  return in.text(out.finish());
}

// Like the next one, jinja2's accepts whatever counts as false, None too, and
// looks at no argument then.
Value map(Interpreter& in, const Value& self, Arguments& arguments) {
  std::vector<Value> mapped;
  if (!truth(self)) return in.generator({});
  if (arguments.positional.empty()) {
    const Bound bound(arguments, "map", {"attribute", "default"}, 1);
    const Getter get(in, bound[0]);
    for (const Value& item : in.elements(self)) mapped.push_back(get(item, bound.is_none(1) ? nullptr : &bound[1]));
    return in.generator(std::move(mapped));
  }
  DS_CHECK(arguments.positional[0].is_text(), Errc::Config, "map needs the name of a filter");
  const std::string name = arguments.positional[0].as_text().bytes;
  for (const Value& item : in.elements(self)) {
    Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.named};
    mapped.push_back(in.filter(name, item, rest));
  }
  return in.generator(std::move(mapped));
}

Value choose(Interpreter& in, const Value& self, Arguments& arguments, bool by_attribute, bool wanted) {
  if (!truth(self)) return in.generator({});
  const size_t skipped = by_attribute ? 1 : 0;
  DS_CHECK(arguments.positional.size() >= skipped, Errc::Config,
           "selectattr and rejectattr need the name of an attribute");
  const Getter get(in, by_attribute ? arguments.positional[0] : Value());
  const bool has_test_name = arguments.positional.size() > skipped;
  DS_CHECK(!has_test_name || arguments.positional[skipped].is_text(), Errc::Config,
           "select and reject need the name of a test");
  std::vector<Value> chosen;
  for (const Value& item : in.elements(self)) {
    const Value value = get(item);
    bool holds = false;
    if (has_test_name) {
      Arguments rest{
          {arguments.positional.begin() + static_cast<std::ptrdiff_t>(skipped) + 1, arguments.positional.end()},
          arguments.named};
      holds = in.test(arguments.positional[skipped].as_text().bytes, value, rest);
    } else {
      holds = truth(value);
    }
    if (holds == wanted) chosen.push_back(item);
  }
  return in.generator(std::move(chosen));
}

std::vector<Value> sorted(Interpreter& in, std::vector<std::pair<Value, Value>> keyed, bool is_descending) {
  std::ranges::stable_sort(keyed, [&](const auto& a, const auto& b) {
    return is_descending ? is_less(in.budget(), b.first, a.first) : is_less(in.budget(), a.first, b.first);
  });
  std::vector<Value> items;
  for (auto& [key, value] : keyed) items.push_back(std::move(value));
  return items;
}

Value sort(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "sort", {"reverse", "case_sensitive", "attribute"});
  std::vector<Getter> getters;
  if (!bound.is_none(2) && bound[2].is_text()) {
    for (const std::string_view path : split_at(bound.text(2), ",", -1, false))
      getters.emplace_back(in, in.text(std::string(path)));
  } else {
    getters.emplace_back(in, bound.is_none(2) ? Value() : bound[2]);
  }
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : in.elements(self)) {
    std::vector<Value> keys;
    for (const Getter& get : getters) keys.push_back(lowered(in, get(item), bound.flag(1)));
    keyed.emplace_back(in.list(std::move(keys)), item);
  }
  return in.list(sorted(in, std::move(keyed), bound.flag(0)));
}

Value sort_dict(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "dictsort", {"case_sensitive", "by", "reverse"});
  require_value(self);
  DS_CHECK(self.is_dict(), Errc::Config, "the filter dictsort needs a mapping, not a value of type {}",
           type_name(self));
  const std::string by = bound.has(1) ? bound.text(1) : "key";
  DS_CHECK(by == "key" || by == "value", Errc::Config, "dictsort sorts by key or value");
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : self.as_dict().members)
    keyed.emplace_back(lowered(in, by == "key" ? key : value, bound.flag(0)), in.list({key, value}, List::Kind::Tuple));
  return in.list(sorted(in, std::move(keyed), bound.flag(2)));
}

Value unique(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "unique", {"case_sensitive", "attribute"});
  const Getter get(in, bound.is_none(1) ? Value() : bound[1]);
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : in.elements(self)) keyed.emplace_back(lowered(in, get(item), bound.flag(0)), item);
  const Value dict = in.dict(keyed);
  std::vector<Value> kept;
  std::unordered_map<const Value*, bool> is_seen;
  for (const auto& [key, item] : keyed)
    if (!std::exchange(is_seen[dict.as_dict().find(key)], true)) kept.push_back(item);
  return in.generator(std::move(kept));
}

Value extreme(Interpreter& in, const Value& self, Arguments& arguments, bool largest) {
  const Bound bound(arguments, largest ? "max" : "min", {"case_sensitive", "attribute"});
  const Getter get(in, bound.is_none(1) ? Value() : bound[1]);
  std::optional<std::pair<Value, Value>> best;
  for (const Value& item : in.elements(self)) {
    Value key = lowered(in, get(item), bound.flag(0));
    if (!best || (largest ? is_less(in.budget(), best->first, key) : is_less(in.budget(), key, best->first)))
      best.emplace(std::move(key), item);
  }
  return best ? best->second : Value::undefined("there is no such item, the sequence is empty");
}

Value sum(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "sum", {"attribute", "start"});
  const Getter get(in, bound.is_none(0) ? Value() : bound[0]);
  Value total = bound.has(1) ? bound[1] : Value(i64{0});
  DS_CHECK(!total.is_text(), Errc::Config, "the filter sum does not join strings");
  for (const Value& item : in.elements(self)) total = in.operate("+", total, get(item));
  return total;
}

Value or_default(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "default", {"default_value", "boolean"});
  if (!self.is<Undefined>() && !(bound.flag(1) && !truth(self))) return self;
  return bound.has(0) ? bound[0] : in.text({});
}

constexpr Entry kFilters[] = {
    {"abs", absolute},
    {"capitalize", change_text<capitalized>},
    {"center", center},
    {"count", length},
    {"d", or_default},
    {"default", or_default},
    {"dictsort", sort_dict},
    {"e", escape},
    {"escape", escape},
    {"first", first},
    {"float", to_real},
    {"format", format_values},
    {"indent", indent},
    {"int", to_integer},
    {"items", item_pairs},
    {"join", join_texts},
    {"last", last},
    {"length", length},
    {"list", to_list},
    {"lower", change_text<lower_case>},
    {"map", map},
    {"max", [](Interpreter& in, const Value& self, Arguments& a) { return extreme(in, self, a, true); }},
    {"min", [](Interpreter& in, const Value& self, Arguments& a) { return extreme(in, self, a, false); }},
    {"reject", [](Interpreter& in, const Value& self, Arguments& a) { return choose(in, self, a, false, false); }},
    {"rejectattr", [](Interpreter& in, const Value& self, Arguments& a) { return choose(in, self, a, true, false); }},
    {"replace", replace_text},
    {"reverse", reverse},
    {"round", rounded},
    {"safe", safe},
    {"select", [](Interpreter& in, const Value& self, Arguments& a) { return choose(in, self, a, false, true); }},
    {"selectattr", [](Interpreter& in, const Value& self, Arguments& a) { return choose(in, self, a, true, true); }},
    {"sort", sort},
    {"string", string},
    {"sum", sum},
    {"title", title},
    {"tojson", to_json},
    {"trim", trim},
    {"unique", unique},
    {"upper", change_text<upper_case>},
};

}  // namespace

Native find_filter(std::string_view name) {
  const auto found = std::ranges::find(kFilters, name, &Entry::name);
  return found == std::end(kFilters) ? nullptr : found->native;
}

}  // namespace ds::jinja
