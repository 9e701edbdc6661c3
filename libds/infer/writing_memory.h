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
  DType work = DType::F32;
  i64 kv_heads = 0, head_dim = 0;  // of a cache
  i64 cache_parts = 0;             // keys and values of this rank's blocks
  i64 working_bytes = 0, temporary_bytes = 0, message_bytes = 0;
  i64 caches_bytes = 0;  // of as many of the longest sequences as are under way
  model::PassMemory pass = {};

  // A part of a sequence's cache, [1, positions, heads, head dim], without memory; and all of them.
  TensorView cache_part(i64 positions) const noexcept;
  i64 cache_bytes(i64 positions) const noexcept { return cache_parts * align_up(cache_part(positions).bytes(), 64); }
  report::TagBytes bytes() const;  // at most
};

// Of texts behind these prompts, with `max_tokens` new tokens each.
WritingMemory plan_writing(const ModelConfig& config, const model::Model& model, const report::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once);

}  // namespace ds::infer
