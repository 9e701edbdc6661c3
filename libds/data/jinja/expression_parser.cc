// SPDX-License-Identifier: Apache-2.0
#include "data/jinja/expression_parser.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace ds::jinja {

ExpressionParser::Nested::Nested(ExpressionParser& parser) : parser_(parser) {
  if (++parser.depth_ > kMostNesting)
    parser.fail(fmt::format("tags or brackets are nested more than {} deep", kMostNesting), Errc::Unavailable);
}

void ExpressionParser::fail_at(int line, std::string_view message, Errc code) const {
  throw Error(code, fmt::format("{}:{}: {}", name_, line, message));
}

bool ExpressionParser::is_one_of(Words words) const {
  return now().token == Token::Name && std::ranges::find(words, now().text) != words.end();
}

std::string ExpressionParser::spelled(const Lexeme& lexeme) {
  switch (lexeme.token) {
    case Token::End: return "the end of the template";
    case Token::BlockEnd: return "'%}'";
    case Token::VariableEnd: return "'}}'";
    case Token::Integer: return fmt::format("'{}'", lexeme.integer);
    default: return fmt::format("'{}'", lexeme.text.substr(0, 40));
  }
}

void ExpressionParser::expect(std::string_view op) {
  if (!take_if(op)) fail(fmt::format("expected '{}', not {}", op, spelled(now())));
}

std::string ExpressionParser::expect_name() {
  if (now().token != Token::Name) fail(fmt::format("expected a name, not {}", spelled(now())));
  return take().text;
}

void ExpressionParser::check_depth(const Node& made) const {
  if (made.depth > kMostNesting)
    fail_at(made.line, fmt::format("an expression is nested more than {} deep", kMostNesting), Errc::Unavailable);
}

void ExpressionParser::add_part(Node& to, NodePtr part) const {
  if (part != nullptr) to.depth = std::max(to.depth, part->depth + 1);
  check_depth(to);
  to.parts.push_back(std::move(part));
}

void ExpressionParser::add_call(Node& to, std::unique_ptr<CallParts> call) const {
  const auto look = [&](const NodePtr& part) {
    if (part != nullptr) to.depth = std::max(to.depth, part->depth + 1);
  };
  std::ranges::for_each(call->positional, look);
  for (const auto& [ignored, part] : call->named) look(part);
  look(call->list);
  look(call->dict);
  check_depth(to);
  to.call = std::move(call);
}

bool ExpressionParser::ends_tuple(std::string_view word) const {
  return now().token == Token::VariableEnd || now().token == Token::BlockEnd || now().is_operator(")") ||
         (!word.empty() && now().is_name(word));
}

NodePtr ExpressionParser::tuple_or_expression(bool with_condition, std::string_view end, bool may_be_empty) {
  const int line = now().line;
  std::vector<NodePtr> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) expect(",");
    if (ends_tuple(end)) break;
    items.push_back(with_condition ? expression() : disjunction());
    if (!now().is_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return std::move(items[0]);
  if (!is_tuple && !may_be_empty) fail(fmt::format("expected an expression, not {}", spelled(now())));
  NodePtr made = node(Kind::Tuple, line);
  for (NodePtr& item : items) add_part(*made, std::move(item));
  return made;
}

NodePtr ExpressionParser::expression() {
  const Nested nested(*this);
  NodePtr value = disjunction();
  while (now().is_name("if")) {
    const int line = take().line;
    NodePtr condition = disjunction();
    NodePtr otherwise = take_if_name("else") ? expression() : nullptr;
    value = node_of(Kind::Condition, line, std::move(condition), std::move(value), std::move(otherwise));
  }
  return value;
}

NodePtr ExpressionParser::disjunction() {
  NodePtr left = conjunction();
  while (now().is_name("or")) {
    const int line = take().line;
    left = node_of(Kind::Or, line, std::move(left), conjunction());
  }
  return left;
}

NodePtr ExpressionParser::conjunction() {
  NodePtr left = negation();
  while (now().is_name("and")) {
    const int line = take().line;
    left = node_of(Kind::And, line, std::move(left), negation());
  }
  return left;
}

NodePtr ExpressionParser::negation() {
  if (!now().is_name("not")) return comparison();
  const Nested nested(*this);
  const int line = take().line;
  return node_of(Kind::Not, line, negation());
}

std::string ExpressionParser::comparison_operator() {
  for (const std::string_view op : {"==", "!=", "<", "<=", ">", ">="})
    if (take_if(op)) return std::string(op);
  if (take_if_name("in")) return "in";
  if (now().is_name("not") && after().is_name("in")) return take(), take(), "not in";
  return {};
}

NodePtr ExpressionParser::comparison() {
  const int line = now().line;
  NodePtr first = sum();
  std::string op = comparison_operator();
  if (op.empty()) return first;
  NodePtr made = node_of(Kind::Compare, line, std::move(first));
  for (; !op.empty(); op = comparison_operator()) {
    made->names.push_back(op);
    add_part(*made, sum());
  }
  return made;
}

// Operators of one rank, from left to right.
template <class Operand>
NodePtr ExpressionParser::binary(Words operators, Operand&& operand) {
  NodePtr left = operand();
  for (;;) {
    const auto op = std::ranges::find_if(operators, [&](std::string_view o) { return now().is_operator(o); });
    if (op == operators.end()) return left;
    const int line = take().line;
    left = node_of(Kind::Binary, line, std::move(left), operand());
    left->name = *op;
  }
}
NodePtr ExpressionParser::sum() {
  return binary({"+", "-"}, [&] { return concatenation(); });
}
NodePtr ExpressionParser::concatenation() {
  const int line = now().line;
  NodePtr first = product();
  if (!now().is_operator("~")) return first;
  NodePtr made = node_of(Kind::Concat, line, std::move(first));
  while (take_if("~")) add_part(*made, product());
  return made;
}
NodePtr ExpressionParser::product() {
  return binary({"*", "/", "//", "%"}, [&] { return binary({"**"}, [&] { return unary(true); }); });
}

NodePtr ExpressionParser::unary(bool with_filters) {
  const int line = now().line;
  NodePtr value;
  if (now().is_operator("-") || now().is_operator("+")) {
    const Nested nested(*this);
    const Kind kind = take().text == "-" ? Kind::Negative : Kind::Positive;
    value = node_of(kind, line, unary(false));
  } else {
    value = primary();
  }
  value = postfix(std::move(value));
  return with_filters ? filters_and_tests(std::move(value)) : std::move(value);
}

NodePtr ExpressionParser::constant(int line, Value value) const {
  NodePtr made = node(Kind::Constant, line);
  made->constant = std::move(value);
  return made;
}

NodePtr ExpressionParser::primary() {
  const int line = now().line;
  switch (now().token) {
    case Token::Name: return name(line);
    case Token::Integer: return constant(line, Value(take().integer));
    case Token::Real: return constant(line, Value(take().real));
    case Token::String: {
      std::string text;
      while (now().token == Token::String) text += take().text;
      return constant(line, Value::text(std::move(text), nullptr));
    }
    default: break;
  }
  if (take_if("(")) {
    const Nested nested(*this);
    NodePtr made = tuple_or_expression(true, {}, true);
    expect(")");
    return made;
  }
  if (now().is_operator("[") || now().is_operator("{")) return display();
  fail(fmt::format("unexpected {}", spelled(now())));
}

NodePtr ExpressionParser::name(int line) {
  const std::string text = take().text;
  if (text == "true" || text == "True") return constant(line, Value(true));
  if (text == "false" || text == "False") return constant(line, Value(false));
  if (text == "none" || text == "None") return constant(line, Value());
  place().takes_more |= text == "varargs";
  place().takes_named |= text == "kwargs";
  place().takes_caller |= text == "caller";
  NodePtr made = node(Kind::Name, line);
  made->id = names_.id(text);
  return made;
}

NodePtr ExpressionParser::display() {
  const Nested nested(*this);
  const int line = now().line;
  const bool is_dict = take().text == "{";
  NodePtr made = node(is_dict ? Kind::Dict : Kind::List, line);
  const std::string_view close = is_dict ? "}" : "]";
  while (!now().is_operator(close)) {
    if (!made->parts.empty()) expect(",");
    if (now().is_operator(close)) break;
    add_part(*made, expression());
    if (!is_dict) continue;
    expect(":");
    add_part(*made, expression());
  }
  expect(close);
  return made;
}

NodePtr ExpressionParser::postfix(NodePtr value) {
  for (;;) {
    if (now().is_operator(".")) {
      value = attribute(std::move(value));
    } else if (now().is_operator("[")) {
      value = subscript(std::move(value));
    } else if (now().is_operator("(")) {
      value = call_of(std::move(value));
    } else {
      return value;
    }
  }
}

NodePtr ExpressionParser::call_of(NodePtr function) {
  const int line = now().line;
  NodePtr made = node_of(Kind::Call, line, std::move(function));
  add_call(*made, arguments());
  return made;
}

NodePtr ExpressionParser::attribute(NodePtr object) {
  const int line = take().line;
  if (now().token == Token::Integer)
    return node_of(Kind::Item, line, std::move(object), constant(line, Value(take().integer)));
  NodePtr made = node_of(Kind::Attribute, line, std::move(object));
  made->name = expect_name();
  return made;
}

NodePtr ExpressionParser::subscript(NodePtr object) {
  const Nested nested(*this);
  const int line = take().line;
  const auto bound = [&]() -> NodePtr {
    return now().is_operator(":") || now().is_operator("]") ? nullptr : expression();
  };
  NodePtr begin = bound();
  NodePtr made;
  if (take_if(":")) {
    NodePtr end = bound();
    NodePtr step = take_if(":") ? bound() : nullptr;
    made = node_of(Kind::Slice, line, std::move(object), std::move(begin), std::move(end), std::move(step));
  } else if (now().is_operator(",")) {
    fail("an index of several values is not supported", Errc::Unavailable);
  } else if (begin == nullptr) {
    fail("an index is missing");
  } else {
    made = node_of(Kind::Item, line, std::move(object), std::move(begin));
  }
  expect("]");
  return made;
}

std::unique_ptr<CallParts> ExpressionParser::arguments() {
  const Nested nested(*this);
  auto call = std::make_unique<CallParts>();
  const auto require = [&](bool is_fine) {
    if (!is_fine) fail("invalid arguments of a call");
  };
  expect("(");
  for (bool is_first = true; !now().is_operator(")"); is_first = false) {
    if (!is_first) expect(",");
    if (now().is_operator(")")) break;
    if (take_if("*")) {
      require(!call->list && !call->dict);
      call->list = expression();
    } else if (take_if("**")) {
      require(!call->dict);
      call->dict = expression();
    } else if (now().token == Token::Name && after().is_operator("=")) {
      require(!call->dict);
      std::string keyword = take().text;
      take();
      if (std::ranges::any_of(call->named, [&](const auto& other) { return other.first == keyword; }))
        fail(fmt::format("the argument '{}' is repeated", keyword));
      call->named.emplace_back(std::move(keyword), expression());
    } else {
      require(!call->list && !call->dict && call->named.empty());
      call->positional.push_back(expression());
    }
  }
  expect(")");
  return call;
}

std::string ExpressionParser::dotted_name() {
  std::string text = expect_name();
  while (take_if(".")) text += "." + expect_name();
  return text;
}

NodePtr ExpressionParser::one_filter(NodePtr input) {
  NodePtr made = node_of(Kind::Filter, now().line, std::move(input));
  made->name = dotted_name();
  add_call(*made, now().is_operator("(") ? arguments() : std::make_unique<CallParts>());
  return made;
}

NodePtr ExpressionParser::filters(NodePtr input) {
  while (take_if("|")) input = one_filter(std::move(input));
  return input;
}

NodePtr ExpressionParser::test(NodePtr input) {
  const int line = take().line;
  const bool is_negated = take_if_name("not");
  NodePtr made = node_of(Kind::Test, line, std::move(input));
  made->name = dotted_name();
  auto call = std::make_unique<CallParts>();
  const Token token = now().token;
  if (now().is_operator("(")) {
    call = arguments();
  } else if ((token == Token::Name || token == Token::String || token == Token::Integer || token == Token::Real ||
              now().is_operator("[") || now().is_operator("{")) &&
             !is_one_of({"else", "or", "and"})) {
    if (now().is_name("is")) fail("tests cannot be chained with 'is'");
    call->positional.push_back(postfix(primary()));
  }
  add_call(*made, std::move(call));
  return is_negated ? node_of(Kind::Not, line, std::move(made)) : std::move(made);
}

NodePtr ExpressionParser::filters_and_tests(NodePtr value) {
  for (;;) {
    if (now().is_operator("|")) {
      value = filters(std::move(value));
    } else if (now().is_name("is")) {
      value = test(std::move(value));
    } else if (now().is_operator("(")) {
      value = call_of(std::move(value));
    } else {
      return value;
    }
  }
}

}  // namespace ds::jinja
