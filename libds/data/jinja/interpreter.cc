// SPDX-License-Identifier: Apache-2.0
// Statements, scopes, loops and macros.
#include "data/jinja/interpreter.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "data/jinja/tables.h"

namespace ds::jinja {
namespace {

constexpr int kMostScopes = 1000;

}  // namespace

Scope::Scope(std::shared_ptr<Scope> outer)
    : parent(std::move(outer)), depth(parent == nullptr ? 0 : parent->depth + 1) {
  DS_CHECK(depth <= kMostScopes, Errc::Unavailable, "macros are nested more than {} deep", kMostScopes);
}

Value* Scope::find_own(int id) {
  const auto found = std::ranges::find(values, id, &std::pair<int, Value>::first);
  return found == values.end() ? nullptr : &found->second;
}

void Scope::set(int id, Value value) {
  if (Value* own = find_own(id)) {
    *own = std::move(value);
  } else {
    values.emplace_back(id, std::move(value));
  }
}

namespace {

// A scope for as long as a block runs.
class Inside {
 public:
  Inside(std::shared_ptr<Scope>& current, std::shared_ptr<Scope> parent) : current_(current), outer_(current) {
    current_ = std::make_shared<Scope>(std::move(parent));
  }
  ~Inside() { current_ = std::move(outer_); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  const std::shared_ptr<Scope>& outer() const noexcept { return outer_; }

 private:
  std::shared_ptr<Scope>& current_;
  std::shared_ptr<Scope> outer_;
};

}  // namespace

Interpreter::~Interpreter() {
  // A macro refers to the scope that contains it, so scopes would own
  // themselves.
  if (scope_ != nullptr) scope_->values.clear();
  for (const auto& scope : captured_) scope->values.clear();
  for (Namespace& space : namespaces_) space.members.clear();
}

std::string Interpreter::render(const Body& body, const Json& variables) {
  scope_ = std::make_shared<Scope>(nullptr);
  for (const auto& [key, value] : variables.items())
    if (const int id = names_.find(key); id >= 0) scope_->set(id, value_of(value, budget_));
  const Inside inside(scope_, scope_);
  Builder out(budget_);
  run(body, out);
  return out.finish();
}

Value Interpreter::make_namespace(std::vector<std::pair<std::string, Value>> members) {
  budget_.take(static_cast<i64>(sizeof(Namespace) + 128 * members.size()));
  namespaces_.push_back({std::move(members)});
  return Value(&namespaces_.back());
}

std::string Interpreter::text_of(const Body& body) {
  const Inside inside(scope_, scope_);
  Builder out(budget_);
  run(body, out);
  return out.finish();
}

Interpreter::Flow Interpreter::run(const Body& body, Builder& out) {
  for (const NodePtr& node : body)
    if (const Flow flow = run(*node, out); flow != Flow::Next) return flow;
  return Flow::Next;
}

Interpreter::Flow Interpreter::run(const Node& node, Builder& out) {
  const Deeper deeper(*this, node.line);
  switch (node.kind) {
    case Kind::Output:
      for (const NodePtr& part : node.parts) {
        if (part->kind == Kind::Constant && part->constant.is_text()) {
          out.add(part->constant.as_text().bytes);
        } else {
          write(out, evaluate(*part));
        }
      }
      return Flow::Next;
    case Kind::If: return run_if(node, out);
    case Kind::For: return run_for(node, out);
    case Kind::With: return run_with(node, out);
    case Kind::Set: assign(*node.parts[0], evaluate(*node.parts[1])); return Flow::Next;
    case Kind::SetBlock:
    case Kind::FilterBlock: {
      Value value = text(text_of(node.bodies[0]));
      const Node* const filter = node.parts.back().get();
      if (filter != nullptr) {
        block_texts_.push_back(&value);
        Value filtered = evaluate(*filter);
        block_texts_.pop_back();
        value = std::move(filtered);
      }
      if (node.kind == Kind::FilterBlock) {
        DS_CHECK(value.is_text(), Errc::Config, "the filter of a block gives a value of type {}, not text",
                 type_name(value));
        write(out, value);
      } else {
        assign(*node.parts[0], std::move(value));
      }
      return Flow::Next;
    }
    case Kind::Macro: scope_->set(node.id, macro_value(node)); return Flow::Next;
    case Kind::CallBlock: run_call_block(node, out); return Flow::Next;
    case Kind::Generation: {
      const Inside inside(scope_, scope_);
      return run(node.bodies[0], out);
    }
    case Kind::Break: return Flow::Break;
    case Kind::Continue: return Flow::Continue;
    default: throw Error(Errc::Internal, "internal error: a statement of unknown kind");
  }
}

Interpreter::Flow Interpreter::run_if(const Node& node, Builder& out) {
  for (size_t i = 0; i < node.parts.size(); ++i)
    if (truth(evaluate(*node.parts[i]))) return run(node.bodies[i], out);
  return node.bodies.size() > node.parts.size() ? run(node.bodies.back(), out) : Flow::Next;
}

Interpreter::Flow Interpreter::run_with(const Node& node, Builder& out) {
  std::vector<Value> values;
  for (size_t i = 1; i < node.parts.size(); i += 2) values.push_back(evaluate(*node.parts[i]));
  const Inside inside(scope_, scope_);
  for (size_t i = 0; i < values.size(); ++i) assign(*node.parts[2 * i], std::move(values[i]));
  return run(node.bodies[0], out);
}

void Interpreter::assign(const Node& target, Value value) {
  budget_.step();
  if (target.kind == Kind::Tuple) return assign_all(target, value);
  if (target.kind == Kind::Name) return scope_->set(target.id, std::move(value));
  const Value space = look_up(target.id);
  DS_CHECK(space.is<Namespace*>(), Errc::Config, "'{}' is no namespace, so its member '{}' cannot be set",
           names_.name(target.id), target.name);
  DS_CHECK(!target.name.starts_with('_'), Errc::Config, "a namespace has no member '{}': names must not begin with _",
           target.name);
  Namespace& members = *space.as<Namespace*>();
  if (Value* own = members.find(target.name)) {
    *own = std::move(value);
  } else {
    budget_.take(128);
    members.members.emplace_back(target.name, std::move(value));
  }
}

void Interpreter::assign_all(const Node& target, const Value& value) {
  std::vector<Value> items = elements(value);
  DS_CHECK(items.size() == target.parts.size(), Errc::Config, "{} values cannot be assigned to {} names", items.size(),
           target.parts.size());
  for (size_t i = 0; i < items.size(); ++i) assign(*target.parts[i], std::move(items[i]));
}

// Loops
// ---------------------------------------------------------------------------------------------------------------

Interpreter::Flow Interpreter::run_for(const Node& node, Builder& out) {
  const Value iterable = evaluate(*node.parts[1]);
  return run_loop(node, elements(iterable), depth_of(iterable), 0, out);
}

Interpreter::Flow Interpreter::run_loop(const Node& node, std::vector<Value> items, int nesting, int depth0,
                                        Builder& out) {
  const auto loop = std::make_shared<Loop>();
  budget_.take(static_cast<i64>(items.size() * sizeof(Value)));
  const i64 bytes = static_cast<i64>(items.size() * sizeof(Value));
  loop->items = std::move(items);
  loop->nesting = nesting;
  loop->depth0 = depth0;
  loop->node = &node;
  loop->is_filtered = node.parts[2] != nullptr;
  loop->scope = scope_;
  static constexpr std::string_view kLoop = "loop";
  const int loop_id = names_.find(kLoop);
  bool is_empty = true;  // as jinja2 sees it: no element reached the end of the body
  while (advance(*loop)) {
    const Inside inside(scope_, scope_);
    if (loop_id >= 0) scope_->set(loop_id, Value(loop));
    assign(*node.parts[0], loop->current);
    const Flow flow = run(node.bodies[0], out);
    if (flow == Flow::Break) break;
    is_empty = is_empty && flow == Flow::Continue;
  }
  loop->scope = nullptr;
  loop->items.clear();
  budget_.give(bytes);
  if (!is_empty || node.bodies.size() < 2) return Flow::Next;
  const Inside inside(scope_, scope_);
  return run(node.bodies[1], out);
}

bool Interpreter::is_wanted(Loop& loop, const Value& value) {
  if (!loop.is_filtered) return true;
  const Inside inside(scope_, loop.scope);
  assign(*loop.node->parts[0], value);
  return truth(evaluate(*loop.node->parts[2]));
}

bool Interpreter::take_next(Loop& loop, Value& out) {
  while (loop.next < loop.items.size()) {
    budget_.step();
    Value value = loop.items[loop.next++];
    if (!is_wanted(loop, value)) continue;
    out = std::move(value);
    return true;
  }
  return false;
}

bool Interpreter::has_next(Loop& loop) {
  Value value;
  if (loop.ahead.empty() && take_next(loop, value)) loop.ahead.push_back(std::move(value));
  return !loop.ahead.empty();
}

bool Interpreter::advance(Loop& loop) {
  Value value;
  if (!loop.ahead.empty()) {
    value = std::move(loop.ahead.back());
    loop.ahead.pop_back();
  } else if (!take_next(loop, value)) {
    return false;
  }
  loop.has_previous = ++loop.index0 > 0;
  loop.previous = std::move(loop.current);
  loop.current = std::move(value);
  return true;
}

namespace {

Value cycle(Interpreter&, const Value& self, Arguments& arguments) {
  const Loop& loop = *self.as<std::shared_ptr<Loop>>();
  DS_CHECK(!arguments.positional.empty(), Errc::Config, "loop.cycle() needs values");
  return arguments.positional[static_cast<size_t>(loop.index0) % arguments.positional.size()];
}

Value changed(Interpreter& in, const Value& self, Arguments& arguments) {
  Loop& loop = *self.as<std::shared_ptr<Loop>>();
  const bool is_same =
      loop.changed && std::ranges::equal(*loop.changed, arguments.positional,
                                         [&](const Value& a, const Value& b) { return equals(in.budget(), a, b); });
  for (const Value& value : arguments.positional)
    DS_CHECK(depth_of(value) == 0, Errc::Unavailable, "loop.changed() of a list is not supported");
  loop.changed = std::move(arguments.positional);
  return Value(!is_same);
}

}  // namespace

Value Interpreter::loop_attribute(Loop& loop, const std::string& name) {
  const auto length = [&] {  // of a loop with a condition, which is then asked for all the rest
    if (!loop.is_filtered) return static_cast<i64>(loop.items.size());
    std::vector<Value> rest;
    for (Value value; take_next(loop, value);) rest.push_back(std::move(value));
    loop.items = std::move(rest);
    loop.next = 0;
    loop.is_filtered = false;
    const i64 before = loop.index0 + 1 + static_cast<i64>(loop.ahead.size());
    loop.items.insert(loop.items.begin(), static_cast<size_t>(before), Value());
    loop.next = static_cast<size_t>(before);
    return static_cast<i64>(loop.items.size());
  };
  if (name == "index0") return Value(loop.index0);
  if (name == "index") return Value(loop.index0 + 1);
  if (name == "first") return Value(loop.index0 == 0);
  if (name == "last") return Value(!has_next(loop));
  if (name == "length") return Value(length());
  if (name == "revindex") return Value(length() - loop.index0);
  if (name == "revindex0") return Value(length() - loop.index0 - 1);
  if (name == "depth") return Value(static_cast<i64>(loop.depth0) + 1);
  if (name == "depth0") return Value(static_cast<i64>(loop.depth0));
  if (name == "previtem") return loop.has_previous ? loop.previous : Value::undefined("there is no previous item");
  if (name == "nextitem") return has_next(loop) ? loop.ahead.back() : Value::undefined("there is no next item");
  return Value::undefined(fmt::format("a loop has no attribute '{}'", name));
}

Value Interpreter::call_loop(Loop& loop, Arguments& arguments) {
  DS_CHECK(loop.node->is_recursive && loop.scope != nullptr, Errc::Config,
           "the loop is not recursive, so it cannot be called");
  const Bound bound(arguments, "loop", {"iterable"}, 1);
  std::vector<Value> items = elements(bound[0]);
  const Inside inside(scope_, loop.scope);
  Builder out(budget_);
  run_loop(*loop.node, std::move(items), depth_of(bound[0]), loop.depth0 + 1, out);
  return text(out.finish());
}

// Macros
// --------------------------------------------------------------------------------------------------------------

Value Interpreter::macro_value(const Node& node) {
  budget_.take(static_cast<i64>(sizeof(Function) + sizeof(Scope)));
  captured_.push_back(scope_);
  return Value(std::make_shared<const Function>(Function{.name = node.name, .macro = &node, .scope = scope_}));
}

void Interpreter::run_call_block(const Node& node, Builder& out) {
  const Node& call_node = *node.parts[0];
  const Value function = evaluate(*call_node.parts[0]);
  Arguments arguments = evaluate_arguments(*call_node.call);
  arguments.named.emplace_back("caller", macro_value(*node.parts[1]));
  write(out, call(function, arguments));
}

Value Interpreter::call_macro(const Function& function, Arguments& arguments) {
  const Node& macro = *function.macro;
  const size_t count = macro.ids.size(), given = std::min(count, arguments.positional.size());
  const Inside inside(scope_, function.scope);
  std::vector<std::pair<Value, Value>> more_named;
  for (size_t i = 0; i < given; ++i) scope_->set(macro.ids[i], arguments.positional[i]);
  std::vector<bool> is_set(count, false);
  for (auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find_if(macro.ids, [&](int id) { return names_.name(id) == name; });
    const size_t at = static_cast<size_t>(found - macro.ids.begin());
    if (found != macro.ids.end() && at >= given) {
      scope_->set(*found, std::move(value));
      is_set[at] = true;
    } else if (name == "caller" && macro.takes_caller && found == macro.ids.end()) {
      scope_->set(names_.find("caller"), std::move(value));
    } else {
      DS_CHECK(macro.takes_named && found == macro.ids.end(), Errc::Config, "the macro '{}' takes no argument '{}'",
               macro.name, name);
      more_named.emplace_back(text(name), std::move(value));
    }
  }
  const size_t first_default = count - macro.parts.size();
  for (size_t i = given; i < count; ++i) {
    if (is_set[i]) continue;
    scope_->set(macro.ids[i], i >= first_default ? evaluate(*macro.parts[i - first_default])
                                                 : Value::undefined(fmt::format("the parameter '{}' was not given",
                                                                                names_.name(macro.ids[i]))));
  }
  const bool takes_caller = macro.takes_caller && scope_->find_own(names_.find("caller")) == nullptr;
  if (takes_caller) scope_->set(names_.find("caller"), Value::undefined("the macro was not used by {% call %}"));
  if (macro.takes_named) scope_->set(names_.find("kwargs"), dict(std::move(more_named)));
  DS_CHECK(macro.takes_more || arguments.positional.size() <= count, Errc::Config,
           "the macro '{}' takes at most {} arguments", macro.name, count);
  if (macro.takes_more)
    scope_->set(names_.find("varargs"),
                list({std::make_move_iterator(arguments.positional.begin() + static_cast<std::ptrdiff_t>(given)),
                      std::make_move_iterator(arguments.positional.end())},
                     List::Kind::Tuple));
  Builder out(budget_);
  run(macro.bodies[0], out);
  return text(out.finish());
}

Value Interpreter::call(const Value& function, Arguments& arguments) {
  if (function.is<Undefined>()) throw Error(Errc::Config, *function.as<Undefined>().message);
  if (function.is<std::shared_ptr<Loop>>()) {
    const auto loop = function.as<std::shared_ptr<Loop>>();
    return call_loop(*loop, arguments);
  }
  DS_CHECK(function.is<std::shared_ptr<const Function>>(), Errc::Config, "a value of type {} cannot be called",
           type_name(function));
  const auto callee = function.as<std::shared_ptr<const Function>>();
  if (callee->native != nullptr) return callee->native(*this, callee->self, arguments);
  return call_macro(*callee, arguments);
}

Value Interpreter::method_of(const Value& object, const std::string& name) {
  Native native = find_method(object, name);
  if (object.is<std::shared_ptr<Loop>>()) native = name == "cycle" ? cycle : name == "changed" ? changed : nullptr;
  if (native == nullptr) return Value::undefined({});
  return Value(std::make_shared<const Function>(Function{.name = name, .native = native, .self = object}));
}

Value Interpreter::filter(const std::string& name, const Value& input, Arguments& arguments) {
  const Native native = find_filter(name);
  if (native == nullptr) throw Error(code_of_unknown(true, name), unknown_name(true, name));
  return native(*this, input, arguments);
}

bool Interpreter::test(const std::string& name, const Value& input, Arguments& arguments) {
  const Native native = find_test(name);
  if (native == nullptr) throw Error(code_of_unknown(false, name), unknown_name(false, name));
  return truth(native(*this, input, arguments));
}

Arguments Interpreter::evaluate_arguments(const CallParts& parts) {
  Arguments arguments;
  for (const NodePtr& part : parts.positional) arguments.positional.push_back(evaluate(*part));
  for (const auto& [name, part] : parts.named) arguments.named.emplace_back(name, evaluate(*part));
  if (parts.list != nullptr)
    for (Value& value : elements(evaluate(*parts.list))) arguments.positional.push_back(std::move(value));
  if (parts.dict == nullptr) return arguments;
  const Value dict = evaluate(*parts.dict);
  DS_CHECK(dict.is_dict(), Errc::Config, "** needs a mapping, not a value of type {}", type_name(dict));
  for (const auto& [key, value] : dict.as_dict().members) {
    DS_CHECK(key.is_text(), Errc::Config, "the names of arguments must be strings");
    const std::string& name = key.as_text().bytes;
    DS_CHECK(std::ranges::find(arguments.named, name, &std::pair<std::string, Value>::first) == arguments.named.end(),
             Errc::Config, "the argument '{}' is repeated", name);
    arguments.named.emplace_back(name, value);
  }
  return arguments;
}

}  // namespace ds::jinja
