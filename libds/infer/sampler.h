// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which token comes next, given the logits of all.

#include <span>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::infer {

struct Sampling {
  double temperature = 1;  // 0: always the most likely token
  i64 top_k = 0;           // 0: all tokens
  u32 seed = 0;
};

// Softmax sampling at a temperature among the top k logits, of equal ones the least ids first. The random number
// depends on the seed and the position alone. `order`: scratch.
i32 sample(std::span<const float> logits, const Sampling& sampling, i64 position, std::vector<i32>& order);

}  // namespace ds::infer
