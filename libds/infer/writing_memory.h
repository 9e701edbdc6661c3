// SPDX-License-Identifier: Apache-2.0
#pragma once
// What writing text takes beside the weights: forward activations of the longest pass, and caches of keys and values.

#include <span>
#include <vector>

#include "report/run_plan.h"

namespace ds::infer {

struct WritingMemory {
  i64 at_once = 1;               // sequences under way
  i64 longest = 0, largest = 0;  // tokens of a prompt; positions of a sequence
  bool rope_apart = false;       // rotations go by the length of a sequence
  i64 working_bytes = 0, temporary_bytes = 0, message_bytes = 0;
  model::PassMemory pass = {};
  i64 cache_parts = 0;                                  // keys and values of this rank's blocks
  TensorView cache_part(i64 positions) const noexcept;  // [1, positions, heads, head dim], without memory
  i64 cache_bytes(i64 positions) const noexcept { return cache_parts * align_up(cache_part(positions).bytes(), 64); }
  DType work = DType::F32;
  i64 kv_heads = 0, head_dim = 0;

  // At most, with caches of the `at_once` longest of these sequences.
  report::TagBytes bytes(std::span<const std::vector<i32>> prompts, i64 max_tokens) const;
};

WritingMemory plan_writing(const ModelConfig& config, const model::Model& model, const report::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once);

}  // namespace ds::infer
