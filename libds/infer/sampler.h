// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a request asks for tokens to be drawn, and the draws of OpTable::sample that follow from it.

#include <span>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::infer {

// Penalties come first, then the filters in the order of Draw.
struct Sampling {
  double temperature = 1;  // as in Draw, like the next three
  i64 top_k = 0;
  double top_p = 1;
  double min_p = 0;
  // Logits of tokens of the whole text are divided by it, or multiplied if negative (Keskar et al., "CTRL", 2019).
  double repetition_penalty = 1;
  // Subtracted from logits of tokens that have been generated, once, and for each time.
  double presence_penalty = 0, frequency_penalty = 0;
  u32 seed = 0;
  u32 index = 0;  // of several texts of one prompt with one seed
  // Not among the first banned_for generated tokens; ids that the model lacks have no effect.
  std::vector<i32> banned{};
  i64 banned_for = 0;
};

// The draw of the token after `text`, of which the first `prompt` tokens were given. Its changes of logits, one for
// each id at most, are appended to `changes`. Its random number depends only on seed, index and the length of the text.
Draw draw_of(const Sampling& sampling, std::span<const i32> text, i64 prompt, std::vector<LogitChange>& changes);

}  // namespace ds::infer
