// SPDX-License-Identifier: Apache-2.0
#pragma once
// A template's source as tokens, cut as jinja2 does it with trim_blocks and
// lstrip_blocks: a newline after a tag and blanks between the begin of a line
// and a tag are no text.

#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds::jinja {

enum class Token : u8 {
  Text,
  VariableBegin,
  VariableEnd,
  BlockBegin,
  BlockEnd,
  Name,
  String,
  Integer,
  Real,
  Operator,
  End
};

struct Lexeme {
  Token token = Token::End;
  int line = 0;
  std::string text = {};  // of Text and String without escapes; the spelling of
                          // a Name or an Operator
  i64 integer = 0;
  double real = 0;

  bool is(Token other, std::string_view spelling) const { return token == other && text == spelling; }
  bool is_name(std::string_view name) const { return is(Token::Name, name); }
  bool is_operator(std::string_view spelling) const { return is(Token::Operator, spelling); }
};

// The last one is End. `source` is UTF-8. Throws Errc::Corrupt, "name:line:
// ..", and Errc::Unavailable for what Python has and this has not.
std::vector<Lexeme> lex(std::string_view source, std::string_view name);

}  // namespace ds::jinja
