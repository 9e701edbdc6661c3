// SPDX-License-Identifier: Apache-2.0
#pragma once
// A position among lexemes, and the grammar of jinja2's expressions from there
// on.

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/jinja/lexer.h"
#include "data/jinja/syntax.h"
#include "ds/error.h"

namespace ds::jinja {

using Words = std::initializer_list<std::string_view>;

class ExpressionParser {
 public:
  ExpressionParser(std::vector<Lexeme> lexemes, std::string_view name, NameTable& names)
      : lexemes_(std::move(lexemes)), name_(name), names_(names) {}
  ExpressionParser(const ExpressionParser&) = delete;
  ExpressionParser& operator=(const ExpressionParser&) = delete;

 protected:
  // The surroundings of a body: whether it is in a loop, and which names it
  // mentions that macros have of their own.
  struct Place {
    bool is_loop = false, takes_more = false, takes_named = false, takes_caller = false;
  };
  // One more level of recursion, while it lives.
  class Nested {
   public:
    explicit Nested(ExpressionParser& parser);
    ~Nested() { --parser_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    ExpressionParser& parser_;
  };

  [[noreturn]] void fail(std::string_view message, Errc code = Errc::Corrupt) const {
    fail_at(now().line, message, code);
  }
  [[noreturn]] void fail_at(int line, std::string_view message, Errc code = Errc::Corrupt) const;

  const Lexeme& now() const { return lexemes_[at_]; }
  const Lexeme& after() const { return lexemes_[at_ + 1 < lexemes_.size() ? at_ + 1 : at_]; }
  const Lexeme& take() { return lexemes_[at_ + 1 < lexemes_.size() ? at_++ : at_]; }
  bool take_if_name(std::string_view word) { return now().is_name(word) && (take(), true); }
  bool take_if(std::string_view op) { return now().is_operator(op) && (take(), true); }
  bool is_one_of(Words words) const;
  static std::string spelled(const Lexeme& lexeme);
  void expect(std::string_view op);
  std::string expect_name();

  NodePtr node(Kind kind, int line) const { return std::make_unique<Node>(kind, line); }
  template <class... Parts>
  NodePtr node_of(Kind kind, int line, Parts... parts) const {
    NodePtr made = node(kind, line);
    (add_part(*made, std::move(parts)), ...);
    return made;
  }
  void add_part(Node& to, NodePtr part) const;

  // An expression, or a tuple without brackets, which a name may end. With
  // `with_condition`, `x if y else z` is one.
  NodePtr tuple_or_expression(bool with_condition = true, std::string_view end = {}, bool may_be_empty = false);
  NodePtr expression();
  NodePtr one_filter(NodePtr input);  // after the |
  NodePtr filters(NodePtr input);     // any number of them

  NameTable& names() const { return names_; }
  Place& place() { return places_.back(); }
  std::vector<Place>& places() { return places_; }

 private:
  void add_call(Node& to, std::unique_ptr<CallParts> call) const;
  void check_depth(const Node& node) const;
  bool ends_tuple(std::string_view word) const;
  NodePtr disjunction();
  NodePtr conjunction();
  NodePtr negation();
  NodePtr comparison();
  std::string comparison_operator();
  template <class Operand>
  NodePtr binary(Words operators, Operand&& operand);
  NodePtr sum();
  NodePtr concatenation();
  NodePtr product();
  NodePtr unary(bool with_filters);
  NodePtr constant(int line, Value value) const;
  NodePtr primary();
  NodePtr name(int line);
  NodePtr display();
  NodePtr postfix(NodePtr value);
  NodePtr call_of(NodePtr function);
  NodePtr attribute(NodePtr object);
  NodePtr subscript(NodePtr object);
  std::unique_ptr<CallParts> arguments();
  std::string dotted_name();
  NodePtr test(NodePtr input);
  NodePtr filters_and_tests(NodePtr value);

  std::vector<Lexeme> lexemes_;
  std::string_view name_;
  NameTable& names_;
  size_t at_ = 0;
  int depth_ = 0;
  std::vector<Place> places_{1};
};

}  // namespace ds::jinja
