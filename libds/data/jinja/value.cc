// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "data/jinja/text.h"
#include "data/tokenizer/unicode.h"

namespace ds::jinja {

void Budget::fail_steps() {
  throw Error(Errc::Unavailable,
              "the template takes too many steps: a chat "
              "template of this length is not rendered");
}
void Budget::fail_bytes() {
  throw Error(Errc::Unavailable,
              "the template needs too much memory: a chat "
              "template of this size is not rendered");
}

Value Value::undefined(std::string message) {
  return Value(Data(Undefined{std::make_shared<const std::string>(std::move(message))}));
}

Value Value::text(std::string bytes, Budget* budget, bool is_safe) {
  return Value(Data(std::make_shared<const Text>(std::move(bytes), budget, is_safe)));
}

Text::Text(std::string text, Budget* payer, bool is_marked_safe)
    : bytes(std::move(text)), num_chars(count_chars(bytes)), is_safe(is_marked_safe), budget(payer) {
  if (budget != nullptr) budget->take(static_cast<i64>(bytes.size()));
}

namespace {

// Bounds the recursion of everything that walks or frees a value.
int checked_depth(int depth) {
  DS_CHECK(depth <= kMostNesting, Errc::Unavailable, "values are nested more than {} deep", kMostNesting);
  return depth;
}

int depth_of_all(const std::vector<Value>& values) {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, depth_of(value));
  return depth;
}

// Equal for keys that Python holds for equal, as 1, 1.0 and True.
void write_key(Builder& out, const Value& value) {
  if (value.is_text()) {
    out.add('s');
    out.add(value.as_text().bytes);
  } else if (value.is_integer()) {
    out.add(fmt::format("n{}", value.as_integer()));
  } else if (value.is<double>()) {
    const double x = value.as<double>();
    out.add(x == std::floor(x) && std::abs(x) < 9e15 ? fmt::format("n{}", static_cast<i64>(x)) : "n" + repr(x));
  } else if (value.is<None>() || value.is<Undefined>()) {
    out.add(value.is<None>() ? '0' : 'u');
  } else if (value.is<Namespace*>()) {
    out.add(fmt::format("p{}", static_cast<const void*>(value.as<Namespace*>())));
  } else if (value.is_list() && value.as_list().kind == List::Kind::Tuple) {
    out.add(fmt::format("t{}", value.as_list().items.size()));
    for (const Value& item : value.as_list().items) {
      Builder part(out.budget());
      write_key(part, item);
      out.add(fmt::format(",{}:", part.text().size()));
      out.add(part.text());
    }
  } else {
    throw Error(Errc::Config, fmt::format("a value of type {} cannot be a key", type_name(value)));
  }
}

}  // namespace

List::List(Kind list_kind, std::vector<Value> values, Budget& payer)
    : kind(list_kind),
      items(std::move(values)),
      depth(checked_depth(1 + depth_of_all(items))),
      bytes(sizeof(List) + items.size() * sizeof(Value)),
      budget(payer) {
  budget.step(static_cast<i64>(items.size()));
  budget.take(static_cast<i64>(bytes));
}

std::vector<Value> List::take() const { return is_generator() ? std::exchange(items, {}) : items; }

Dict::Dict(std::vector<std::pair<Value, Value>> all, Budget& payer) : budget(payer) {
  budget.step(static_cast<i64>(all.size()));
  size_t total = sizeof(Dict);
  for (auto& [key, value] : all) {
    Builder name(budget);
    write_key(name, key);
    depth = std::max({depth, 1 + depth_of(key), 1 + depth_of(value)});
    const auto [place, is_new] = index.try_emplace(name.finish(), members.size());
    if (is_new) {
      total += place->first.size() + 2 * sizeof(Value) + 64;
      members.emplace_back(std::move(key), std::move(value));
    } else {
      members[place->second].second = std::move(value);
    }
  }
  checked_depth(depth);
  budget.take(static_cast<i64>(total));
  bytes = total;
}

const Value* Dict::find(const Value& key) const {
  Builder name(budget);
  write_key(name, key);
  const auto found = index.find(name.text());
  return found == index.end() ? nullptr : &members[found->second].second;
}

const Value* Dict::find(std::string_view key) const {
  const auto found = index.find("s" + std::string(key));
  return found == index.end() ? nullptr : &members[found->second].second;
}

Value* Namespace::find(std::string_view name) noexcept {
  const auto found =
      std::ranges::find(members, name, [](const auto& member) -> std::string_view { return member.first; });
  return found == members.end() ? nullptr : &found->second;
}

int depth_of(const Value& value) {
  if (value.is_list()) return value.as_list().depth;
  if (value.is_dict()) return value.as_dict().depth;
  if (value.is<std::shared_ptr<const Function>>())
    return 1 + depth_of(value.as<std::shared_ptr<const Function>>()->self);
  if (value.is<std::shared_ptr<Loop>>()) return 1 + value.as<std::shared_ptr<Loop>>()->nesting;
  return 0;
}

std::string_view type_name(const Value& value) {
  if (value.is_list()) {
    switch (value.as_list().kind) {
      case List::Kind::List: return "list";
      case List::Kind::Tuple: return "tuple";
      case List::Kind::Range: return "range";
      case List::Kind::Keys: return "dict_keys";
      case List::Kind::Values: return "dict_values";
      case List::Kind::Items: return "dict_items";
      case List::Kind::Generator: return "generator";
    }
  }
  static constexpr std::string_view kNames[] = {"Undefined", "NoneType", "bool",     "int",  "float",    "str",
                                                "list",      "dict",     "function", "loop", "namespace"};
  static_assert(std::size(kNames) == std::variant_size_v<Value::Data>);
  return kNames[value.data().index()];
}

bool truth(const Value& value) {
  if (value.is<Undefined>() || value.is<None>()) return false;
  if (value.is_integer()) return value.as_integer() != 0;
  if (value.is<double>()) return value.as<double>() != 0;
  if (value.is_text()) return !value.as_text().bytes.empty();
  if (value.is_list()) return value.as_list().is_generator() || !value.as_list().items.empty();
  if (value.is_dict()) return !value.as_dict().members.empty();
  return true;
}

bool equals(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  if (a.is_integer() && b.is_integer()) return a.as_integer() == b.as_integer();
  if (a.is_number() && b.is_number()) return a.as_real() == b.as_real();
  if (a.data().index() != b.data().index()) return false;
  if (a.is<Undefined>() || a.is<None>()) return true;
  if (a.is_text()) {
    budget.step(a.as_text().num_chars / 64);
    return a.as_text().bytes == b.as_text().bytes;
  }
  if (a.is_list()) {
    const List &left = a.as_list(), &right = b.as_list();
    if (&left == &right) return true;
    return left.kind == right.kind && left.is_sequence() &&
           std::ranges::equal(left.items, right.items,
                              [&](const Value& x, const Value& y) { return equals(budget, x, y); });
  }
  if (a.is_dict()) {
    const Dict &left = a.as_dict(), &right = b.as_dict();
    if (&left == &right) return true;
    return left.members.size() == right.members.size() && std::ranges::all_of(left.index, [&](const auto& entry) {
             const auto other = right.index.find(entry.first);
             return other != right.index.end() &&
                    equals(budget, left.members[entry.second].second, right.members[other->second].second);
           });
  }
  if (a.is<Namespace*>()) return a.as<Namespace*>() == b.as<Namespace*>();
  if (a.is<std::shared_ptr<Loop>>()) return a.as<std::shared_ptr<Loop>>() == b.as<std::shared_ptr<Loop>>();
  const Function &left = *a.as<std::shared_ptr<const Function>>(), &right = *b.as<std::shared_ptr<const Function>>();
  return &left == &right ||
         (left.native != nullptr && left.native == right.native && equals(budget, left.self, right.self));
}

bool is_less(Budget& budget, const Value& a, const Value& b) {
  budget.step();
  for (const Value* value : {&a, &b})
    if (value->is<Undefined>()) throw Error(Errc::Config, *value->as<Undefined>().message);
  if (a.is_integer() && b.is_integer()) return a.as_integer() < b.as_integer();
  if (a.is_number() && b.is_number()) return a.as_real() < b.as_real();
  if (a.is_text() && b.is_text()) {
    budget.step(a.as_text().num_chars / 64);
    return a.as_text().bytes < b.as_text().bytes;  // UTF-8 has the order of its characters
  }
  if (a.is_list() && b.is_list() && a.as_list().kind == b.as_list().kind && a.as_list().is_sequence() &&
      a.as_list().kind != List::Kind::Range) {
    const auto &left = a.as_list().items, &right = b.as_list().items;
    for (size_t i = 0; i < std::min(left.size(), right.size()); ++i)
      if (!equals(budget, left[i], right[i])) return is_less(budget, left[i], right[i]);
    return left.size() < right.size();
  }
  throw Error(Errc::Config,
              fmt::format("a value of type {} cannot be compared with one of type {}", type_name(a), type_name(b)));
}

void write(Builder& out, const Value& value) {
  if (value.is_text()) return out.add(value.as_text().bytes);
  if (!value.is<Undefined>()) write_repr(out, value);
}

namespace {

void write_all(Builder& out, const std::vector<Value>& items) {
  bool is_first = true;
  for (const Value& item : items) {
    if (!std::exchange(is_first, false)) out.add(", ");
    write_repr(out, item);
  }
}

void write_list(Builder& out, const List& list) {
  DS_CHECK(!list.is_generator() && list.kind != List::Kind::Range, Errc::Unavailable,
           "writing a generator or range as text is not supported: the filter "
           "list makes a list of it");
  const bool is_view = !list.is_sequence();
  if (is_view)
    out.add(list.kind == List::Kind::Keys     ? "dict_keys("
            : list.kind == List::Kind::Values ? "dict_values("
                                              : "dict_items(");
  const bool is_tuple = list.kind == List::Kind::Tuple;
  out.add(is_tuple ? '(' : '[');
  write_all(out, list.items);
  if (is_tuple && list.items.size() == 1) out.add(',');
  out.add(is_tuple ? ')' : ']');
  if (is_view) out.add(')');
}

}  // namespace

void write_repr(Builder& out, const Value& value) {
  out.budget().step();
  if (value.is<Undefined>()) {
    out.add("Undefined");
  } else if (value.is<None>()) {
    out.add("None");
  } else if (value.is<bool>()) {
    out.add(value.as<bool>() ? "True" : "False");
  } else if (value.is<i64>()) {
    out.add(fmt::format("{}", value.as<i64>()));
  } else if (value.is<double>()) {
    out.add(repr(value.as<double>()));
  } else if (value.is_text()) {
    const Text& text = value.as_text();
    if (text.is_safe) out.add("Markup(");
    out.add(repr_of_text(text.bytes));
    if (text.is_safe) out.add(')');
  } else if (value.is_list()) {
    write_list(out, value.as_list());
  } else if (value.is_dict()) {
    out.add('{');
    bool is_first = true;
    for (const auto& [key, member] : value.as_dict().members) {
      if (!std::exchange(is_first, false)) out.add(", ");
      write_repr(out, key);
      out.add(": ");
      write_repr(out, member);
    }
    out.add('}');
  } else {
    throw Error(Errc::Unavailable, fmt::format("writing a {} as text is not supported", type_name(value)));
  }
}

Value value_of(const Json& json, Budget& budget, int depth) {
  budget.step();
  checked_depth(depth);
  switch (json.type()) {
    case Json::value_t::boolean: return Value(json.get<bool>());
    case Json::value_t::number_integer: return Value(json.get<i64>());
    case Json::value_t::number_unsigned:
      DS_CHECK(std::in_range<i64>(json.get<u64>()), Errc::Unavailable, "the integer {} has more than 64 bits",
               json.get<u64>());
      return Value(json.get<i64>());
    case Json::value_t::number_float: return Value(json.get<double>());
    case Json::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      DS_CHECK(tokenizer::is_utf8(text), Errc::Config, "a message contains text that is not UTF-8");
      return Value::text(text, &budget);
    }
    case Json::value_t::array: {
      std::vector<Value> items;
      for (const Json& item : json) items.push_back(value_of(item, budget, depth + 1));
      return Value(std::make_shared<const List>(List::Kind::List, std::move(items), budget));
    }
    case Json::value_t::object: {
      std::vector<std::pair<Value, Value>> members;
      for (const auto& [key, member] : json.items()) {
        DS_CHECK(tokenizer::is_utf8(key), Errc::Config, "a message contains a key that is not UTF-8");
        members.emplace_back(Value::text(key, &budget), value_of(member, budget, depth + 1));
      }
      return Value(std::make_shared<const Dict>(std::move(members), budget));
    }
    default: return {};
  }
}

}  // namespace ds::jinja
