// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tokenizer as a directory defines it: the one that AutoTokenizer of transformers makes of it. Where its versions 4
// and 5 differ, a warning says which one is followed.
//
// Precedence, as in transformers:
// 1. The class is named by tokenizer_config.json, else by config.json, else by its model_type.
// 2. tokenizer.json defines the text's preparation and the model; otherwise the class does, for the other files. BERT's
//    do_lower_case, strip_accents and tokenize_chinese_chars, and GPT-2's add_prefix_space, replace what tokenizer.json
//    says if the class has them.
// 3. Special tokens and added tokens are those of tokenizer_config.json if it has added_tokens_decoder. Otherwise
//    special_tokens_map.json overrides tokenizer_config.json, and added_tokens.json adds tokens. The class names
//    the roles that no file mentions; null says that there is no such token.
// 4. Tokens with flags replace those of tokenizer.json; new ones are numbered from the end of the vocabulary, in the
//    order of the files.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer/directory.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/pipeline.h"

namespace ds::tokenizer {

// Throws Errc::Corrupt and Errc::Unavailable, naming the file and its member.
Definition define(const Directory& directory);

}  // namespace ds::tokenizer
