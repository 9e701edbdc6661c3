// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predicts the memory of generation besides the weights: forward activations of the longest pass, and the caches.

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "infer/kept_keys.h"
#include "plan/run_plan.h"

namespace ds::infer {

// The caches of layers of one shape for one sequence: they keep the same positions.
struct LayerCaches {
  KeptKeys keys;
  model::CacheShape shape;
  std::vector<i64> layers;
};

struct WritingMemory {
  i64 at_once = 1;               // sequences in progress
  i64 longest = 0, largest = 0;  // tokens of a prompt; positions of a sequence
  bool rope_apart = false;       // rotations depend on the length of a sequence
  DType work = DType::F32;
  i64 max_tokens = 0;                                         // after a prompt
  i64 heads = 0, head0 = 0;                                   // of queries
  std::map<model::CacheShape, std::vector<i64>> layers = {};  // this rank's layers with a cache
  std::shared_ptr<const model::AttentionLayout> layout = {};  // for all layers
  i64 working_bytes = 0, temporary_bytes = 0, message_bytes = 0;
  i64 caches_bytes = 0;  // of the largest caches, for as many sequences as are in progress
  model::PassMemory pass = {};

  std::vector<LayerCaches> plan_caches(i64 prompt) const;  // for a sequence whose prompt has that many tokens
  // The arrays of a layer: [1, rows, heads, dim] each, without memory.
  std::vector<TensorView> arrays_of(const LayerCaches&) const;
  i64 array_bytes(const LayerCaches&) const noexcept;  // of one layer's arrays
  static constexpr i64 kCacheAlign = 64;               // bytes; each array, and the pages of a shape
  static i64 pages_bytes(const KeptKeys& keys) noexcept { return align_up(std::ssize(keys.places()) * 4, kCacheAlign); }
  i64 bytes_of(const std::vector<LayerCaches>&) const noexcept;
  i64 most_made() const noexcept;  // CacheShape::made
  plan::TagBytes bytes() const;    // upper bounds
};

// For continuing these prompts by `max_tokens` tokens each.
WritingMemory plan_writing(const model::Model& model, const plan::RunPlan& plan,
                           std::span<const std::vector<i32>> prompts, i64 max_tokens, i64 at_once);

// Worker scratch of generation, like plan::scratch_bytes: an upper bound for a device that has done nothing else, and
// exact if each number of sequences up to at_once has been in progress (tests/equivalence/writing_test.cc).
std::optional<i64> writing_scratch(const model::Model& model, const plan::RunPlan& plan, const WritingMemory& writing,
                                   std::span<const std::vector<i32>> prompts, const OpTable& backend, int threads);

}  // namespace ds::infer
