// SPDX-License-Identifier: Apache-2.0
// Expressions, with the operators of Python.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "data/jinja/format.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/tables.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {
namespace {

using FunctionPtr = std::shared_ptr<const Function>;
using LoopPtr = std::shared_ptr<Loop>;

void require_defined(const Value& value) {
  if (value.is<Undefined>()) throw Error(Errc::Config, *value.as<Undefined>().message);
}

[[noreturn]] void refuse(std::string_view op, const Value& left, const Value& right) {
  throw Error(Errc::Config, fmt::format("'{}' does not work between values of type {} and {}", op, type_name(left),
                                        type_name(right)));
}

// Methods that change a list or a mapping exist for Python, and its sandbox
// hides them.
bool is_unsafe(const Value& object, std::string_view name) {
  const auto is_any = [&](std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, name) != names.end();
  };
  if (name.starts_with("__")) return true;
  if (object.is_dict()) return is_any({"clear", "pop", "popitem", "setdefault", "update"});
  return object.is_list() && object.as_list().kind == List::Kind::List &&
         is_any({"append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"});
}

Value integer_result(std::optional<i64> value) {
  DS_CHECK(value.has_value(), Errc::Unavailable, "an integer of more than 64 bits is not supported");
  return Value(*value);
}

std::optional<i64> checked_sum(i64 a, i64 b, bool subtract) {
  i64 result = 0;
  const bool overflows = subtract ? __builtin_sub_overflow(a, b, &result) : __builtin_add_overflow(a, b, &result);
  return overflows ? std::nullopt : std::optional(result);
}

std::optional<i64> integer_power(i64 base, i64 exponent) {
  std::optional<i64> result = 1;
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (i64 i = 0; i < exponent && result; ++i) result = checked_mul({*result, base});
  return result;
}

double real_modulo(double a, double b) {
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

double real_floor_division(double a, double b) {  // by the rest, as Python
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double below = std::floor(quotient);
  return quotient - below > 0.5 ? below + 1 : below;
}

Value number_result(std::string_view op, const Value& left, const Value& right) {
  if (op == "/" || op == "//" || op == "%") DS_CHECK(right.as_real() != 0, Errc::Config, "division by zero");
  if (left.is_integer() && right.is_integer() && op != "/") {
    const i64 a = left.as_integer(), b = right.as_integer();
    if (op == "+" || op == "-") return integer_result(checked_sum(a, b, op == "-"));
    if (op == "*") return integer_result(checked_mul({a, b}));
    if (op == "**" && b >= 0) return integer_result(integer_power(a, b));
    if (op == "//" || op == "%") {
      if (b == -1) return op == "%" ? Value(i64{0}) : integer_result(checked_sum(0, a, true));
      const i64 rest = a % b, quotient = a / b;
      const bool is_adjusted = rest != 0 && (rest < 0) != (b < 0);
      return op == "%" ? Value(is_adjusted ? rest + b : rest) : Value(is_adjusted ? quotient - 1 : quotient);
    }
  }
  const double a = left.as_real(), b = right.as_real();
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "/") return Value(a / b);
  if (op == "%") return Value(real_modulo(a, b));
  if (op == "//") return Value(real_floor_division(a, b));
  DS_CHECK(a != 0 || b >= 0, Errc::Config, "division by zero");
  DS_CHECK(a >= 0 || b == std::floor(b), Errc::Unavailable, "complex numbers are not supported");
  const double power = std::pow(a, b);
  DS_CHECK(std::isfinite(power) || !std::isfinite(a) || !std::isfinite(b), Errc::Config, "the power is too large");
  return Value(power);
}

Value repeated(Interpreter& in, const Value& value, i64 count) {
  count = std::max<i64>(count, 0);
  if (value.is_text()) {
    Builder out(in.budget());
    if (!value.as_text().bytes.empty()) out.repeat(value.as_text().bytes, count);
    return in.text(out.finish(), value.as_text().is_safe);
  }
  const List& list = value.as_list();
  const auto total = checked_mul({static_cast<i64>(list.items.size()), count});
  in.budget().step(total.value_or(std::numeric_limits<i64>::max() / 2));
  in.budget().take(*total * static_cast<i64>(sizeof(Value)));
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(*total));
  for (i64 i = 0; i < count && !list.items.empty(); ++i)
    items.insert(items.end(), list.items.begin(), list.items.end());
  in.budget().give(*total * static_cast<i64>(sizeof(Value)));
  return in.list(std::move(items), list.kind);
}

bool can_repeat(const Value& value) {
  return value.is_text() ||
         (value.is_list() && value.as_list().is_sequence() && value.as_list().kind != List::Kind::Range);
}

struct Range {
  i64 begin, end, step;
};

// The indices of a slice, as Python's slice.indices().
Range slice_range(i64 size, const Value& begin, const Value& end, const Value& step) {
  const auto integer = [](const Value& value) {
    DS_CHECK(value.is_integer(), Errc::Config, "the bounds of a slice must be integers, not of type {}",
             type_name(value));
    return value.as_integer();
  };
  const i64 by = step.is<None>() ? 1 : integer(step);
  DS_CHECK(by != 0, Errc::Config, "the step of a slice must not be 0");
  const i64 lowest = by < 0 ? -1 : 0, highest = by < 0 ? size - 1 : size;
  const auto bound = [&](const Value& value, i64 otherwise) {
    if (value.is<None>()) return otherwise;
    const i64 at = integer(value);
    return std::clamp(at < 0 ? at + size : at, lowest, highest);
  };
  return {bound(begin, by < 0 ? highest : lowest), bound(end, by < 0 ? lowest : highest), by};
}

template <class Visit>
void for_each_index(Budget& budget, const Range& range, i64 size, Visit&& visit) {
  const i64 step = std::clamp(range.step, -size - 1, size + 1);
  for (i64 i = range.begin; step > 0 ? i < range.end : i > range.end; i += step) {
    budget.step();
    visit(static_cast<size_t>(i));
  }
}

Value text_slice(Interpreter& in, const Text& text, const Range& range) {
  const bool is_ascii = text.num_chars == static_cast<i64>(text.bytes.size());
  in.budget().step(text.num_chars / 64);
  if (range.step == 1) {
    if (range.begin >= range.end) return in.text({}, text.is_safe);
    const size_t begin = is_ascii ? static_cast<size_t>(range.begin) : byte_of_char(text.bytes, range.begin);
    const size_t end = is_ascii
                           ? static_cast<size_t>(range.end)
                           : begin + byte_of_char(std::string_view(text.bytes).substr(begin), range.end - range.begin);
    return in.text(text.bytes.substr(begin, end - begin), text.is_safe);
  }
  std::vector<size_t> starts;
  for (size_t at = 0; at < text.bytes.size(); at += tokenizer::char_bytes(text.bytes, at)) starts.push_back(at);
  Builder out(in.budget());
  for_each_index(in.budget(), range, text.num_chars, [&](size_t i) {
    out.add(std::string_view(text.bytes).substr(starts[i], tokenizer::char_bytes(text.bytes, starts[i])));
  });
  return in.text(out.finish(), text.is_safe);
}

}  // namespace

std::string Interpreter::string(const Value& value) {
  Builder out(budget_);
  write(out, value);
  return out.finish();
}

std::vector<Value> Interpreter::elements(const Value& value) {
  if (value.is<Undefined>()) return {};
  if (value.is_list()) {
    budget_.step(static_cast<i64>(value.as_list().items.size()));
    return value.as_list().take();
  }
  std::vector<Value> items;
  if (value.is_dict()) {
    for (const auto& member : value.as_dict().members) items.push_back(member.first);
  } else {
    DS_CHECK(value.is_text(), Errc::Config, "a value of type {} has no elements", type_name(value));
    const std::string& bytes = value.as_text().bytes;
    budget_.take(64 * value.as_text().num_chars);
    for (size_t at = 0; at < bytes.size(); at += tokenizer::char_bytes(bytes, at))
      items.push_back(text(bytes.substr(at, tokenizer::char_bytes(bytes, at))));
    budget_.give(64 * value.as_text().num_chars);
  }
  budget_.step(static_cast<i64>(items.size()));
  return items;
}

Value Interpreter::look_up(int id) {
  for (Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get())
    if (Value* own = scope->find_own(id)) return *own;
  const std::string& name = names_.name(id);
  if (const Native native = find_function(name))
    return Value(std::make_shared<const Function>(Function{.name = name, .native = native}));
  return Value::undefined(fmt::format("'{}' is undefined", name));
}

Value Interpreter::attribute(const Value& object, const std::string& name) {
  require_defined(object);
  if (object.is<Namespace*>()) {
    const Value* own = object.as<Namespace*>()->find(name);
    return own != nullptr ? *own : Value::undefined(fmt::format("the namespace has no attribute '{}'", name));
  }
  if (Value method = method_of(object, name); !method.is<Undefined>()) return method;
  if (object.is<LoopPtr>()) {
    const LoopPtr loop = object.as<LoopPtr>();
    return loop_attribute(*loop, name);
  }
  if (is_unsafe(object, name))
    return Value::undefined(fmt::format("the attribute '{}' of a {} is not safe", name, type_name(object)));
  DS_CHECK(!is_missing_attribute(object, name), Errc::Unavailable, "'{}' of a {} is not supported", name,
           type_name(object));
  if (object.is_dict())
    if (const Value* member = object.as_dict().find(std::string_view(name))) return *member;
  if (object.is<FunctionPtr>() && object.as<FunctionPtr>()->macro != nullptr && name == "name")
    return text(object.as<FunctionPtr>()->name);
  return Value::undefined(fmt::format("a {} has no attribute '{}'", type_name(object), name));
}

Value Interpreter::item(const Value& object, const Value& index) {
  require_defined(object);
  if (object.is_dict()) {
    const bool can_be_key = !index.is_dict() && !(index.is_list() && index.as_list().kind != List::Kind::Tuple);
    if (const Value* member = can_be_key ? object.as_dict().find(index) : nullptr) return *member;
  } else if (index.is_integer() && object.is_list() && object.as_list().is_sequence()) {
    const auto& items = object.as_list().items;
    const i64 size = static_cast<i64>(items.size()), i = index.as_integer(), at = i < 0 ? i + size : i;
    if (at >= 0 && at < size) return items[static_cast<size_t>(at)];
  } else if (index.is_integer() && object.is_text()) {
    const i64 size = object.as_text().num_chars, i = index.as_integer(), at = i < 0 ? i + size : i;
    if (at >= 0 && at < size) return text_slice(*this, object.as_text(), {at, at + 1, 1});
  }
  if (index.is_text() && !object.is_dict()) return attribute(object, index.as_text().bytes);
  if (index.is_text()) {  // a member would have been found
    if (Value method = method_of(object, index.as_text().bytes); !method.is<Undefined>()) return method;
    return Value::undefined(fmt::format("a mapping has no member '{}'", index.as_text().bytes));
  }
  return Value::undefined(fmt::format("a {} has no such element", type_name(object)));
}

Value Interpreter::evaluate_item(const Node& node) {
  const Value object = evaluate(*node.parts[0]);
  return item(object, evaluate(*node.parts[1]));
}

Value Interpreter::evaluate_slice(const Node& node) {
  const Value object = evaluate(*node.parts[0]);
  require_defined(object);
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i)
    if (node.parts[i + 1] != nullptr) bounds[i] = evaluate(*node.parts[i + 1]);
  if (object.is_text())
    return text_slice(*this, object.as_text(),
                      slice_range(object.as_text().num_chars, bounds[0], bounds[1], bounds[2]));
  DS_CHECK(object.is_list() && object.as_list().is_sequence(), Errc::Config, "a value of type {} has no slices",
           type_name(object));
  const List& from = object.as_list();
  const i64 size = static_cast<i64>(from.items.size());
  std::vector<Value> items;
  for_each_index(budget_, slice_range(size, bounds[0], bounds[1], bounds[2]), size,
                 [&](size_t i) { items.push_back(from.items[i]); });
  return list(std::move(items), from.kind);
}

Value Interpreter::evaluate_call(const Node& node) {
  const Node& callee = *node.parts[0];
  if (callee.kind == Kind::Attribute) {  // without a value for the method
    const Value object = evaluate(*callee.parts[0]);
    const Native native = find_method(object, callee.name);
    const Value function = native == nullptr ? attribute(object, callee.name) : Value();
    Arguments arguments = evaluate_arguments(*node.call);
    line_ = node.line;
    return native == nullptr ? call(function, arguments) : native(*this, object, arguments);
  }
  const Value function = evaluate(callee);
  Arguments arguments = evaluate_arguments(*node.call);
  line_ = node.line;
  return call(function, arguments);
}

Value Interpreter::evaluate_filter(const Node& node) {
  const Value input = node.parts[0] != nullptr ? evaluate(*node.parts[0]) : *block_texts_.back();
  Arguments arguments = evaluate_arguments(*node.call);
  line_ = node.line;
  return node.kind == Kind::Filter ? filter(node.name, input, arguments) : Value(test(node.name, input, arguments));
}

Value Interpreter::evaluate_concat(const Node& node) {
  Builder out(budget_);
  std::vector<Value> values;
  for (const NodePtr& part : node.parts) values.push_back(evaluate(*part));
  for (const Value& value : values) write(out, value);
  return text(out.finish());
}

Value Interpreter::evaluate_dict(const Node& node) {
  std::vector<std::pair<Value, Value>> members;
  for (size_t i = 0; i < node.parts.size(); i += 2) {
    Value key = evaluate(*node.parts[i]);
    members.emplace_back(std::move(key), evaluate(*node.parts[i + 1]));
  }
  return dict(std::move(members));
}

bool Interpreter::contains(const Value& container, const Value& element) {
  if (container.is_text()) {
    require_defined(element);
    DS_CHECK(element.is_text(), Errc::Config, "'in' of a string needs a string, not a value of type {}",
             type_name(element));
    budget_.step(container.as_text().num_chars * (1 + element.as_text().num_chars) / 64);
    return container.as_text().bytes.find(element.as_text().bytes) != std::string::npos;
  }
  if (container.is_dict()) return container.as_dict().find(element) != nullptr;
  for (const Value& value : elements(container))
    if (equals(budget_, value, element)) return true;
  return false;
}

Value Interpreter::evaluate_compare(const Node& node) {
  Value left = evaluate(*node.parts[0]);
  for (size_t i = 1; i < node.parts.size(); ++i) {
    Value right = evaluate(*node.parts[i]);
    const std::string& op = node.names[i - 1];
    bool holds = false;
    if (op == "==") holds = equals(budget_, left, right);
    if (op == "!=") holds = !equals(budget_, left, right);
    if (op == "in") holds = contains(right, left);
    if (op == "not in") holds = !contains(right, left);
    if (op == "<") holds = is_less(budget_, left, right);
    if (op == ">") holds = is_less(budget_, right, left);
    if (op == "<=" || op == ">=") {
      const bool is_below = op == "<=" ? is_less(budget_, left, right) : is_less(budget_, right, left);
      holds = is_below || equals(budget_, left, right);
    }
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::operate(std::string_view op, const Value& left, const Value& right) {
  require_defined(left);
  if (op == "%" && left.is_text()) return text(format_percent(*this, left.as_text(), right));
  require_defined(right);
  if (left.is_number() && right.is_number()) return number_result(op, left, right);
  if (op == "*" && can_repeat(left) && right.is_integer()) return repeated(*this, left, right.as_integer());
  if (op == "*" && can_repeat(right) && left.is_integer()) return repeated(*this, right, left.as_integer());
  if (op == "+" && left.is_text() && right.is_text()) {
    const Text &a = left.as_text(), &b = right.as_text();
    const bool is_safe = a.is_safe || b.is_safe;
    const auto part = [&](const Text& text) {
      return is_safe && !text.is_safe ? escape_html(budget_, text.bytes) : text.bytes;
    };
    budget_.take(static_cast<i64>(a.bytes.size() + b.bytes.size()));
    std::string sum = part(a) + part(b);
    budget_.give(static_cast<i64>(a.bytes.size() + b.bytes.size()));
    return text(std::move(sum), is_safe);
  }
  if (op == "+" && left.is_list() && right.is_list() && can_repeat(left) &&
      left.as_list().kind == right.as_list().kind) {
    std::vector<Value> items = left.as_list().items;
    items.insert(items.end(), right.as_list().items.begin(), right.as_list().items.end());
    return list(std::move(items), left.as_list().kind);
  }
  refuse(op, left, right);
}

Value Interpreter::evaluate(const Node& node) {
  const Deeper deeper(*this, node.line);
  switch (node.kind) {
    case Kind::Constant: return node.constant;
    case Kind::Name: return look_up(node.id);
    case Kind::List:
    case Kind::Tuple: {
      std::vector<Value> items;
      for (const NodePtr& part : node.parts) items.push_back(evaluate(*part));
      return list(std::move(items), node.kind == Kind::List ? List::Kind::List : List::Kind::Tuple);
    }
    case Kind::Dict: return evaluate_dict(node);
    case Kind::Attribute: return attribute(evaluate(*node.parts[0]), node.name);
    case Kind::Item: return evaluate_item(node);
    case Kind::Slice: return evaluate_slice(node);
    case Kind::Call: return evaluate_call(node);
    case Kind::Filter:
    case Kind::Test: return evaluate_filter(node);
    case Kind::Not: return Value(!truth(evaluate(*node.parts[0])));
    case Kind::Negative:
    case Kind::Positive: {
      const Value value = evaluate(*node.parts[0]);
      require_defined(value);
      DS_CHECK(value.is_number(), Errc::Config, "a value of type {} has no sign", type_name(value));
      if (node.kind == Kind::Positive) return value.is<double>() ? value : Value(value.as_integer());
      return value.is<double>() ? Value(-value.as<double>()) : integer_result(checked_sum(0, value.as_integer(), true));
    }
    case Kind::Binary: {
      const Value left = evaluate(*node.parts[0]);
      const Value right = evaluate(*node.parts[1]);
      line_ = node.line;
      return operate(node.name, left, right);
    }
    case Kind::And:
    case Kind::Or: {
      Value left = evaluate(*node.parts[0]);
      return truth(left) == (node.kind == Kind::And) ? evaluate(*node.parts[1]) : left;
    }
    case Kind::Concat: return evaluate_concat(node);
    case Kind::Compare: return evaluate_compare(node);
    case Kind::Condition:
      if (truth(evaluate(*node.parts[0]))) return evaluate(*node.parts[1]);
      return node.parts[2] != nullptr ? evaluate(*node.parts[2])
                                      : Value::undefined("the condition is false, and there is no else");
    default: throw Error(Errc::Internal, "internal error: an expression of unknown kind");
  }
}

}  // namespace ds::jinja
