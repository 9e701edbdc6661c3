// SPDX-License-Identifier: Apache-2.0
#pragma once
// The MLP beside a layer's experts, which sees every token (Dai et al., "DeepSeekMoE", 2024). Its output is added to
// the sum of the experts' as it is, or multiplied by a gate, the sigmoid of a linear map of the token (Qwen2-MoE).
//
// Or the layer is a residual one (Rajbhandari et al., "DeepSpeed-MoE", 2022, section 4.1.2), of which it is one of two
// parts: c0 experts(x) + c1 mlp(x), where c is the softmax of a linear map of the token. That is a router of two
// experts both of which every token chooses, and it runs as such. c0 multiplies the weights of a token's choices, so
// the experts' sum itself is kept nowhere.

#include <memory>

#include "model/feed_forward.h"

namespace ds::model {

// R: the rows of all ranks of tp; S: those of the stream. Its arrays are the second and third in acts.inner.
class SharedExpert {
 public:
  // Appends rows: name.<shared>.*, and name.shared_expert_gate.weight, or name.coefficient.{weight,bias}.
  SharedExpert(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, const Shard& shard);

  bool residual() const noexcept { return kind_ == Kind::Residual; }
  std::vector<Linear*> linears() { return mlp_->linears(); }
  void plan(LayerActs& acts, ActivationPlanner& planner, const PlannedPass& pass) const;

  // Residual layers: computes c for all rows [R,C], before forward() and recompute().
  void weigh_parts(const PassContext& ctx, RowViews params, TensorView all, const LayerActs& acts) const;
  // c0 [R,1], and its gradient, which backward_parts() reads.
  TensorView experts_weight(const LayerActs& acts) const { return half(own(acts).saved[kParts], 0); }
  TensorView experts_weight_grad(const LayerActs& acts) const { return half(own(acts).temporary[kDParts], 0); }

  // y = mlp(x), weighted, + residual; recompute(), backward_input() and backward_weight() as those of a FeedForward.
  void forward(const PassContext& ctx, RowViews params, TensorView y, TensorView x, TensorView residual,
               const LayerActs& acts) const;
  void recompute(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const;
  void backward_input(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView x,
                      TensorView residual, const LayerActs& acts) const;
  // Residual layers, after backward_input(): adds to dx, a stream, the gradient that the input has through c.
  void backward_parts(const PassContext& ctx, RowViews params, TensorView dx, const LayerActs& acts) const;
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView dy, TensorView x,
                       const LayerActs& acts) const;

 private:
  enum class Kind { Sum, Gated, Residual };
  enum Saved : size_t {
    kOut,      // stream
    kLogits,   // [S,1], or [R,2]
    kScores,   // likewise
    kWeights,  // [S,1], or [R,2] in the order of kChosen
    kChosen,
    kParts,    // [2R,1]: c0 of all rows, then c1; residual
    kPlaces,   // [R,2]: where in kParts the weights of a row are
    kOffsets,  // unused numbers of sort_choices
    kTokens,
    kChoices,  // [2R]
  };
  enum Gradient : size_t {
    kDOut,     // stream
    kDLogits,  // [S,1], or [S,2]
  };
  enum Temporary : size_t {
    kDWeights,   // [S,1], or [S,2]
    kDLogits32,  // likewise
    kDParts,     // [2R,1]
  };

  static const LayerActs& own(const LayerActs& acts) { return acts.inner[2]; }
  static TensorView half(TensorView parts, i64 which) {
    const i64 R = parts.dim(0) / 2;
    return parts.rows(which * R, R);
  }
  void evaluate(const PassContext& ctx, RowViews params, TensorView x, const LayerActs& acts) const;
  TensorView weight(const PassContext& ctx, const LayerActs& acts) const;

  Kind kind_;
  i64 C_;
  Shard shard_;
  std::unique_ptr<FeedForward> mlp_;
  size_t map_ = 0;  // the row of the gate, or of the coefficient's weight; its bias follows
};

}  // namespace ds::model
