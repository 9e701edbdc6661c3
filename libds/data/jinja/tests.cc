// SPDX-License-Identifier: Apache-2.0
// The tests of jinja2: {{ x is defined }}.
#include <algorithm>

#include "base/check.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/tables.h"
#include "data/jinja/text.h"

namespace ds::jinja {
namespace {

// A test of the value alone.
template <bool (*Holds)(const Value&)>
Value plain(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a test", {});
  return Value(Holds(self));
}

bool is_defined(const Value& value) { return !value.is<Undefined>(); }
bool is_undefined(const Value& value) { return value.is<Undefined>(); }
bool is_none(const Value& value) { return value.is<None>(); }
bool is_boolean(const Value& value) { return value.is<bool>(); }
bool is_true(const Value& value) { return value.is<bool>() && value.as<bool>(); }
bool is_false(const Value& value) { return value.is<bool>() && !value.as<bool>(); }
bool is_whole(const Value& value) { return value.is<i64>(); }
bool is_real(const Value& value) { return value.is<double>(); }
bool is_any_number(const Value& value) { return value.is_number(); }
bool is_string(const Value& value) { return value.is_text(); }
bool is_mapping(const Value& value) { return value.is_dict(); }
// An undefined value has the methods that these two and the next ask for.
bool is_sequence(const Value& value) {
  return value.is_text() || value.is_dict() || is_undefined(value) ||
         (value.is_list() && value.as_list().is_sequence());
}
bool is_iterable(const Value& value) {
  return value.is_text() || value.is_dict() || is_undefined(value) || value.is_list() ||
         value.is<std::shared_ptr<Loop>>();
}
bool is_callable(const Value& value) {
  return is_undefined(value) || value.is<std::shared_ptr<const Function>>() || value.is<std::shared_ptr<Loop>>();
}

template <CharClass Wanted>
Value is_of_case(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a test", {});
  return Value(is_all(in.string(self), Wanted));
}

Value is_even(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "even", {});
  return Value(equals(in.budget(), in.operate("%", self, Value(i64{2})), Value(i64{0})));
}

Value is_odd(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "odd", {});
  return Value(equals(in.budget(), in.operate("%", self, Value(i64{2})), Value(i64{1})));
}

Value is_divisible(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "divisibleby", {"num"}, 1);
  return Value(equals(in.budget(), in.operate("%", self, bound[0]), Value(i64{0})));
}

Value is_same(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "sameas", {"other"}, 1);
  const Value& other = bound[0];
  if (self.data().index() != other.data().index()) return Value(false);
  if (self.is_list()) return Value(&self.as_list() == &other.as_list());
  if (self.is_dict()) return Value(&self.as_dict() == &other.as_dict());
  return Value(equals(in.budget(), self, other));
}

Value is_in(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "in", {"seq"}, 1);
  return Value(in.contains(bound[0], self));
}

template <bool IsFilter>
Value is_known(Interpreter&, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a test", {});
  if (!self.is_text()) return Value(false);
  const std::string& name = self.as_text().bytes;
  const Native native = IsFilter ? find_filter(name) : find_test(name);
  return Value(native != nullptr || code_of_unknown(IsFilter, name) == Errc::Unavailable);
}

enum class Order : u8 { Equal, Unequal, Less, LessOrEqual, Greater, GreaterOrEqual };

template <Order Wanted>
Value compares(Interpreter& in, const Value& self, Arguments& arguments) {
  const Bound bound(arguments, "a comparison", {"other"}, 1);
  Budget& budget = in.budget();
  const Value& other = bound[0];
  switch (Wanted) {
    case Order::Equal: return Value(equals(budget, self, other));
    case Order::Unequal: return Value(!equals(budget, self, other));
    case Order::Less: return Value(is_less(budget, self, other));
    case Order::LessOrEqual: return Value(is_less(budget, self, other) || equals(budget, self, other));
    case Order::Greater: return Value(is_less(budget, other, self));
    case Order::GreaterOrEqual: return Value(is_less(budget, other, self) || equals(budget, self, other));
  }
  return {};
}

constexpr Entry kTests[] = {
    {"!=", compares<Order::Unequal>},
    {"<", compares<Order::Less>},
    {"<=", compares<Order::LessOrEqual>},
    {"==", compares<Order::Equal>},
    {">", compares<Order::Greater>},
    {">=", compares<Order::GreaterOrEqual>},
    {"boolean", plain<is_boolean>},
    {"callable", plain<is_callable>},
    {"defined", plain<is_defined>},
    {"divisibleby", is_divisible},
    {"eq", compares<Order::Equal>},
    {"equalto", compares<Order::Equal>},
    {"even", is_even},
    {"false", plain<is_false>},
    {"filter", is_known<true>},
    {"float", plain<is_real>},
    {"ge", compares<Order::GreaterOrEqual>},
    {"greaterthan", compares<Order::Greater>},
    {"gt", compares<Order::Greater>},
    {"in", is_in},
    {"integer", plain<is_whole>},
    {"iterable", plain<is_iterable>},
    {"le", compares<Order::LessOrEqual>},
    {"lessthan", compares<Order::Less>},
    {"lower", is_of_case<CharClass::Lower>},
    {"lt", compares<Order::Less>},
    {"mapping", plain<is_mapping>},
    {"ne", compares<Order::Unequal>},
    {"none", plain<is_none>},
    {"number", plain<is_any_number>},
    {"odd", is_odd},
    {"sameas", is_same},
    {"sequence", plain<is_sequence>},
    {"string", plain<is_string>},
    {"test", is_known<false>},
    {"true", plain<is_true>},
    {"undefined", plain<is_undefined>},
    {"upper", is_of_case<CharClass::Upper>},
};

}  // namespace

Native find_test(std::string_view name) {
  const auto found = std::ranges::find(kTests, name, &Entry::name);
  return found == std::end(kTests) ? nullptr : found->native;
}

}  // namespace ds::jinja
