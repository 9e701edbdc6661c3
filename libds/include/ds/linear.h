// SPDX-License-Identifier: Apache-2.0
#pragma once
// The linear map of all model families: a weight, a bias, and room for a low-rank branch beside them. It declares its
// rows, knows how a tensor-parallel group shares them, and computes with them whole or in tiles.

#include <algorithm>
#include <optional>

#include "ds/building_blocks.h"

namespace ds::model {

// How a tensor-parallel group shares a linear map.
enum class Split : u8 {
  Whole,   // each rank has all of it, for its rows of the stream
  Column,  // each rank has some of the outputs, for all rows; its input gradients are partial sums
  Row,     // each rank has some of the inputs, for all rows; its product is a partial sum
  Shared,  // each rank has all of it, for all rows, and uses some of what is made of its outputs: gradients of these,
           // and so all others, are partial sums
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
  bool has_branch() const noexcept { return branch_.rank > 0; }

  // From then on its products are in FP8, for inputs and parameters in bf16: codes of inputs share a scale by 128
  // inputs of a row, those of the matrix by 128 x 128, and those of the output's gradient by 128 outputs of a row. The
  // gradient of the matrix is a product over rows, for which both operands are encoded again, in blocks of 128 rows.
  // Formats are E4M3, for gradients of outputs `gradients` (OpTable::quantize_fp8). An activation is a call of its own,
  // which reads a rounded value. Matrices must not be in tiles.
  void multiply_in_fp8(DType gradients) noexcept { fp8_gradients_ = gradients; }
  // The format of gradients if its products are in FP8.
  std::optional<DType> fp8() const noexcept { return fp8_gradients_; }
  // The sizes of its product in FP8, or of the one that it begins as the first of a group.
  Fp8Map fp8_map() const noexcept { return {in_, std::max(out_, joined_out_)}; }
  // "name [in, out]" if this rank's part, or each of `fused`, is no multiple of kFp8Block in both; else empty. All
  // ranks then have the codes of the whole map.
  std::string fp8_problem() const;

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
  // dx [R,in] = dy W + dx_residual, which may be dx. Split::Column, Shared: partial sums, see
  // partial_sum().
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
  i64 in_ = 0, out_ = 0;  // of this rank
  friend class LinearGroup;
  i64 joined_out_ = 0;  // of the maps that it is joined with, as the first
  std::optional<DType> fp8_gradients_{};
};

// Linear maps of one input. Where their matrices lie one after the other in memory, and their biases likewise, they are
// one map to the outputs of all, with one product in each direction. The gradient of the input is then the sum over all
// outputs, rounded once; apart, it is rounded after each map. Only shapes of products and places of rows differ, too.
//
// They are joined by their shapes alone, so a run has the same bits at every ZeRO stage and on any number of ranks:
// matrices are stored [out, in], outputs are multiples of 8, and each matrix and bias but the last one is a multiple of
// kRowBlock. Three things keep them apart: a branch, rows of which some are trained or stored otherwise, and tiles.
class DS_API LinearGroup {
 public:
  LinearGroup() = default;
  // Appends the rows of each map in turn, which the group refers to. join: whether they may be joined.
  LinearGroup(std::vector<ParamRow>& rows, std::span<const LinearSpec> specs, const Shard& shard, bool join);

  Linear& operator[](size_t map) noexcept { return maps_[map]; }
  const Linear& operator[](size_t map) const noexcept { return maps_[map]; }
  // Whether the outputs of all maps are the columns of one matrix.
  bool joined() const noexcept;
  // Appends memory for the outputs of the maps, [R, out] each, made by take(columns): perhaps parts of one matrix.
  void add_outputs(std::vector<TensorView>& views, FunctionRef<TensorView(i64)> take) const;

  // As in Linear, for all maps. y, dy: by map, memory of add_outputs.
  void plan(LayerActs& acts, ActivationPlanner& planner, DType work, i64 R, Mode mode, bool attention = false) const;
  void forward(const PassContext& ctx, RowViews params, const LayerActs& acts, std::span<const TensorView> y,
               TensorView x) const;
  void backward_input(const PassContext& ctx, RowViews params, const LayerActs& acts, TensorView dx,
                      std::span<const TensorView> dy, TensorView dx_residual = {}) const;
  void backward_weight(const PassContext& ctx, RowViews grads, const LayerActs& acts, std::span<const TensorView> dy,
                       TensorView x) const;

 private:
  bool joined(RowViews views) const noexcept;
  i64 out(size_t map) const noexcept { return (*rows_)[maps_[map].weight()].shape[0]; }
  i64 out() const noexcept;
  TensorView all(RowViews views, size_t row) const noexcept;
  TensorView all(std::span<const TensorView> outputs) const noexcept;

  const std::vector<ParamRow>* rows_ = nullptr;  // of the layer
  std::vector<Linear> maps_;
};

}  // namespace ds::model
