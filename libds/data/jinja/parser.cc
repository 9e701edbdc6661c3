// SPDX-License-Identifier: Apache-2.0
// The statements of jinja2, with the tags that transformers gives to chat
// templates.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "data/jinja/expression_parser.h"
#include "data/jinja/lexer.h"
#include "data/jinja/syntax.h"
#include "data/jinja/tables.h"

namespace ds::jinja {

int NameTable::id(std::string_view name) {
  const auto [place, is_new] = ids_.try_emplace(std::string(name), static_cast<int>(names_.size()));
  if (is_new) names_.emplace_back(name);
  return place->second;
}

int NameTable::find(std::string_view name) const {
  const auto found = ids_.find(std::string(name));
  return found == ids_.end() ? -1 : found->second;
}

namespace {

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body run() {
    Body body = statements({});
    if (now().token != Token::End) fail("unexpected end of a block");
    for (const NodePtr& statement : body) check(*statement, false);
    return body;
  }

 private:
  void expect_end_of_tag() {
    if (now().token != Token::BlockEnd) fail(fmt::format("expected the end of the tag, not {}", spelled(now())));
    take();
  }

  // Up to a tag that begins with one of `ends`, which is left after its {%; to
  // the end of the template if there are none.
  Body statements(Words ends) {
    const Nested nested(*this);
    Body body;
    while (now().token != Token::End) {
      const Lexeme& lexeme = take();
      if (lexeme.token == Token::Text) {
        NodePtr text = node(Kind::Constant, lexeme.line);
        text->constant = Value::text(lexeme.text, nullptr);
        body.push_back(node_of(Kind::Output, lexeme.line, std::move(text)));
      } else if (lexeme.token == Token::VariableBegin) {
        body.push_back(node_of(Kind::Output, lexeme.line, tuple_or_expression()));
        if (now().token != Token::VariableEnd) fail(fmt::format("expected '}}}}', not {}", spelled(now())));
        take();
      } else {
        if (is_one_of(ends)) return body;
        body.push_back(statement());
        expect_end_of_tag();
      }
    }
    if (ends.size() > 0) fail(fmt::format("the template ends before {{% {} %}}", *(ends.end() - 1)));
    return body;
  }

  // The body of a tag, and its end.
  Body body_until(std::string_view end) {
    take_if(":");
    expect_end_of_tag();
    Body body = statements({end});
    take();
    return body;
  }

  NodePtr statement() {
    const int line = now().line;
    const std::string tag = expect_name();
    if (tag == "if") return if_statement(line);
    if (tag == "for") return for_statement(line);
    if (tag == "set") return set_statement(line);
    if (tag == "with") return with_statement(line);
    if (tag == "macro") return macro_statement(line);
    if (tag == "call") return call_block(line);
    if (tag == "filter") return filter_block(line);
    if (tag == "print") return print_statement(line);
    if (tag == "generation") {
      NodePtr made = node(Kind::Generation, line);
      made->bodies.push_back(function_body([&] { return body_until("endgeneration"); }));
      return made;
    }
    if (tag == "break" || tag == "continue") {
      if (!place().is_loop) fail_at(line, fmt::format("{{% {} %}} stands outside of a loop", tag));
      return node(tag == "break" ? Kind::Break : Kind::Continue, line);
    }
    for (const std::string_view known : {"block", "extends", "include", "import", "from", "autoescape"})
      if (tag == known)
        fail_at(line, fmt::format("the tag '{}' is not supported in chat templates", tag), Errc::Unavailable);
    fail_at(line, fmt::format("unknown tag '{}'", tag));
  }

  NodePtr if_statement(int line) {
    NodePtr made = node(Kind::If, line);
    for (;;) {
      add_part(*made, tuple_or_expression(false));
      take_if(":");
      expect_end_of_tag();
      made->bodies.push_back(statements({"elif", "else", "endif"}));
      const std::string end = take().text;
      if (end == "elif") continue;
      if (end == "else") made->bodies.push_back(body_until("endif"));
      return made;
    }
  }

  NodePtr for_statement(int line) {
    NodePtr made = node(Kind::For, line);
    add_part(*made, target(false));
    if (!take_if_name("in")) fail(fmt::format("expected 'in', not {}", spelled(now())));
    add_part(*made, tuple_or_expression(false, "recursive"));
    add_part(*made, take_if_name("if") ? expression() : nullptr);
    made->is_recursive = take_if_name("recursive");
    take_if(":");
    expect_end_of_tag();
    const bool was_loop = std::exchange(place().is_loop, true);
    made->bodies.push_back(statements({"else", "endfor"}));
    place().is_loop = was_loop;
    if (take().text == "else") made->bodies.push_back(body_until("endfor"));
    return made;
  }

  NodePtr set_statement(int line) {
    NodePtr to = target(true);
    if (take_if("=")) return node_of(Kind::Set, line, std::move(to), tuple_or_expression());
    NodePtr filter = now().is_operator("|") ? filters(nullptr) : nullptr;
    NodePtr made = node_of(Kind::SetBlock, line, std::move(to), std::move(filter));
    made->bodies.push_back(body_until("endset"));
    return made;
  }

  NodePtr with_statement(int line) {
    NodePtr made = node(Kind::With, line);
    while (now().token != Token::BlockEnd) {
      if (!made->parts.empty()) expect(",");
      add_part(*made, target(false));
      expect("=");
      add_part(*made, expression());
    }
    made->bodies.push_back(body_until("endwith"));
    return made;
  }

  void parameters(Node& macro) {
    expect("(");
    while (!now().is_operator(")")) {
      if (!macro.ids.empty()) expect(",");
      macro.ids.push_back(names().id(name_to_set(expect_name())));
      if (take_if("=")) {
        add_part(macro, expression());
      } else if (!macro.parts.empty()) {
        fail("a parameter without a default follows one with a default");
      }
    }
    expect(")");
  }

  // Parses something that becomes a function, out of which no loop can be left.
  template <class Parse>
  Body function_body(Parse&& parse, Node* macro = nullptr) {
    places().emplace_back();
    Body body = parse();
    const Place inside = place();
    places().pop_back();
    if (macro != nullptr) {
      macro->takes_more = inside.takes_more;
      macro->takes_named = inside.takes_named;
      macro->takes_caller = inside.takes_caller;
    }
    place().takes_more |= inside.takes_more;
    place().takes_named |= inside.takes_named;
    place().takes_caller |= inside.takes_caller;
    return body;
  }

  NodePtr macro_statement(int line) {
    NodePtr made = node(Kind::Macro, line);
    made->name = name_to_set(expect_name());
    made->id = names().id(made->name);
    parameters(*made);
    made->bodies.push_back(function_body([&] { return body_until("endmacro"); }, made.get()));
    return made;
  }

  NodePtr call_block(int line) {
    NodePtr text = node(Kind::Macro, line);
    text->name = "caller";
    if (now().is_operator("(")) parameters(*text);
    NodePtr call = expression();
    if (call->kind != Kind::Call) fail_at(line, "{% call %} needs a call");
    text->bodies.push_back(function_body([&] { return body_until("endcall"); }, text.get()));
    return node_of(Kind::CallBlock, line, std::move(call), std::move(text));
  }

  NodePtr filter_block(int line) {
    NodePtr made = node_of(Kind::FilterBlock, line, filters(one_filter(nullptr)));
    made->bodies.push_back(body_until("endfilter"));
    return made;
  }

  NodePtr print_statement(int line) {
    NodePtr made = node(Kind::Output, line);
    while (now().token != Token::BlockEnd) {
      if (!made->parts.empty()) expect(",");
      add_part(*made, expression());
    }
    return made;
  }

  std::string name_to_set(std::string name) const {
    for (const std::string_view constant : {"true", "false", "none", "True", "False", "None"})
      if (name == constant) fail(fmt::format("cannot assign to '{}'", name));
    return name;
  }

  NodePtr one_target(bool may_be_member) {
    const int line = now().line;
    if (take_if("(")) {
      NodePtr inner = target(may_be_member);
      expect(")");
      return inner;
    }
    const std::string name = expect_name();
    NodePtr made = node(Kind::Name, line);
    if (may_be_member && take_if(".")) {
      made->kind = Kind::Member;
      made->name = expect_name();
    } else {
      name_to_set(name);
    }
    made->id = names().id(name);
    return made;
  }

  NodePtr target(bool may_be_member) {
    const Nested nested(*this);
    const int line = now().line;
    NodePtr first = one_target(may_be_member);
    if (!now().is_operator(",")) return first;
    NodePtr made = node_of(Kind::Tuple, line, std::move(first));
    while (take_if(",")) {
      if (now().token == Token::BlockEnd || now().is_operator("=") || now().is_operator(")") || now().is_name("in"))
        break;
      add_part(*made, one_target(may_be_member));
    }
    return made;
  }

  // jinja2 refuses an unknown filter or test when it compiles a template,
  // unless a condition stands around it
  // (`is_soft`), which may ask for it first: then only its use is an error.
  void check(const Node& at, bool is_soft) const {
    const bool is_unknown =
        (at.kind == Kind::Filter && !has_filter(at.name)) || (at.kind == Kind::Test && !has_test(at.name));
    if (is_unknown && !is_soft)
      fail_at(at.line, unknown_name(at.kind == Kind::Filter, at.name),
              code_of_unknown(at.kind == Kind::Filter, at.name));
    const bool makes_soft = at.kind == Kind::Condition || at.kind == Kind::If;
    const auto check_part = [&](const NodePtr& part) {
      if (part != nullptr) check(*part, is_soft || makes_soft);
    };
    std::ranges::for_each(at.parts, check_part);
    if (at.call != nullptr) {
      std::ranges::for_each(at.call->positional, check_part);
      for (const auto& [ignored, part] : at.call->named) check_part(part);
      check_part(at.call->list);
      check_part(at.call->dict);
    }
    for (const Body& body : at.bodies)
      for (const NodePtr& part : body) check(*part, at.kind == Kind::If);
  }
};

}  // namespace

Body parse(std::string_view source, std::string_view name, NameTable& names) {
  return Parser(lex(source, name), name, names).run();
}

}  // namespace ds::jinja
