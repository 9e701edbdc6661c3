// SPDX-License-Identifier: Apache-2.0
#include "model/expert_mlp.h"

#include <cmath>

#include "model/columns.h"

namespace ds::model {

ExpertMlp::ExpertMlp(const ModelConfig& c)
    : C_(c.hidden), F_(c.experts.intermediate), plain_(c.experts.plain), activation_(c.activation) {}

void ExpertMlp::declare(const std::string& name, const ModelConfig& c, FunctionRef<size_t(ParamRow)> add) {
  std::vector<std::vector<i64>> all = shapes(c.experts.count);
  const auto matrix = [&](const char* end, size_t which, float std) {
    return add({.name = name + end, .shape = std::move(all[which]), .std = std, .decay = true, .packs = !plain_});
  };
  const auto bias = [&](const char* end, size_t which) {
    return add({.name = name + end, .shape = std::move(all[which]), .init = Init::Zeros, .vectors = true});
  };
  const float std = c.initializer_range;
  if (!plain_) {
    up_ = matrix(".gate_up_proj", 0, std);
    down_ = matrix(".down_proj", 1, std);
    return;
  }
  up_ = matrix(".c_fc.weight", 0, std);
  down_ = matrix(".c_proj.weight", 1, std / std::sqrt(2.0f * static_cast<float>(c.layers)));
  up_bias_ = bias(".c_fc.bias", 2);
  down_bias_ = bias(".c_proj.bias", 3);
}

std::vector<std::vector<i64>> ExpertMlp::shapes(i64 n) const {
  if (!plain_) return {{n, 2 * F_, C_}, {n, C_, F_}};
  return {{n, C_, F_}, {n, F_, C_}, {n, F_}, {n, C_}};
}

ExpertMlp::Rows ExpertMlp::of(RowViews rows) const {
  if (!plain_) return {rows.own[up_], rows.own[down_]};
  const auto vectors = [&](size_t row, i64 size) {
    const TensorView v = rows.own[row];
    return v ? v.reshaped({v.numel() / size, size}) : v;
  };
  return {rows.own[up_], rows.own[down_], vectors(up_bias_, F_), vectors(down_bias_, C_)};
}

void ExpertMlp::to_pre(const PassContext& ctx, RowViews params, TensorView pre, TensorView x,
                       TensorView offsets) const {
  ctx.ops.grouped_matmul(pre, x, params.own[up_], offsets, /*trans_b=*/!plain_, ctx.stream);
  if (plain_) ctx.ops.grouped_bias(pre, of(params).up_bias, offsets, ctx.stream);
}

void ExpertMlp::activate(const PassContext& ctx, TensorView hidden, TensorView pre) const {
  if (plain_) return ctx.ops.activation_fwd(hidden, pre, activation_, ctx.stream);
  ctx.ops.swiglu_fwd(hidden, columns_of(pre, 0, F_), columns_of(pre, F_, F_), ctx.stream);
}

void ExpertMlp::from_pre(const PassContext& ctx, RowViews params, TensorView y, TensorView pre, TensorView hidden,
                         TensorView offsets) const {
  activate(ctx, hidden, pre);
  ctx.ops.grouped_matmul(y, hidden, params.own[down_], offsets, /*trans_b=*/!plain_, ctx.stream);
  if (plain_) ctx.ops.grouped_bias(y, of(params).down_bias, offsets, ctx.stream);
}

// A weight's gradient is the inner product of an output and its gradient, and so that of the hidden values and their
// gradient, both as if the weight were 1, and of the bias and the output's gradient: outputs need not be kept.
void ExpertMlp::backward(const PassContext& ctx, RowViews params, TensorView dx, TensorView dy, TensorView weights,
                         TensorView dweights, const Backward& b, TensorView offsets) const {
  ctx.ops.grouped_matmul(b.dhidden, dy, params.own[down_], offsets, /*trans_b=*/plain_, ctx.stream);
  activate(ctx, b.hidden, b.pre);
  ctx.ops.combine_rows(b.weighted, b.hidden, {}, weights, {}, ctx.stream);
  ctx.ops.combine_rows_grad(b.dhidden, dweights, b.dhidden, b.hidden, {}, weights, ctx.stream);
  if (plain_) {
    const TensorView bias = of(params).down_bias;
    ctx.ops.grouped_matmul(b.dot, dy, bias.reshaped({bias.dim(0), 1, bias.dim(1)}), offsets, /*trans_b=*/true,
                           ctx.stream);
    ctx.ops.add(dweights, dweights, b.dot, ctx.stream);
    ctx.ops.activation_bwd(b.dpre, b.dhidden, b.pre, activation_, ctx.stream);
  } else {
    ctx.ops.swiglu_bwd(columns_of(b.dpre, 0, F_), columns_of(b.dpre, F_, F_), b.dhidden, columns_of(b.pre, 0, F_),
                       columns_of(b.pre, F_, F_), ctx.stream);
  }
  ctx.ops.grouped_matmul(dx, b.dpre, params.own[up_], offsets, /*trans_b=*/plain_, ctx.stream);
}

void ExpertMlp::up_grads(const PassContext& ctx, const Rows& grads, TensorView dpre, TensorView x, TensorView offsets,
                         bool accumulate) const {
  if (grads.up)
    ctx.ops.grouped_matmul_grad(grads.up, plain_ ? x : dpre, plain_ ? dpre : x, offsets, accumulate, ctx.stream);
  if (grads.up_bias) ctx.ops.grouped_bias_grad(grads.up_bias, dpre, {}, offsets, accumulate, ctx.stream);
}

void ExpertMlp::down_grads(const PassContext& ctx, const Rows& grads, TensorView dy, TensorView weighted,
                           TensorView weights, TensorView offsets, bool accumulate) const {
  if (grads.down) {
    ctx.ops.grouped_matmul_grad(grads.down, plain_ ? weighted : dy, plain_ ? dy : weighted, offsets, accumulate,
                                ctx.stream);
  }
  if (grads.down_bias) ctx.ops.grouped_bias_grad(grads.down_bias, dy, weights, offsets, accumulate, ctx.stream);
}

}  // namespace ds::model
