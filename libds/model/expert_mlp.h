// SPDX-License-Identifier: Apache-2.0
#pragma once
// The MLPs of a rank's experts over rows that are sorted by expert. Two forms: Llama's gated one without biases, or
// GPT-2's, an activation between two linear maps with biases, whose matrices are stored [in,out].

#include <string>
#include <vector>

#include "ds/layer.h"

namespace ds::model {

// M rows in groups (OpTable::grouped_matmul); W values of each before the activation.
class ExpertMlp {
 public:
  explicit ExpertMlp(const ModelConfig& c);
  // Calls add(row) for the whole rows: name.{gate_up,down}_proj, or name.{c_fc,c_proj}.{weight,bias}.
  void declare(const std::string& name, const ModelConfig& c, FunctionRef<size_t(ParamRow)> add);

  bool biased() const noexcept { return plain_; }
  i64 width() const noexcept { return plain_ ? F_ : 2 * F_; }  // W
  // Its rows: the matrices, then their biases, if it has any.
  struct Rows {
    TensorView up, down, up_bias{}, down_bias{};
  };
  Rows of(RowViews rows) const;
  // Their shapes for n experts.
  std::vector<std::vector<i64>> shapes(i64 n) const;

  // pre [M,W] from the inputs x [M,C].
  void to_pre(const PassContext& ctx, RowViews params, TensorView pre, TensorView x, TensorView offsets) const;
  // y [M,C] from pre; hidden [M,F] is workspace.
  void from_pre(const PassContext& ctx, RowViews params, TensorView y, TensorView pre, TensorView hidden,
                TensorView offsets) const;

  // dx [M,C], which may be dy, and dweights [M,1], for outputs that are multiplied by weights [M,1]; dy: the gradient
  // of the product. Leaves dpre [M,W] and weighted [M,F], the hidden values times the weights, for gradients(); hidden,
  // dhidden [M,F] and, if biased, dot [M,1] fp32 are workspace.
  struct Backward {
    TensorView pre, dpre, weighted, hidden, dhidden, dot;
  };
  void backward(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView weights,
                TensorView dweights, const Backward& b, TensorView offsets) const;
  // Gradients that are wanted: those of the first product and its bias, and of the second one.
  void up_grads(const PassContext& ctx, const Rows& grads, TensorView dpre, TensorView x, TensorView offsets,
                bool accumulate) const;
  void down_grads(const PassContext& ctx, const Rows& grads, TensorView dy, TensorView weighted, TensorView weights,
                  TensorView offsets, bool accumulate) const;

 private:
  void activate(const PassContext& ctx, TensorView hidden, TensorView pre) const;

  i64 C_, F_;
  bool plain_;
  Activation activation_;
  size_t up_ = 0, down_ = 0, up_bias_ = 0, down_bias_ = 0;
};

}  // namespace ds::model
