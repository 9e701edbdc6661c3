// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses the next token from the logits.

#include <span>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::infer {

// Filters apply in this order: penalties, temperature, top_k, top_p, min_p. Each sees the probabilities that the ones
// before it have left, normalised.
struct Sampling {
  double temperature = 1;  // 0: always the most likely token
  i64 top_k = 0;           // 0: all tokens
  double top_p = 1;        // the most likely tokens that together have this probability (Holtzman et al., 2020)
  double min_p = 0;        // tokens of at least this share of the largest probability (Nguyen et al., 2024)
  // Logits of tokens of the whole text are divided by it, or multiplied if negative (Keskar et al., "CTRL", 2019).
  double repetition_penalty = 1;
  // Subtracted from logits of tokens that have been generated, once, and for each time.
  double presence_penalty = 0, frequency_penalty = 0;
  u32 seed = 0;
  u32 index = 0;              // of several texts of one prompt with one seed
  std::vector<i32> banned{};  // not among the first banned_for generated tokens
  i64 banned_for = 0;

  bool changes_logits() const noexcept {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0 || banned_for > 0;
  }
};

class Sampler {
 public:
  // The token at `position` of a text: its tokens before that are `text`, of which the first `prompt` were given. Among
  // equal logits smaller ids come first. The random number depends only on seed, index and position.
  i32 sample(std::span<const float> logits, const Sampling& sampling, std::span<const i32> text, i64 prompt);

 private:
  std::span<const float> penalised(std::span<const float> logits, const Sampling& sampling, std::span<const i32> text,
                                   i64 prompt);
  std::vector<float> logits_;
  std::vector<i32> order_;
};

}  // namespace ds::infer
