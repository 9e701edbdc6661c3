// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tokenizer.json as a Tokenizer: added tokens, normalizer, pre-tokenizer, model, decoder.

#include <map>
#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/fields.h"
#include "data/tokenizer/model.h"

namespace ds::tokenizer {

struct SpecialName {
  std::string content;
  std::string source;  // the file, or the class, that names it
};

struct Definition {
  std::string name;                        // the file with the vocabulary, for messages
  Json file = {};                          // in the form of a tokenizer.json, with all added tokens
  std::unique_ptr<Model> model = nullptr;  // instead of the "model" of `file`
  // Both without the files beside the vocabulary: how many ids it has (0: as `file` has), and its content.
  i64 own_ids = 0;
  std::string own_content = {};
  std::string others = {};  // the same of the files beside it; empty: they change nothing

  std::map<SpecialToken, SpecialName> special = {};
  std::map<std::string, std::string> origins = {};  // of added tokens: content -> file
  std::optional<bool> adds_bos = std::nullopt;      // nothing: as the "post_processor" of `file` says
  bool adds_eos = false;
  TokenMatches matches = {};
  bool splits_special = false;  // special tokens that a text spells out are cut into pieces
  std::vector<EndToken> ends = {};
  std::vector<std::string> warnings = {}, when_writing = {};
};

std::unique_ptr<Tokenizer> make_pipeline(Definition definition);

}  // namespace ds::tokenizer
