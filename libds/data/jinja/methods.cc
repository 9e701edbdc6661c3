// SPDX-License-Identifier: Apache-2.0
// The methods of strings, mappings and lists, with the meaning of Python's.
#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "data/jinja/format.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/tables.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

std::string_view bytes_of(const Value& self) { return self.as_text().bytes; }
// The result of a method of a string: safe as that is.
Value like(Interpreter& in, const Value& self, std::string text) {
  return in.text(std::move(text), self.as_text().is_safe);
}
Value like(Interpreter& in, const Value& self, std::string_view text) { return like(in, self, std::string(text)); }

void require_plain(const Value& self, std::string_view method) {
  DS_CHECK(!self.as_text().is_safe, Errc::Unavailable, "'{}' of a text that is marked safe is not supported", method);
}

Value strip(Interpreter& in, const Value& self, Arguments& arguments, bool begin, bool end) {
  const Bound bound(arguments, "strip()", {"chars"});
  const std::string_view text = bytes_of(self);
  in.budget().step(static_cast<i64>(text.size()) / 64);
  if (bound.is_none(0)) return like(in, self, end ? strip_end(begin ? strip_begin(text) : text) : strip_begin(text));
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(1 + bound.text(0).size() / 64));
  return like(in, self, strip_chars(text, bound.text(0), begin, end));
}

Value list_of(Interpreter& in, const Value& self, const std::vector<std::string_view>& parts) {
  std::vector<Value> values;
  for (const std::string_view part : parts) values.push_back(like(in, self, part));
  return in.list(std::move(values));
}

Value split(Interpreter& in, const Value& self, Arguments& arguments, bool from_end) {
  const Bound bound(arguments, "split()", {"sep", "maxsplit"});
  const i64 most = bound.integer(1, -1);
  const std::string_view text = bytes_of(self);
  in.budget().step(static_cast<i64>(text.size()));
  if (bound.is_none(0)) return list_of(in, self, split_words(text, most, from_end));
  const std::string& separator = bound.text(0);
  DS_CHECK(!separator.empty(), Errc::Config, "split() needs a separator that is not empty");
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(separator.size() / 64));
  return list_of(in, self, split_at(text, separator, most, from_end));
}

// Whether the text begins or ends with one of the strings, within
// text[start:end].
Value affix(Interpreter& in, const Value& self, Arguments& arguments, bool at_end) {
  const Bound bound(arguments, at_end ? "endswith()" : "startswith()", {"prefix", "start", "end"}, 1);
  std::string_view text = bytes_of(self);
  if (bound.has(1) || bound.has(2)) {
    const i64 size = self.as_text().num_chars;
    const auto place = [&](i64 at) { return std::clamp(at < 0 ? at + size : at, i64{0}, size); };
    const i64 start = bound.is_none(1) ? 0 : bound.integer(1, 0),
              end = bound.is_none(2) ? size : bound.integer(2, size);
    if (start > size) return Value(false);
    const size_t first = byte_of_char(text, place(start)), last = byte_of_char(text, place(end));
    if (first > last) return Value(false);
    text = text.substr(first, last - first);
  }
  const bool is_tuple = bound[0].is_list() && bound[0].as_list().kind == List::Kind::Tuple;
  for (const Value& wanted : is_tuple ? in.elements(bound[0]) : std::vector<Value>{bound[0]}) {
    DS_CHECK(wanted.is_text(), Errc::Config, "startswith() and endswith() need strings, not a value of type {}",
             type_name(wanted));
    if (at_end ? text.ends_with(bytes_of(wanted)) : text.starts_with(bytes_of(wanted))) return Value(true);
  }
  return Value(false);
}

Value find(Interpreter& in, const Value& self, Arguments& arguments, bool from_end, bool must_exist) {
  const Bound bound(arguments, "find()", {"sub", "start", "end"}, 1);
  const std::string_view text = bytes_of(self);
  const i64 size = self.as_text().num_chars;
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(1 + bound.text(0).size() / 64));
  const auto place = [&](i64 at) { return std::clamp(at < 0 ? at + size : at, i64{0}, size); };
  const i64 start = bound.is_none(1) ? 0 : bound.integer(1, 0);
  const size_t first = byte_of_char(text, place(start));
  const size_t last = bound.is_none(2) ? text.size() : byte_of_char(text, place(bound.integer(2, size)));
  size_t at = text.npos;
  if (start <= size && first <= last) {
    const std::string_view part = text.substr(first, last - first);
    at = from_end ? part.rfind(bound.text(0)) : part.find(bound.text(0));
  }
  DS_CHECK(at != text.npos || !must_exist, Errc::Config, "index(): the text does not contain {}",
           repr_of_text(bound.text(0)));
  return Value(at == text.npos ? i64{-1} : count_chars(text.substr(0, first + at)));
}

Value replace(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "replace()", {"old", "new", "count"}, 2);
  require_plain(self, "replace");
  return in.text(replaced(in.budget(), bytes_of(self), bound.text(0), bound.text(1), bound.integer(2, -1)));
}

Value join(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "join()", {"iterable"}, 1);
  require_plain(self, "join");
  Builder out(in.budget());
  bool is_first = true;
  for (const Value& part : in.elements(bound[0])) {
    DS_CHECK(part.is_text(), Errc::Config, "join() needs strings, not a value of type {}", type_name(part));
    if (!std::exchange(is_first, false)) out.add(bytes_of(self));
    out.add(bytes_of(part));
  }
  return in.text(out.finish());
}

// 'l', 'r', 'c': where the text is.
Value justify(Interpreter& in, const Value& self, Arguments& arguments, char side) {
  const Bound bound(arguments, "center() and its like", {"width", "fillchar"}, 1);
  const std::string fill = bound.has(1) ? bound.text(1) : " ";
  DS_CHECK(count_chars(fill) == 1, Errc::Config, "the fill must be one character");
  return like(in, self, justified(in.budget(), bytes_of(self), bound.integer(0, 0), fill, side));
}

Value zfill(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "zfill()", {"width"}, 1);
  const std::string_view text = bytes_of(self);
  const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
  return like(in, self,
              std::string(text.substr(0, sign)) +
                  justified(in.budget(), text.substr(sign), bound.integer(0, 0) - static_cast<i64>(sign), "0", 'r'));
}

Value partition(Interpreter& in, const Value& self, Arguments& arguments, bool from_end) {
  const Bound bound(arguments, "partition()", {"sep"}, 1);
  const std::string_view text = bytes_of(self);
  const std::string& separator = bound.text(0);
  DS_CHECK(!separator.empty(), Errc::Config, "partition() needs a separator that is not empty");
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(1 + separator.size() / 64));
  const size_t at = from_end ? text.rfind(separator) : text.find(separator);
  std::vector<std::string_view> parts{text, {}, {}};
  if (at == text.npos && from_end) parts = {{}, {}, text};
  if (at != text.npos) parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  std::vector<Value> values;
  for (const std::string_view part : parts) values.push_back(like(in, self, part));
  return in.list(std::move(values), List::Kind::Tuple);
}

Value splitlines(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "splitlines()", {"keepends"});
  in.budget().step(static_cast<i64>(bytes_of(self).size()));
  return list_of(in, self, split_lines(bytes_of(self), bound.flag(0)));
}

template <std::string (*Change)(std::string_view)>
Value change_case(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a change of case", {});
  in.budget().step(static_cast<i64>(bytes_of(self).size()));
  return like(in, self, Change(bytes_of(self)));
}

template <CharClass Wanted>
Value is_class(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a test of characters", {});
  in.budget().step(static_cast<i64>(bytes_of(self).size()));
  return Value(is_all(bytes_of(self), Wanted));
}

Value count(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "count()", {"sub"}, 1);
  const std::string_view text = bytes_of(self);
  const std::string& wanted = bound.text(0);
  in.budget().step(static_cast<i64>(text.size()) * static_cast<i64>(1 + wanted.size() / 64));
  if (wanted.empty()) return Value(self.as_text().num_chars + 1);
  return Value(static_cast<i64>(split_at(text, wanted, -1, false).size()) - 1);
}

Value format(Interpreter& in, const Value& self, Arguments& arguments) {
  require_plain(self, "format");
  return in.text(format_braces(in, bytes_of(self), arguments));
}

Value format_map(Interpreter& in, const Value& self, Arguments& arguments) {
  require_plain(self, "format_map");
  const Bound bound(arguments, "format_map()", {"mapping"}, 1);
  DS_CHECK(bound[0].is_dict(), Errc::Config, "format_map() needs a mapping");
  Arguments members;
  for (const auto& [key, value] : bound[0].as_dict().members)
    if (key.is_text()) members.named.emplace_back(key.as_text().bytes, value);
  return in.text(format_braces(in, bytes_of(self), members));
}

Value without(Interpreter& in, const Value& self, Arguments& arguments, bool at_end) {
  const Bound bound(arguments, "removeprefix()", {"prefix"}, 1);
  std::string_view text = bytes_of(self);
  const std::string& affix_text = bound.text(0);
  if (at_end && text.ends_with(affix_text)) text.remove_suffix(affix_text.size());
  if (!at_end && text.starts_with(affix_text)) text.remove_prefix(affix_text.size());
  return like(in, self, text);
}

constexpr Entry kTextMethods[] = {
    {"capitalize", change_case<capitalized>},
    {"center", [](Interpreter& in, const Value& self, Arguments& a) { return justify(in, self, a, 'c'); }},
    {"count", count},
    {"endswith", [](Interpreter& in, const Value& self, Arguments& a) { return affix(in, self, a, true); }},
    {"find", [](Interpreter& in, const Value& self, Arguments& a) { return find(in, self, a, false, false); }},
    {"format", format},
    {"format_map", format_map},
    {"index", [](Interpreter& in, const Value& self, Arguments& a) { return find(in, self, a, false, true); }},
    {"isalnum", is_class<CharClass::Alnum>},
    {"isalpha", is_class<CharClass::Alpha>},
    {"isdigit", is_class<CharClass::Digit>},
    {"islower", is_class<CharClass::Lower>},
    {"isspace", is_class<CharClass::Space>},
    {"isupper", is_class<CharClass::Upper>},
    {"join", join},
    {"ljust", [](Interpreter& in, const Value& self, Arguments& a) { return justify(in, self, a, 'l'); }},
    {"lower", change_case<lower_case>},
    {"lstrip", [](Interpreter& in, const Value& self, Arguments& a) { return strip(in, self, a, true, false); }},
    {"partition", [](Interpreter& in, const Value& self, Arguments& a) { return partition(in, self, a, false); }},
    {"removeprefix", [](Interpreter& in, const Value& self, Arguments& a) { return without(in, self, a, false); }},
    {"removesuffix", [](Interpreter& in, const Value& self, Arguments& a) { return without(in, self, a, true); }},
    {"replace", replace},
    {"rfind", [](Interpreter& in, const Value& self, Arguments& a) { return find(in, self, a, true, false); }},
    {"rindex", [](Interpreter& in, const Value& self, Arguments& a) { return find(in, self, a, true, true); }},
    {"rjust", [](Interpreter& in, const Value& self, Arguments& a) { return justify(in, self, a, 'r'); }},
    {"rpartition", [](Interpreter& in, const Value& self, Arguments& a) { return partition(in, self, a, true); }},
    {"rsplit", [](Interpreter& in, const Value& self, Arguments& a) { return split(in, self, a, true); }},
    {"rstrip", [](Interpreter& in, const Value& self, Arguments& a) { return strip(in, self, a, false, true); }},
    {"split", [](Interpreter& in, const Value& self, Arguments& a) { return split(in, self, a, false); }},
    {"splitlines", splitlines},
    {"startswith", [](Interpreter& in, const Value& self, Arguments& a) { return affix(in, self, a, false); }},
    {"strip", [](Interpreter& in, const Value& self, Arguments& a) { return strip(in, self, a, true, true); }},
    {"title", change_case<title_case>},
    {"upper", change_case<upper_case>},
    {"zfill", zfill},
};

Value get(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "get()", {"key", "default"}, 1);
  const Value* const member = self.as_dict().find(bound[0]);
  return member != nullptr ? *member : bound.has(1) ? bound[1] : Value();
}

Value items(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "items()", {});
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.as_dict().members) pairs.push_back(in.list({key, value}, List::Kind::Tuple));
  return in.list(std::move(pairs), List::Kind::Items);
}

Value keys(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "keys()", {});
  return in.list(in.elements(self), List::Kind::Keys);
}

Value values(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "values()", {});
  std::vector<Value> all;
  for (const auto& member : self.as_dict().members) all.push_back(member.second);
  return in.list(std::move(all), List::Kind::Values);
}

Value copy(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "copy()", {});
  return self;
}

constexpr Entry kDictMethods[] = {{"copy", copy}, {"get", get}, {"items", items}, {"keys", keys}, {"values", values}};

Value index(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "index()", {"value"}, 1);
  const auto& all = self.as_list().items;
  const auto found =
      std::ranges::find_if(all, [&](const Value& value) { return equals(in.budget(), value, bound[0]); });
  DS_CHECK(found != all.end(), Errc::Config, "index(): the list does not contain the value");
  return Value(static_cast<i64>(found - all.begin()));
}

Value count_items(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "count()", {"value"}, 1);
  return Value(static_cast<i64>(std::ranges::count_if(
      self.as_list().items, [&](const Value& value) { return equals(in.budget(), value, bound[0]); })));
}

constexpr Entry kListMethods[] = {{"copy", copy}, {"count", count_items}, {"index", index}};

template <class Entries>
Native find_in(const Entries& entries, std::string_view name) {
  const auto found = std::ranges::find(entries, name, &Entry::name);
  return found == std::end(entries) ? nullptr : found->native;
}

}  // namespace

Native find_method(const Value& self, std::string_view name) {
  if (self.is_text()) return find_in(kTextMethods, name);
  if (self.is_dict()) return find_in(kDictMethods, name);
  if (!self.is_list() || !self.as_list().is_sequence()) return nullptr;
  return name == "copy" && self.as_list().kind != List::Kind::List ? nullptr : find_in(kListMethods, name);
}

}  // namespace ds::jinja
