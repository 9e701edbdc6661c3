// SPDX-License-Identifier: Apache-2.0
#pragma once
// The values of a template, with the meaning of Python's. All but namespaces
// never change, as in transformers' sandbox, so no value can contain itself; a
// namespace belongs to its rendering and is only referred to.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/json.h"
#include "data/jinja/budget.h"

namespace ds::jinja {

class Value;
struct Text;
struct List;
struct Dict;
struct Function;
struct Loop;
struct Namespace;

struct None {};
// The result of a name, member or element that does not exist: empty as text,
// and an error in most operations.
struct Undefined {
  std::shared_ptr<const std::string> message;
};

class Value {
 public:
  using Data =
      std::variant<Undefined, None, bool, i64, double, std::shared_ptr<const Text>, std::shared_ptr<const List>,
                   std::shared_ptr<const Dict>, std::shared_ptr<const Function>, std::shared_ptr<Loop>, Namespace*>;
  Value() : data_(None{}) {}
  Value(Data data) : data_(std::move(data)) {}  // NOLINT: each of them is a value

  static Value undefined(std::string message);
  // Texts are made with the budget that pays for them; null: constants of a
  // template.
  static Value text(std::string bytes, Budget* budget, bool is_safe = false);

  template <class T>
  bool is() const noexcept {
    return std::holds_alternative<T>(data_);
  }
  bool is_text() const noexcept { return is<std::shared_ptr<const Text>>(); }
  bool is_list() const noexcept { return is<std::shared_ptr<const List>>(); }
  bool is_dict() const noexcept { return is<std::shared_ptr<const Dict>>(); }
  bool is_integer() const noexcept { return is<i64>() || is<bool>(); }  // as in Python, where bool is an int
  bool is_number() const noexcept { return is_integer() || is<double>(); }
  template <class T>
  const T& as() const {
    return std::get<T>(data_);
  }
  const Text& as_text() const { return *std::get<std::shared_ptr<const Text>>(data_); }
  const List& as_list() const { return *std::get<std::shared_ptr<const List>>(data_); }
  const Dict& as_dict() const { return *std::get<std::shared_ptr<const Dict>>(data_); }
  i64 as_integer() const { return is<bool>() ? static_cast<i64>(as<bool>()) : as<i64>(); }
  double as_real() const { return is<double>() ? as<double>() : static_cast<double>(as_integer()); }
  const Data& data() const noexcept { return data_; }

 private:
  Data data_;
};

struct Text {
  Text(std::string bytes, Budget* budget, bool is_safe);
  ~Text() {
    if (budget != nullptr) budget->give(static_cast<i64>(this->bytes.size()));
  }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  std::string bytes;
  i64 num_chars;
  bool is_safe;  // markupsafe's Markup: text that is joined to it with + is
                 // escaped
  Budget* budget;
};

// A list, and other types of Python that are iterated.
struct List {
  enum class Kind : u8 { List, Tuple, Range, Keys, Values, Items, Generator };
  List(Kind kind, std::vector<Value> items, Budget& budget);
  ~List() { budget.give(static_cast<i64>(bytes)); }
  List(const List&) = delete;
  List& operator=(const List&) = delete;

  bool is_sequence() const noexcept { return kind == Kind::List || kind == Kind::Tuple || kind == Kind::Range; }
  bool is_generator() const noexcept { return kind == Kind::Generator; }
  // The elements for a loop. A generator gives them once, as Python's does.
  std::vector<Value> take() const;

  Kind kind;
  mutable std::vector<Value> items;
  int depth;
  size_t bytes;
  Budget& budget;
};

struct Dict {
  Dict(std::vector<std::pair<Value, Value>> members,
       Budget& budget);  // later members replace earlier ones of their key
  ~Dict() { budget.give(static_cast<i64>(bytes)); }
  Dict(const Dict&) = delete;
  Dict& operator=(const Dict&) = delete;

  // Null: none. Throws for a key that cannot be one.
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;

  std::vector<std::pair<Value, Value>> members;
  std::unordered_map<std::string, size_t> index;
  int depth = 1;
  size_t bytes = 0;
  Budget& budget;
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> members;
  Value* find(std::string_view name) noexcept;
};

class Interpreter;
struct Node;
struct Scope;

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named = {};
};

using Native = Value (*)(Interpreter&, const Value& self, Arguments&);

// A function of ours, with the value whose method it is, or a macro.
struct Function {
  std::string name;
  Native native = nullptr;
  Value self = {};
  const Node* macro = nullptr;
  std::shared_ptr<Scope> scope = nullptr;  // in which the macro stands
};

// A loop that runs. Elements are taken when they are needed, since the
// condition of a loop may depend on its body.
struct Loop {
  std::vector<Value> items;
  size_t next = 0;           // of items
  std::vector<Value> ahead;  // at most one, taken before its turn
  Value current, previous;
  i64 index0 = -1;
  int depth0 = 0;
  int nesting = 0;  // of the elements, as List::depth
  bool has_previous = false, is_filtered = false;
  std::optional<std::vector<Value>> changed = {};
  const Node* node = nullptr;
  std::shared_ptr<Scope> scope = nullptr;  // around the loop, while it runs
};

int depth_of(const Value& value);
std::string_view type_name(const Value& value);  // Python's: "str"

bool truth(const Value& value);
bool equals(Budget& budget, const Value& a, const Value& b);
// a < b; throws as Python's TypeError does.
bool is_less(Budget& budget, const Value& a, const Value& b);
// str(value) and repr(value).
void write(Builder& out, const Value& value);
void write_repr(Builder& out, const Value& value);
// json.dumps(value). `indent` empty: on one line.
struct JsonStyle {
  bool ascii = false, sorted = false;
  std::optional<std::string> indent = {};
  std::string between = ", ", after_key = ": ";
};
void write_json(Builder& out, const Value& value, const JsonStyle& style);

Value value_of(const Json& json, Budget& budget, int depth = 0);

}  // namespace ds::jinja
