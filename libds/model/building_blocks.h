// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the layers of all model families share: a linear map in both of Hugging Face's orientations, attention with and
// without a cache, dropout sites.

#include "model/layer.h"

namespace ds::model {

// How a weight is stored: Linear keeps [out,in], GPT-2's Conv1D keeps [in,out].
enum class Orientation : u8 { OutIn, InOut };

struct LinearForward {
  Orientation orientation = Orientation::OutIn;
  TensorView bias{};  // [out] or none
  Activation activation = Activation::None;
  TensorView preact{};    // [R,out]: the value before the activation, or none
  TensorView residual{};  // [R,out] added last, or none
};

// y [R,out] = activation(x [R,in] W + bias) + residual
inline void linear_forward(const PassContext& ctx, TensorView y, TensorView x, TensorView weight,
                           const LinearForward& o) {
  const MatmulParams params{.trans_b = o.orientation == Orientation::OutIn, .activation = o.activation};
  ctx.ops.matmul(y, x, weight, o.bias, o.preact, o.residual, params, ctx.stream);
}

// dx [R,in] = dy W + dx_residual, dw = the weight's gradient in the weight's orientation, db = column sums of dy (not
// wanted when empty). dx_residual may be dx: the gradients of several branches add up.
inline void linear_backward(const PassContext& ctx, TensorView dx, TensorView dw, TensorView db, TensorView dy,
                            TensorView x, TensorView weight, Orientation orientation, TensorView dx_residual = {}) {
  const TensorView none{};
  const bool out_in = orientation == Orientation::OutIn;
  if (out_in) {
    ctx.ops.matmul(dw, dy, x, none, none, none, {.trans_a = true}, ctx.stream);
  } else {
    ctx.ops.matmul(dw, x, dy, none, none, none, {.trans_a = true}, ctx.stream);
  }
  if (db) ctx.ops.column_sum(db, dy, ctx.stream);
  ctx.ops.matmul(dx, dy, weight, none, none, dx_residual, {.trans_b = !out_in}, ctx.stream);
}

// Row-major heads inside rows of `row_elems`: element (b,t,h,d) at ((b*T + t) * row_elems + offset + h*D + d).
inline TensorView heads_view(TensorView rows, i64 B, i64 T, i64 num_heads, i64 head_dim, i64 row_elems, i64 offset) {
  TensorView v = rows;
  v.data = static_cast<char*>(rows.data) + offset * dtype_bytes(rows.dtype);
  v.rank = 4;
  v.shape = {B, T, num_heads, head_dim};
  v.stride = {T * row_elems, row_elems, head_dim, 1};
  return v;
}

// Attention of the T new positions; when generating, over all positions so far, which the cache keeps (B = 1).
void attend(const PassContext& ctx, TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
            const AttentionParams& params);

// The random stream of one use of dropout: layers number their uses.
inline RngKey dropout_site(const PassContext& ctx, i64 layer, u32 use) {
  RngKey key = ctx.dropout_key;
  key.site = 0x80000000u | (static_cast<u32>(layer) * 8u + use);
  return key;
}

// Dropout in one block, only in training: of attention's probabilities (use 0), and of the branches that are added to
// the residual (uses from 1 on).
struct BlockDropout {
  i64 layer = 0;  // of dropout_site
  float branches = 0;

  bool drops(const PassContext& ctx) const { return ctx.mode == Mode::Train && branches > 0; }
  AttentionParams attention(const PassContext& ctx, AttentionParams params) const {
    if (ctx.mode != Mode::Train) params.dropout = 0;
    params.rng = dropout_site(ctx, layer, 0);
    return params;
  }
  // y = residual + dropout(in W + b); without dropout one fused product.
  void add_branch(const PassContext& ctx, TensorView y, TensorView in, TensorView w, LinearForward o, u32 use) const {
    const TensorView residual = o.residual;
    if (drops(ctx)) o.residual = {};
    linear_forward(ctx, y, in, w, o);
    if (!drops(ctx)) return;
    ctx.ops.dropout(y, y, branches, dropout_site(ctx, layer, use), 0, ctx.stream);
    ctx.ops.add(y, y, residual, ctx.stream);
  }
  // The gradient behind the dropout of branch `use`, in the memory of `out` if there is any.
  TensorView branch_gradient(const PassContext& ctx, TensorView out, TensorView dy, u32 use) const {
    if (branches <= 0) return dy;
    ctx.ops.dropout(out, dy, branches, dropout_site(ctx, layer, use), 0, ctx.stream);
    return out;
  }
};

// The last layer of every family: final norm, output projection, loss. It differs only in the norm.
enum class NormKind : u8 { LayerNorm, RmsNorm };
std::unique_ptr<Layer> make_head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden,
                                 i64 vocab, bool tied, float eps, float init_std);

}  // namespace ds::model
