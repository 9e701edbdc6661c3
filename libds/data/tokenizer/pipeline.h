// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tokenizer.json as a Tokenizer: added tokens, normalizer, pre-tokenizer, model, decoder.

#include <map>
#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

// Special tokens, as files other than tokenizer.json define them.
struct SpecialTokens {
  std::map<SpecialToken, std::string> content;
  std::optional<bool> add_bos;
  // Added tokens have the ids that are listed, as the files of a class of transformers say.
  bool keeps_added_ids = false;
};

// `file` is a tokenizer.json, or what has been made of other files; `identity` goes into Tokenizer::identity().
std::unique_ptr<Tokenizer> make_pipeline(const Json& file, const std::string& name, const SpecialTokens& special,
                                         const std::string& identity);

}  // namespace ds::tokenizer
