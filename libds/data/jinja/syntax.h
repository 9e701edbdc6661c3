// SPDX-License-Identifier: Apache-2.0
#pragma once
// A template as a tree.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/jinja/value.h"

namespace ds::jinja {

enum class Kind : u8 {
  // Expressions. parts: operands in order.
  Constant,
  Name,  // id
  List,
  Tuple,
  Dict,       // parts: key, value, key, ..
  Attribute,  // parts: object; name
  Item,       // parts: object, index
  Slice,      // parts: object, begin, end, step, each of the last three null if it
              // is missing
  Call,       // parts: function; call
  Filter,     // parts: input, null in a block of text; name, call
  Test,       // parts: input; name, call
  Not,
  Negative,
  Positive,
  Binary,  // name: the operator
  And,
  Or,
  Concat,
  Compare,    // names: an operator before each part but the first
  Condition,  // parts: condition, then, otherwise (null if it is missing)
  // Targets of assignments are Name, Tuple, and
  Member,  // id of a namespace; name
  // Statements
  Output,       // parts
  If,           // parts: conditions; bodies: one for each, and perhaps one more
  For,          // parts: target, iterable, condition (may be null); bodies: of elements,
                // and of none
  Set,          // parts: target, value
  SetBlock,     // parts: target, filter (may be null); bodies
  With,         // parts: target, value, target, ..; bodies
  Macro,        // id, ids: parameters, parts: defaults of the last ones; bodies
  CallBlock,    // parts: call, its text as a macro
  FilterBlock,  // parts: filter; bodies
  Generation,   // bodies
  Break,
  Continue,
};

struct Node;
using NodePtr = std::unique_ptr<Node>;
using Body = std::vector<NodePtr>;

struct CallParts {
  std::vector<NodePtr> positional;
  std::vector<std::pair<std::string, NodePtr>> named;
  NodePtr list, dict;  // *list and **dict
};

struct Node {
  Node(Kind node_kind, int at_line) : kind(node_kind), line(at_line) {}

  Kind kind;
  bool is_recursive = false;  // For
  bool takes_more = false, takes_named = false,
       takes_caller = false;  // Macro: mentions varargs, kwargs, caller
  int line;
  int depth = 1;  // of the expressions below and this one
  int id = -1;
  std::string name = {};
  Value constant = {};
  std::vector<NodePtr> parts = {};
  std::vector<std::string> names = {};
  std::vector<int> ids = {};
  std::vector<Body> bodies = {};
  std::unique_ptr<CallParts> call = nullptr;
};

// Names of variables as numbers.
class NameTable {
 public:
  int id(std::string_view name);
  const std::string& name(int id) const { return names_[static_cast<size_t>(id)]; }
  int find(std::string_view name) const;  // -1: nothing mentions it

 private:
  std::unordered_map<std::string, int> ids_;
  std::vector<std::string> names_;
};

// Throws Errc::Corrupt for mistakes and Errc::Unavailable for what is not
// supported, "name:line: ..".
Body parse(std::string_view source, std::string_view name, NameTable& names);

}  // namespace ds::jinja
