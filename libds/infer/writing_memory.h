// SPDX-License-Identifier: Apache-2.0
#pragma once
// What writing text takes beside the weights: forward activations of the longest pass, and caches of keys and values.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "infer/kept_keys.h"
#include "plan/run_plan.h"

namespace ds::infer {

// What layers of a rank keep of a sequence: those whose attention has one window keep the same.
struct LayerCaches {
  KeptKeys keys;
  std::vector<i64> layers;
};

struct WritingMemory {
  i64 at_once = 1;               // sequences under way
  i64 longest = 0, largest = 0;  // tokens of a prompt; positions of a sequence
  bool rope_apart = false;       // rotations go by the length of a sequence
  DType work = DType::F32;
  i64 kv_heads = 0, head_dim = 0;                             // of a cache
  i64 max_tokens = 0;                                         // behind a prompt
  i64 heads = 0, head0 = 0;                                   // of queries
  std::map<i64, std::vector<i64>> layers = {};                // this rank's blocks, by their window
  std::shared_ptr<const model::AttentionLayout> layout = {};  // of all layers
  i64 working_bytes = 0, temporary_bytes = 0, message_bytes = 0;
  i64 caches_bytes = 0;  // of as many of the sequences with the largest caches as are under way
  model::PassMemory pass = {};

  std::vector<LayerCaches> plan_caches(i64 prompt) const;  // of a sequence with a prompt of so many tokens
  // Keys, or values, of a layer: [1, rows, heads, head dim], without memory.
  TensorView cache_part(const KeptKeys&) const noexcept;
  static i64 pages_bytes(const KeptKeys& keys) noexcept { return align_up(std::ssize(keys.places()) * 4, 64); }
  i64 bytes_of(const std::vector<LayerCaches>&) const noexcept;
  plan::TagBytes bytes() const;  // at most
};

// Of texts behind these prompts, with `max_tokens` new tokens each.
WritingMemory plan_writing(const ModelConfig& config, const model::Model& model, const plan::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once);

// Worker scratch of writing them, as plan::scratch_bytes: a device that has done nothing else holds as much at most,
// and exactly that where each number of sequences up to at_once was under way (tests/equivalence/writing_test.cc).
std::optional<i64> writing_scratch(const model::Model& model, const plan::RunPlan& plan, const WritingMemory& writing,
                                   std::span<const std::vector<i32>> prompts, const OpTable& backend, int threads);

}  // namespace ds::infer
