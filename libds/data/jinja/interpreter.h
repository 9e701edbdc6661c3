// SPDX-License-Identifier: Apache-2.0
#pragma once
// Evaluates a template. One interpreter renders once.

#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/jinja/syntax.h"
#include "data/jinja/value.h"
#include "ds/error.h"

namespace ds::jinja {

struct Scope {
  explicit Scope(std::shared_ptr<Scope> outer);
  std::shared_ptr<Scope> parent;
  int depth;
  std::vector<std::pair<int, Value>> values = {};

  Value* find_own(int id);
  void set(int id, Value value);
};

class Interpreter {
 public:
  Interpreter(const NameTable& names, const Limits& limits, std::time_t now)
      : names_(names), budget_(limits), limits_(limits), now_(now) {}
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  std::string render(const Body& body, const Json& variables);
  int line() const noexcept { return line_; }  // that was evaluated last

  // For filters, tests and functions.
  Budget& budget() noexcept { return budget_; }
  std::time_t now() const noexcept { return now_; }
  Value text(std::string bytes, bool is_safe = false) { return Value::text(std::move(bytes), &budget_, is_safe); }
  Value list(std::vector<Value> items, List::Kind kind = List::Kind::List) {
    return Value(std::make_shared<const List>(kind, std::move(items), budget_));
  }
  Value generator(std::vector<Value> items) { return list(std::move(items), List::Kind::Generator); }
  Value dict(std::vector<std::pair<Value, Value>> members) {
    return Value(std::make_shared<const Dict>(std::move(members), budget_));
  }
  Value make_namespace(std::vector<std::pair<std::string, Value>> members);
  std::string string(const Value& value);                         // str(value)
  std::vector<Value> elements(const Value& value);                // of anything that Python iterates
  Value attribute(const Value& object, const std::string& name);  // object.name
  Value item(const Value& object, const Value& index);            // object[index]
  Value call(const Value& function, Arguments& arguments);
  Value filter(const std::string& name, const Value& input, Arguments& arguments);
  bool test(const std::string& name, const Value& input, Arguments& arguments);
  Value operate(std::string_view op, const Value& left, const Value& right);
  bool contains(const Value& container, const Value& element);

 private:
  enum class Flow : u8 { Next, Break, Continue };
  class Deeper;

  Value evaluate(const Node& node);
  Value evaluate_item(const Node& node);
  Value evaluate_slice(const Node& node);
  Value evaluate_call(const Node& node);
  Value evaluate_filter(const Node& node);
  Value evaluate_concat(const Node& node);
  Value evaluate_compare(const Node& node);
  Value evaluate_dict(const Node& node);
  Arguments evaluate_arguments(const CallParts& call);
  Value look_up(int id);
  Value method_of(const Value& object, const std::string& name);
  Value loop_attribute(Loop& loop, const std::string& name);

  Flow run(const Body& body, Builder& out);
  Flow run(const Node& node, Builder& out);
  Flow run_if(const Node& node, Builder& out);
  Flow run_for(const Node& node, Builder& out);
  Flow run_loop(const Node& node, std::vector<Value> items, int nesting, int depth0, Builder& out);
  Flow run_with(const Node& node, Builder& out);
  void run_call_block(const Node& node, Builder& out);
  void assign(const Node& target, Value value);
  void assign_all(const Node& target, const Value& value);
  std::string text_of(const Body& body);  // in a scope of its own
  bool advance(Loop& loop);
  bool take_next(Loop& loop, Value& out);
  bool has_next(Loop& loop);
  bool is_wanted(Loop& loop, const Value& value);
  Value macro_value(const Node& node);
  Value call_macro(const Function& macro, Arguments& arguments);
  Value call_loop(Loop& loop, Arguments& arguments);

  const NameTable& names_;
  Budget budget_;  // outlives all values
  Limits limits_;
  std::time_t now_;
  int line_ = 0, depth_ = 0;
  std::deque<Namespace> namespaces_;
  std::vector<std::shared_ptr<Scope>> captured_;  // by macros, which they may contain: emptied at the end
  std::vector<const Value*> block_texts_;         // the inputs of filters of blocks
  std::shared_ptr<Scope> scope_;
};

// One more evaluation within others, on a stack that is not ours to exhaust.
class Interpreter::Deeper {
 public:
  Deeper(Interpreter& interpreter, int line) : interpreter_(interpreter) {
    interpreter_.budget_.step();
    interpreter_.line_ = line;
    if (++interpreter_.depth_ > interpreter_.limits_.depth) {
      --interpreter_.depth_;
      throw Error(Errc::Unavailable, "the template calls itself too deep");
    }
  }
  ~Deeper() { --interpreter_.depth_; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  Interpreter& interpreter_;
};

}  // namespace ds::jinja
