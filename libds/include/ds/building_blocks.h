// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts shared by the layers of all model families: products in both of Hugging Face's orientations, and sums over a
// tensor-parallel group, of which linear.h makes linear maps; rotations, attention with a cache and over a
// sequence-parallel group (attention.cc); dropout sites.

#include "ds/layer.h"

#pragma GCC visibility push(default)  // as DS_API does, for every function here

namespace ds::model {

// The layout of a weight: Linear stores [out,in], GPT-2's Conv1D [in,out].
enum class Orientation : u8 { OutIn, InOut };

// The end of a linear map: y = dropout(activation(product)) + residual.
struct Epilogue {
  Activation activation = Activation::None;
  TensorView preact{};    // receives the value before the activation, or none
  TensorView residual{};  // like y, or none
  float dropout = 0;
  RngKey site{};
};

struct LinearForward {
  Orientation orientation = Orientation::OutIn;
  TensorView bias{};  // [out] or none
  Activation activation = Activation::None;
  TensorView preact{};    // [R,out]: receives the value before the activation, or none
  TensorView residual{};  // [R,out], added last, or none
};

// A product with a tiled matrix computes some columns of its result per tile. If a tile instead contributes some terms
// to all columns, they are summed in fp32 in the order of the tiles (ctx.tile_sum) and rounded once.

// y [R,out] = activation(x [R,in] W + bias) + residual
void linear_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const LinearForward& o);
// dx [R,in] = dy W + dx_residual, which may be dx, so that the gradients of several branches add up.
void linear_backward_input(const PassContext& ctx, TensorView dx, TensorView dy, Matrix weight, Orientation orientation,
                           TensorView dx_residual = {});
// dw = the weight's gradient in the weight's orientation; db = column sums of dy. Neither is computed if it is not
// wanted. As all gradients of rows here, they are added to what is there if ctx.term is GradTerm::Later.
void linear_backward_weight(const PassContext& ctx, Matrix dw, TensorView db, TensorView dy, TensorView x,
                            Orientation orientation);

// Matrices over a tensor-parallel group. Column-parallel: each rank has some of the outputs and computes them for all
// rows; the input gradients are partial sums. Row-parallel: each rank has some of the inputs, and its product is a
// partial sum. Sums are taken over ranks in rank order and rounded once (ds/communicator.h). With a group of one both
// are plain products.

// All rows of a stream whose rows may be cut; valid until the next call.
TensorView all_rows(const PassContext& ctx, TensorView stream);
// The destination of a product that is a partial sum for `out`: a buffer of the group, or `out` itself if the group is
// one rank.
TensorView partial_sum(const PassContext& ctx, TensorView out);
// out = the sum over ranks of partial_sum(out) + residual (a stream, optional): all rows on all ranks, or each rank's
// rows of a cut stream. In a group of one nothing is left to do, since the product itself has added
// first_term(residual).
void sum_partials(const PassContext& ctx, TensorView out, TensorView residual = {});
inline TensorView first_term(const PassContext& ctx, TensorView residual) {
  return ctx.groups.shard.tp == 1 ? residual : TensorView{};
}

// The same after a product over several ranks: out = dropout(sum + bias) + residual.
struct RowParallel {
  TensorView bias{};      // [out], added once
  TensorView residual{};  // stream, added last
  float dropout = 0;      // applied before the residual is added
  RngKey site{};
};
void finish_row_parallel(const PassContext& ctx, TensorView out, const RowParallel& o);

// y = dropout(x) with the masks of a whole batch on one rank; x contains rows of this rank's R from `first_row` on.
void dropout_rows(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, float p, RngKey site);
// y = x with random numbers, likewise those of a whole batch on one rank.
void noise_rows(const PassContext& ctx, TensorView y, TensorView x, i64 first_row, NoiseKind kind, float amount,
                RngKey site);
// The first of the R rows that this rank has of the stream; 0 unless the stream is cut.
inline i64 first_stream_row(const PassContext& ctx) {
  const Shard& shard = ctx.groups.shard;
  return shard.sequence ? shard.tp_rank * shard.stream_rows(ctx.B * ctx.T) : 0;
}
// Rows of the stream on this rank in a pass over R rows; generation uses whole streams.
inline i64 stream_rows(const Shard& shard, Mode mode, i64 R) {
  return mode == Mode::Generate ? R : shard.stream_rows(R);
}
// This rank's rows of a tensor with one entry for each of the R rows, such as ids.
inline TensorView stream_part(const PassContext& ctx, TensorView all) {
  return all.rows(first_stream_row(ctx), ctx.groups.shard.stream_rows(ctx.B * ctx.T));
}

// Parameters over the group. whole_row: a row that each rank has; its gradients are equal, or partial sums if the ranks
// have different rows of the stream.
ParamRow whole_row(ParamRow row, const Shard& shard);
// A row that each rank has, with equal gradients in any case: the bias after a row-parallel product, whose gradient is
// summed over all rows on each rank.
ParamRow equal_row(ParamRow row, const Shard& shard);
// A row cut along `dim` in equal shares; of each of `fused` equal parts, if several matrices are stored side by side.
ParamRow cut_row(ParamRow row, const Shard& shard, int dim, i64 fused = 1);
// A row with `heads` heads along `dim`, which the ranks share; with fewer heads than ranks, several ranks have the same
// head.
ParamRow cut_heads(ParamRow row, const Shard& shard, int dim, i64 heads);
// Rows of a vocabulary of V: [vocab_begin(rank), vocab_begin(rank + 1)); the first V mod tp ranks have one more.
inline i64 vocab_begin(i64 V, const Shard& shard, int rank) {
  return rank * (V / shard.tp) + std::min<i64>(rank, V % shard.tp);
}
ParamRow cut_vocabulary(ParamRow row, const Shard& shard);

// Heads stored row-major inside rows of `row_elems`: element (b,t,h,d) at ((b*T + t) * row_elems + offset + h*D + d).
inline TensorView heads_view(TensorView rows, i64 B, i64 T, i64 num_heads, i64 head_dim, i64 row_elems, i64 offset) {
  TensorView v = rows;
  v.data = static_cast<char*>(rows.data) + offset * dtype_bytes(rows.dtype);
  v.rank = 4;
  v.shape = {B, T, num_heads, head_dim};
  v.stride = {T * row_elems, row_elems, head_dim, 1};
  return v;
}

struct Heads {
  TensorView q, k, v;  // [B,T,H,D], [B,T,G,D], [B,T,G,Dv] strided
};
// Turns the heads x [B,T,heads,D] in place by the positions of their tokens.
void rotate(const PassContext& ctx, TensorView x, const RopeViews& rotation, const RopeParams& params);
struct HeadCounts {
  i64 q, kv, dim, value_dim;  // sizes on this rank of the tensor-parallel group
};
// The cache of an attention with `heads` heads of keys and values on this rank; window: see CacheShape.
inline CacheShape attention_cache(i64 window, i64 heads, i64 dim) { return {window, {{heads, dim}, {heads, dim}}}; }
// Declares the memory that attend() and attend_backward() need in addition to their arguments, after the layer's own
// temporaries.
void plan_attention(LayerActs& acts, ActivationPlanner& planner, const Shard& shard, const PlannedPass& pass,
                    const HeadCounts& heads);
// Attention for the T new positions; when generating, of each sequence over all of its positions so far, whose keys and
// values are in an attention_cache.
// Works over the tokens of all ranks of sp (Shard::mode). o [B,T,H,Dv]; lse [B,H,T] fp32 is only for attend_backward.
void attend(const PassContext& ctx, TensorView o, TensorView lse, const Heads& heads, const AttentionParams& params,
            const LayerActs& acts);
void attend_backward(const PassContext& ctx, const Heads& gradients, TensorView dout, const Heads& heads, TensorView o,
                     TensorView lse, const AttentionParams& params, const LayerActs& acts);

// Generation by a layer that caches something smaller than keys and values, from which it makes them
// (CacheShape::makes). Appends `fresh` [1,T,heads,dim] to each array of the cache; then each sequence attends by the
// keys and values that make(cache) returns for all of its cache.length positions, valid until the next call.
void attend_made(const PassContext& ctx, TensorView o, TensorView lse, TensorView q, std::span<const TensorView> fresh,
                 const AttentionParams& params, FunctionRef<Heads(const KvCache&)> make);
// Copies all positions of an array of a sequence's cache, in order, to `to` [1,length,heads,dim], strided.
void copy_cached(const PassContext& ctx, const KvCache& cache, size_t array, TensorView to);

// The random stream of one use of dropout; layers number their uses.
inline RngKey dropout_site(const PassContext& ctx, i64 layer, u32 use) {
  RngKey key = ctx.dropout_key;
  key.site = 0x80000000u | (static_cast<u32>(layer) * 8u + use);
  return key;
}

// Dropout in one block, only in training: on attention probabilities (use 0), and on the branches added to the residual
// (uses from 1 on).
struct BlockDropout {
  i64 layer = 0;  // see dropout_site
  float branches = 0;

  AttentionParams attention(const PassContext& ctx, AttentionParams params) const {
    if (ctx.mode != Mode::Train) params.dropout = 0;
    params.rng = dropout_site(ctx, layer, 0);
    return params;
  }
  // The end of branch `use`, which is added to `residual` (or to nothing).
  Epilogue branch(const PassContext& ctx, TensorView residual, u32 use) const {
    return {
        .residual = residual, .dropout = ctx.mode == Mode::Train ? branches : 0, .site = dropout_site(ctx, layer, use)};
  }
  // The gradient of the input of the dropout of branch `use`, given that of its output: in `out` if there is dropout,
  // else dy.
  TensorView branch_gradient(const PassContext& ctx, TensorView out, TensorView dy, u32 use) const {
    if (branches <= 0) return dy;
    dropout_rows(ctx, out, dy, first_stream_row(ctx), branches, dropout_site(ctx, layer, use));
    return out;
  }
};

// row = a gradient [fp32], rounded; nothing if that is not wanted.
void round_gradient(const PassContext& ctx, TensorView row, TensorView gradient);
// The same for the output projection, whose gradient is ctx.head_weight_grad.
void round_projection_gradient(const PassContext& ctx, TensorView row);
// dtable = the gradient of a table of which each row of dy is a look-up; nothing if that is not wanted.
void look_up_backward(const PassContext& ctx, TensorView dtable, TensorView dy, TensorView indices);

// Looks up ctx.ids in a table of `vocab` rows, which may be cut; y is a stream. The row of `padding` gets no gradient,
// as in nn.Embedding(padding_idx); -1: every row gets one.
void embedding_forward(const PassContext& ctx, TensorView y, TensorView table, i64 vocab);
void embedding_backward(const PassContext& ctx, TensorView dtable, TensorView dy, i64 vocab, i64 padding = -1);

// Losses, and the gradients of a projection [V,C] and its input h [R,C] (a stream), in one pass, like
// ops.linear_cross_entropy; the vocabulary may be cut. Without gradients (!dh) computes only the losses. dweight: of
// this rank's rows.
struct ProjectionLoss {
  TensorView weight{}, bias{};
  // Like h; [V,C], added to by ctx.term, and [V] fp32, or none that is not wanted.
  TensorView dh{}, dweight{}, dbias{};
  i64 vocab = 0;  // over all ranks
};
void projection_loss(const PassContext& ctx, TensorView h, const ProjectionLoss& o);
// Generation: ctx.logits = the logits of ctx.logit_rows of h, over the whole vocabulary. rows: memory for those rows.
void wanted_logits(const PassContext& ctx, TensorView h, TensorView rows, TensorView weight, i64 vocab);

// The last layer of every family: final norm, output projection, loss. Families differ only in the norm.
enum class NormKind : u8 { LayerNorm, RmsNorm };
std::unique_ptr<Layer> make_head(NormKind norm, std::string norm_name, std::string projection_name, i64 hidden,
                                 i64 vocab, bool tied, float eps, float init_std, const Shard& shard);

}  // namespace ds::model

#pragma GCC visibility pop
