// SPDX-License-Identifier: Apache-2.0
#pragma once
// The second half of a block, from the normalised stream to the residual stream: a gated MLP, a plain one, or experts.
// Its arrays are in `acts.inner` of the block's activations, from the first element on; those of its linear maps'
// branches are in the block's own. Streams are as in ds/building_blocks.h: all ranks of tp have them whole, or each has
// some rows.

#include <memory>
#include <vector>

#include "ds/linear.h"

namespace ds::model {

class FeedForward {
 public:
  virtual ~FeedForward() = default;

  virtual std::vector<Linear*> linears() = 0;
  // The rows that may be in tiles, in the order of the forward pass; `down` is the last of them, which a recomputation
  // does not need.
  virtual std::vector<size_t> matrices() const = 0;
  virtual bool adds_loss() const noexcept { return false; }
  virtual i64 product_rows(i64 R) const noexcept { return R; }
  virtual i64 num_counts() const noexcept { return 0; }
  virtual i64 num_step_counts() const noexcept { return 0; }
  virtual i64 num_shared_stats() const noexcept { return 0; }
  virtual i64 gradient_parts() const noexcept { return 1; }

  // Declares the arrays, and appends them to acts.inner.
  virtual void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const = 0;
  // y = f(x) + residual; all are streams, and y may be the residual.
  virtual void forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
                       const LayerActs& acts) const = 0;
  // The part of forward() that the backward pass needs.
  virtual void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const = 0;
  // dx = the gradient of x + residual, given that of f(x), dy; all are streams. dx may be the residual.
  virtual void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                              TensorView residual, const LayerActs& acts) const = 0;
  virtual void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                               const LayerActs& acts) const = 0;
};

// down(silu(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020).
class GatedMlp final : public FeedForward {
 public:
  // Appends rows name.{gate,up,down}_proj. number: of its arrays in acts.inner.
  GatedMlp(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 intermediate,
           const Shard& shard, size_t number = 0);

  std::vector<Linear*> linears() override { return {&gate_up_[0], &gate_up_[1], &down_}; }
  std::vector<size_t> matrices() const override { return {gate_up_[0].weight(), gate_up_[1].weight(), down_.weight()}; }
  void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const override;
  void forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
               const LayerActs& acts) const override;
  void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const override;
  void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                      TensorView residual, const LayerActs& acts) const override;
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                       const LayerActs& acts) const override;

 private:
  enum Saved : size_t { kGate, kUp, kGated };
  enum Gradient : size_t { kDGate, kDUp };

  i64 F_;  // on this rank
  size_t number_;
  LinearGroup gate_up_;
  Linear down_;
};

// c_proj(activation(c_fc(x))), the MLP of GPT-2, whose matrices are stored [in,out].
class PlainMlp final : public FeedForward {
 public:
  // Appends rows name.{c_fc,c_proj}. number: of its arrays in acts.inner.
  PlainMlp(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 intermediate,
           const Shard& shard, size_t number = 0);

  std::vector<Linear*> linears() override { return {&wide_, &narrow_}; }
  std::vector<size_t> matrices() const override { return {wide_.weight(), narrow_.weight()}; }
  void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const override;
  void forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
               const LayerActs& acts) const override;
  void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const override;
  void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                      TensorView residual, const LayerActs& acts) const override;
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                       const LayerActs& acts) const override;

 private:
  enum Saved : size_t { kPre, kActivated };
  enum Gradient : size_t { kDPre };

  void widen(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const;

  i64 F_;  // on this rank
  Activation activation_;
  size_t number_;
  Linear wide_, narrow_;
};

}  // namespace ds::model
