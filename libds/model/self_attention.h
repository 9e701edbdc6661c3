// SPDX-License-Identifier: Apache-2.0
#pragma once
// The first half of a block of Llama's relatives, from the normalised stream to the residual stream: grouped-query
// attention, or multi-head latent attention. Its arrays are the last of `acts.inner` of the block's activations; those
// of its linear maps' branches are in the block's own. Streams are as in ds/building_blocks.h.

#include <memory>
#include <string>
#include <vector>

#include "ds/linear.h"

namespace ds::model {

class SelfAttention {
 public:
  virtual ~SelfAttention() = default;

  virtual std::vector<Linear*> linears() = 0;
  // The rows that may be in tiles, in the order of the forward pass; the output projection is the last of them, which
  // attend() does not need.
  virtual std::vector<size_t> matrices() const = 0;
  // The same in the order of the backward passes.
  virtual std::vector<size_t> backward_matrices() const = 0;
  virtual CacheShape cache() const = 0;

  // Declares the arrays, and appends them to acts.inner.
  virtual void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const = 0;
  // Everything before the output projection, for x, a stream.
  virtual void attend(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const = 0;
  // y = the projection of what attend() has computed + residual; both are streams.
  void project(const PassContext& ctx, RowViews params, TensorView y, TensorView residual,
               const LayerActs& acts) const {
    o_.forward(ctx, params, acts, y, acts.inner.back().saved[attended_], {.residual = residual});
  }
  // dx = the gradient of x, given that of the projection, dy; both are streams.
  virtual void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy,
                              const LayerActs& acts) const = 0;
  virtual void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                               const LayerActs& acts) const = 0;

 protected:
  // attended: the number among saved arrays of the output projection's input.
  explicit SelfAttention(size_t attended) : attended_(attended) {}

  Linear o_;  // the output projection

 private:
  size_t attended_;
};

// Appends rows name.{q,k,v,o}_proj, and norms of queries and keys (Ainslie et al., "GQA", 2023; Qwen3, OLMoE). block:
// its number, from 0 on.
std::unique_ptr<SelfAttention> make_grouped_attention(std::vector<ParamRow>& rows, const std::string& name,
                                                      const ModelConfig& c, i64 block, const Shard& shard);
// Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). Appends rows name.q_proj, or
// name.q_a_proj, .q_a_layernorm and .q_b_proj; name.kv_a_proj_with_mqa, .kv_a_layernorm, .kv_b_proj and .o_proj.
std::unique_ptr<SelfAttention> make_latent_attention(std::vector<ParamRow>& rows, const std::string& name,
                                                     const ModelConfig& c, i64 block, const Shard& shard);

}  // namespace ds::model
