// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a run's tokenizer reads a text, and which of its files name its special tokens.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"
#include "ds/error.h"

namespace ds {

struct TokenizedText {
  std::string tokenizer, identity;  // data.tokenizer, and what a checkpoint keeps of it
  struct Token {
    i32 id = 0;
    std::string piece;  // as the vocabulary spells it; bytes that need not be UTF-8
  };
  std::vector<Token> tokens{};
  struct Named {
    std::string role;  // "eos_token"; empty: an added token without a role
    std::string content;
    i32 id = 0;
    std::string source;  // the file, or the class of transformers, that names it
  };
  std::vector<Named> named{};       // special tokens, then added tokens by their ids
  std::vector<i32> ends{};          // tokens that end a completion
  std::optional<Error> bad_ends{};  // why the model cannot have them; `ends` is empty then
  bool adds_bos = false;            // bos_token comes before a prompt
  bool adds_eos = false;            // the reference puts eos_token after a text; neither samples nor prompts get it
  std::vector<std::string> warnings{};
};

// Throws the errors of a run whose data.tokenizer cannot be read.
DS_API TokenizedText tokenize_text(const Config& config, std::string_view text);

}  // namespace ds
