// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the layers of all model families share: linear maps in both of Hugging Face's orientations, alone and over a
// tensor-parallel group; attention with a cache and over a sequence-parallel group (attention.cc); dropout sites.

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

// Products with a matrix in tiles give, tile by tile, columns of what they write; where a tile has some of the terms of
// all columns, they are summed in fp32 in the order of the tiles (ctx.tile_sum), and rounded once.

// y [R,out] = activation(x [R,in] W + bias) + residual
void linear_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const LinearForward& o);
// dx [R,in] = dy W + dx_residual, which may be dx: the gradients of several branches add up.
void linear_backward_input(const PassContext& ctx, TensorView dx, TensorView dy, Matrix weight, Orientation orientation,
                           TensorView dx_residual = {});
// dw = the weight's gradient in the weight's orientation, db = column sums of dy (not wanted when empty).
void linear_backward_weight(const PassContext& ctx, Matrix dw, TensorView db, TensorView dy, TensorView x,
                            Orientation orientation);

// Matrices over a tensor-parallel group. Column-parallel: each rank has some of the outputs, and its product is the
// plain one of all rows; the gradients of the input are parts of a sum. Row-parallel: each rank has some of the inputs,
// and its product is a part of the sum. Sums are taken over ranks in rank order and rounded once (comm/communicator.h).
// A group of one is the plain product.

// All rows of a stream that may be cut in rows; valid until the next call.
TensorView all_rows(const PassContext& ctx, TensorView stream);
// Where a product goes that is a part of a sum over the group, if it belongs in `out`: there, where the group is one.
TensorView partial_sum(const PassContext& ctx, TensorView out);
// out = the sum of what partial_sum(out) took + residual (a stream, optional), on all ranks or, of a cut stream, each
// its rows. In a group of one there is nothing left to do: the product itself has added first_term(residual).
void sum_partials(const PassContext& ctx, TensorView out, TensorView residual = {});
inline TensorView first_term(const PassContext& ctx, TensorView residual) {
  return ctx.groups.shard.tp == 1 ? residual : TensorView{};
}

struct RowParallel {
  Orientation orientation = Orientation::OutIn;
  TensorView bias{};      // [out], added once
  TensorView residual{};  // stream, added last
  float dropout = 0;      // of what is added to the residual
  RngKey site{};
};
// y (a stream) = dropout(x [R, in of this rank] W + bias) + residual; without dropout, in a group of one, one product.
void row_parallel_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const RowParallel& o);

// y = dropout(x) with the masks of a whole batch on one rank; x: rows from `first_row` on of this rank's R.
void dropout_rows(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, float p, RngKey site);
// The first row of the stream on this rank: of R rows, in a cut stream.
inline i64 first_stream_row(const PassContext& ctx) {
  const Shard& shard = ctx.groups.shard;
  return shard.sequence ? shard.tp_rank * shard.stream_rows(ctx.B * ctx.T) : 0;
}
// Rows of the stream on this rank in a pass over R rows; text is written with whole streams.
inline i64 stream_rows(const Shard& shard, Mode mode, i64 R) {
  return mode == Mode::Generate ? R : shard.stream_rows(R);
}
// This rank's rows of something that all of R have one of, such as ids.
inline TensorView stream_part(const PassContext& ctx, TensorView all) {
  return all.rows(first_stream_row(ctx), ctx.groups.shard.stream_rows(ctx.B * ctx.T));
}

// Parameters over the group. A row that each rank has: equal gradients, or parts of a sum where each rank has other
// rows of the stream.
ParamRow whole_row(ParamRow row, const Shard& shard);
// One that each rank has, with equal gradients in any case: the bias behind a row-parallel product, whose gradient is
// summed over all rows on each rank.
ParamRow equal_row(ParamRow row, const Shard& shard);
// Cut along `dim` in equal shares; of each of `fused` equal parts, where several matrices stand side by side.
ParamRow cut_row(ParamRow row, const Shard& shard, int dim, i64 fused = 1);
// Along `dim` stand `heads` heads, which the ranks share, or several ranks have one.
ParamRow cut_heads(ParamRow row, const Shard& shard, int dim, i64 heads);
// Rows of a vocabulary of V: [vocab_begin(rank), vocab_begin(rank + 1)); the first V mod tp ranks have one more.
inline i64 vocab_begin(i64 V, const Shard& shard, int rank) {
  return rank * (V / shard.tp) + std::min<i64>(rank, V % shard.tp);
}
ParamRow cut_vocabulary(ParamRow row, const Shard& shard);

// Row-major heads inside rows of `row_elems`: element (b,t,h,d) at ((b*T + t) * row_elems + offset + h*D + d).
inline TensorView heads_view(TensorView rows, i64 B, i64 T, i64 num_heads, i64 head_dim, i64 row_elems, i64 offset) {
  TensorView v = rows;
  v.data = static_cast<char*>(rows.data) + offset * dtype_bytes(rows.dtype);
  v.rank = 4;
  v.shape = {B, T, num_heads, head_dim};
  v.stride = {T * row_elems, row_elems, head_dim, 1};
  return v;
}

struct Heads {
  TensorView q, k, v;  // [B,T,H,D], [B,T,G,D] strided
};
struct HeadCounts {
  i64 q, kv, dim;  // of this rank, of the tensor-parallel group's
};
// Declares what attend() and attend_backward() need beside their arguments; behind the layer's own temporaries.
void plan_attention(LayerActs& acts, ActivationPlanner& planner, const Shard& shard, Mode mode, DType work, i64 B,
                    i64 T, const HeadCounts& heads);
// Attention of the T new positions; when generating, over all positions so far, which a cache for each sequence keeps.
// Over the tokens of all ranks of sp (Shard::mode). lse [B,H,T] fp32 is for attend_backward alone.
void attend(const PassContext& ctx, TensorView o, TensorView lse, const Heads& heads, const AttentionParams& params,
            const LayerActs& acts);
void attend_backward(const PassContext& ctx, const Heads& gradients, TensorView dout, const Heads& heads, TensorView o,
                     TensorView lse, const AttentionParams& params, const LayerActs& acts);

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

  AttentionParams attention(const PassContext& ctx, AttentionParams params) const {
    if (ctx.mode != Mode::Train) params.dropout = 0;
    params.rng = dropout_site(ctx, layer, 0);
    return params;
  }
  RowParallel branch(const PassContext& ctx, RowParallel o, u32 use) const {
    o.dropout = ctx.mode == Mode::Train ? branches : 0;
    o.site = dropout_site(ctx, layer, use);
    return o;
  }
  // The gradient behind the dropout of branch `use`, in the memory of `out` if there is any.
  TensorView branch_gradient(const PassContext& ctx, TensorView out, TensorView dy, u32 use) const {
    if (branches <= 0) return dy;
    dropout_rows(ctx, out, dy, first_stream_row(ctx), branches, dropout_site(ctx, layer, use));
    return out;
  }
};

// The embedding of ctx.ids in a table of `vocab` rows, which may be cut: y is a stream. The row of `padding` has no
// gradient, as in nn.Embedding(padding_idx); -1: every row has one.
void embedding_forward(const PassContext& ctx, TensorView y, TensorView table, i64 vocab);
void embedding_backward(const PassContext& ctx, TensorView dtable, TensorView dy, i64 vocab, i64 padding = -1);

// Losses and the gradients of a projection [V,C] and its input h [R,C] (a stream) at once, as ops.linear_cross_entropy;
// the vocabulary may be cut. Without gradients (!dh) the losses alone. dweight: of this rank's rows.
struct ProjectionLoss {
  TensorView weight{}, bias{};
  TensorView dh{}, dweight{}, dbias{};  // as h; [V,C] and [V] fp32
  i64 vocab = 0;                        // of all ranks
};
void projection_loss(const PassContext& ctx, TensorView h, const ProjectionLoss& o);
// Generating: ctx.logits = those of the last position of each sequence, of the whole vocabulary.
void last_logits(const PassContext& ctx, TensorView h, TensorView weight, i64 vocab);

// The last layer of every family: final norm, output projection, loss. It differs only in the norm.
enum class NormKind : u8 { LayerNorm, RmsNorm };
std::unique_ptr<Layer> make_head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden,
                                 i64 vocab, bool tied, float eps, float init_std, const Shard& shard);

}  // namespace ds::model
