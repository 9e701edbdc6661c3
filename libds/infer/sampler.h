// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses the next token from the logits.

#include <span>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::infer {

struct Sampling {
  double temperature = 1;  // 0: always the most likely token
  i64 top_k = 0;           // 0: all tokens
  u32 seed = 0;
};

// Softmax sampling with a temperature among the top k logits; among equal logits, smaller ids come first. The random
// number depends only on the seed and the position. `order`: scratch.
i32 sample(std::span<const float> logits, const Sampling& sampling, i64 position, std::vector<i32>& order);

}  // namespace ds::infer
