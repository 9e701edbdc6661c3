// SPDX-License-Identifier: Apache-2.0
#pragma once
// The linear map of all model families: a weight, a bias, and room for a low-rank branch beside them. It declares its
// rows, knows how a tensor-parallel group shares them, and computes with them whole or in tiles.

#include "ds/building_blocks.h"

namespace ds::model {

// How a tensor-parallel group shares a linear map.
enum class Split : u8 {
  Whole,   // each rank has all of it, for its rows of the stream
  Column,  // each rank has some of the outputs, for all rows; its input gradients are partial sums
  Row,     // each rank has some of the inputs, for all rows; its product is a partial sum
};

struct LinearSpec {
  std::string name;     // of the rows: name.weight, name.bias
  i64 in = 0, out = 0;  // of the whole map
  Split split = Split::Whole;
  Orientation orientation = Orientation::OutIn;
  bool bias = true;
  float std = 0.02f;  // of the initial weight
  i64 fused = 1;      // Column: this many equal maps side by side, each of which is shared
  i64 heads = 0;      // Column: the outputs are so many heads, perhaps fewer than ranks; 0: any equal shares
};

// A branch beside a linear map: y += scale * (x A^T) B^T, with A [rank, in] and B [out, rank] (Hu et al., "LoRA",
// 2021). B starts as zeros, so the map starts as it is without the branch. Rows: name.lora_A.weight,
// name.lora_B.weight.
struct LowRank {
  i64 rank = 0;  // 0: no branch
  float scale = 1;
};

class DS_API Linear {
 public:
  Linear() = default;
  // Appends its rows: the weight, then the bias.
  Linear(std::vector<ParamRow>& rows, LinearSpec spec, const Shard& shard);

  const LinearSpec& spec() const noexcept { return spec_; }
  size_t weight() const noexcept { return weight_; }  // number of its row

  // Appends the rows of a branch, A and B; they are cut as the inputs and outputs of the map are. number: of this
  // branch among those of the layer. Call this at most once, before all of the following.
  void attach(std::vector<ParamRow>& rows, const LowRank& branch, size_t number);
  // Declares the activations of the branch, for R rows of x. attention: the map is recomputed with the attention.
  void plan(LayerActs& acts, ActivationPlanner& planner, DType work, i64 R, Mode mode, bool attention = false) const;

  // y = dropout(activation(x W + bias + branch)) + residual. x: all rows and this rank's inputs; y: all rows and this
  // rank's outputs, or a stream after Split::Row. That takes no activation, and the others no dropout. Without a branch
  // and with one rank this is one product with all of the epilogue but dropout. With a branch the activation is a call
  // of its own, which reads a rounded value.
  void forward(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView y, TensorView x,
               const Epilogue& o = {}) const;
  // The part of forward() that the backward pass needs; for layers that recompute x, but not y.
  void recompute(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView x) const;
  // dx [R,in] = dy W + dx_residual, which may be dx. Split::Column: partial sums, see partial_sum().
  void backward_input(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView dx, TensorView dy,
                      TensorView dx_residual = {}) const;
  // The gradients of its rows, from the same dy and x. A view without data or tiles is not computed.
  void backward_weight(const PassContext& ctx, RowViews grads, const LayerActs& acts, TensorView dy,
                       TensorView x) const;

 private:
  ParamRow cut_inputs(ParamRow row, int dim) const;
  ParamRow cut_outputs(ParamRow row, int dim) const;
  TensorView bias(RowViews rows) const { return spec_.bias ? rows.own[weight_ + 1] : TensorView{}; }
  void product(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView y, TensorView x,
               LinearForward o) const;
  void scaled(const PassContext& ctx, const BranchActs& acts, TensorView out, TensorView x, TensorView w,
              bool trans_w) const;

  LinearSpec spec_;
  Shard shard_;
  LowRank branch_;
  size_t weight_ = 0, branch_rows_ = 0, number_ = 0;
};

}  // namespace ds::model
