// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokenizes prompts.

#include "data/tokenizer.h"
#include "ds/config.h"
#include "ds/prompts.h"

namespace ds::infer {

// Returns each prompt's tokens, starting with the beginning-of-text token if the tokenizer adds one. Throws
// Errc::Unavailable for a model that cannot generate. Prompts that cannot be continued by `max_tokens` are Errc::Config
// (empty or too long) or Errc::Mismatch (a token outside the model's vocabulary), with a line for each of the first
// ones. layout_tokens: the length of the attention's layout; 0: no layout.
std::vector<std::vector<i32>> tokens_of(const ModelConfig& model, const Tokenizer& tokenizer,
                                        std::span<const Prompt> prompts, i64 max_tokens, i64 layout_tokens = 0);

}  // namespace ds::infer
