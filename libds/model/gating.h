// SPDX-License-Identifier: Apache-2.0
#pragma once
// Between a router's scores and its experts: noise in training, and a capacity beyond which choices are dropped
// (Lepikhin et al., "GShard", 2021; Fedus et al., "Switch Transformers", 2022; random token selection: Kim et al.,
// "Scalable and Efficient MoE Training for Multitask Multilingual Models", 2021). The rules are those of DeepSpeed's
// gates.
//
// Random numbers depend on the token's number in the batch, the layer and the step; capacities are for the micro-batch
// of all ranks of sp, which exchange their choices. So neither layouts nor recomputations change a bit.

#include "ds/building_blocks.h"

namespace ds::model {

class Gating {
 public:
  // layer: see dropout_site.
  Gating(const ModelConfig& c, const Shard& shard, i64 layer);

  // Declares the arrays of a pass, one LayerActs, which the other functions are given.
  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const;

  // The input of router and experts: x, or x with jitter, which is valid until the next call. x: a stream.
  TensorView input(const PassContext& ctx, TensorView x, const LayerActs& acts) const;
  // dx, the gradient of input(x), becomes that of x, plus residual, if there is one.
  void input_grad(const PassContext& ctx, TensorView dx, TensorView residual) const;
  bool jitters_input(Mode mode) const noexcept { return mode == Mode::Train && config_.input_jitter > 0; }
  // The same for all rows, of the router alone.
  TensorView router_input(const PassContext& ctx, TensorView all, const LayerActs& acts) const;
  void router_input_grad(const PassContext& ctx, TensorView dall) const;

  // Rounds logits [R,E] fp32 to the work dtype, if the router's are of that (ExpertsConfig::router_dtype).
  void round(const PassContext& ctx, TensorView logits, const LayerActs& acts) const;
  // Chooses experts, and drops choices that exceed their capacity. chosen, weights, scores, logits, bias: as in
  // OpTable::route. weights: of the choices that are kept.
  void choose(const PassContext& ctx, TensorView chosen, TensorView weights, TensorView scores, TensorView logits,
              TensorView bias, const LayerActs& acts) const;
  // The choices without those that were dropped, which are -1.
  TensorView kept(TensorView chosen, const LayerActs& acts) const { return dropped(acts) ? dropped(acts) : chosen; }
  // Likewise; none if no choice can have been dropped.
  TensorView dropped(const LayerActs& acts) const { return acts.saved.empty() ? TensorView{} : acts.saved.front(); }

 private:
  bool limits(Mode mode) const noexcept { return config_.capacity.limited && mode != Mode::Generate; }
  i64 capacity(Mode mode, i64 tokens) const noexcept;
  void jitter(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, float amount) const;
  void drop(const PassContext& ctx, TensorView chosen, const LayerActs& acts) const;

  ExpertsConfig config_;
  Shard shard_;
  i64 C_, layer_;
};

}  // namespace ds::model
