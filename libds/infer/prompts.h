// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prompts as tokens.

#include "data/tokenizer.h"
#include "ds/config.h"
#include "ds/prompts.h"

namespace ds::infer {

// Of each prompt, with the mark of the text's beginning where the tokenizer adds one. Throws Errc::Unavailable for a
// model that continues nothing; with a line for each of the first prompts that cannot be continued by `max_tokens`,
// Errc::Config (it is empty, or too long) or Errc::Mismatch (a token is outside the model's vocabulary). layout_tokens:
// of which the attention has a layout; 0: it has none.
std::vector<std::vector<i32>> tokens_of(const ModelConfig& model, const Tokenizer& tokenizer,
                                        std::span<const Prompt> prompts, i64 max_tokens, i64 layout_tokens = 0);

}  // namespace ds::infer
