// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention. A token has a latent vector c and one rotary key r; a head's key is [W_k c | r], and its
// value W_v c. Keys are put together in memory, so attention is that of ordinary heads, in which values have another
// size than keys. Queries may come from a latent of their own.
//
// Ranks of tp have some of the heads. Each computes the latents of all rows, and backpropagates through them the part
// of the gradient that its heads give: everything from there to the stream is linear in it, so parts are added where
// tensor parallelism adds anyway, and gradients of these rows over ranks (ParamRow::also_summed).
//
// Generation caches c, normalised, and r, turned, and makes the keys and values of a sequence from them.

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/columns.h"
#include "model/self_attention.h"

namespace ds::model {
namespace {

// The epsilon of the norms of latents, whatever that of the model's norms is: transformers and DeepSeek's own code.
constexpr float kLatentEps = 1e-6f;

// Rows as heads of one dim: [B, T, 1, columns].
TensorView one_head(TensorView rows, i64 B, i64 T) { return heads_view(rows, B, T, 1, rows.dim(1), rows.stride[0], 0); }

// A linear map, and the norm of its outputs (`norm`).
struct Latent {
  Linear map;
  size_t norm = 0;
};

class LatentAttention final : public SelfAttention {
 public:
  LatentAttention(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 block,
                  const Shard& shard)
      : SelfAttention(kAttn),
        H_(c.heads / shard.tp),
        Dr_(c.latent.rope_dim),
        Dn_(c.head_dim - Dr_),
        Dv_(c.latent.value_dim),
        rank_(c.latent.rank),
        query_rank_(c.latent.query_rank),
        interleaved_(c.latent.interleaved),
        shard_(shard),
        dropout_{.layer = block + 1} {
    attention_.scale = softmax_scale(c);
    attention_.dropout = c.attn_dropout;
    const auto map = [&](const char* of, i64 in, i64 out, Split split, bool bias) {
      return Linear(rows,
                    {.name = name + of, .in = in, .out = out, .split = split, .bias = bias, .std = c.initializer_range},
                    shard);
    };
    const auto norm = [&](const char* of, i64 size) {
      ParamRow row = whole_row({.name = name + of + ".weight", .shape = {size}, .init = Init::Ones}, shard);
      row.also_summed = shard.tp;
      rows.push_back(std::move(row));
      return rows.size() - 1;
    };
    if (query_rank_ > 0) {
      q_latent_.map = map(".q_a_proj", c.hidden, query_rank_, Split::Shared, c.attention_bias);
      q_latent_.norm = norm(".q_a_layernorm", query_rank_);
    }
    q_ = map(query_rank_ > 0 ? ".q_b_proj" : ".q_proj", query_rank_ > 0 ? query_rank_ : c.hidden, c.heads * D(),
             Split::Column, false);
    latent_.map = map(".kv_a_proj_with_mqa", c.hidden, rank_ + Dr_, Split::Shared, c.attention_bias);
    latent_.norm = norm(".kv_a_layernorm", rank_);
    kv_ = map(".kv_b_proj", rank_, c.heads * (Dn_ + Dv_), Split::Column, false);
    o_ = map(".o_proj", c.heads * Dv_, c.hidden, Split::Row, c.output_bias);
  }

  std::vector<Linear*> linears() override {
    std::vector<Linear*> maps = {&q_, &latent_.map, &kv_, &o_};
    if (query_rank_ > 0) maps.insert(maps.begin(), &q_latent_.map);
    return maps;
  }
  std::vector<size_t> matrices() const override {
    std::vector<size_t> rows = {q_.weight(), latent_.map.weight(), kv_.weight(), o_.weight()};
    if (query_rank_ > 0) rows.insert(rows.begin(), q_latent_.map.weight());
    return rows;
  }
  std::vector<size_t> backward_matrices() const override {
    std::vector<size_t> rows = matrices();
    std::ranges::reverse(rows);
    return rows;
  }
  CacheShape cache() const override { return {0, {{1, rank_}, {1, Dr_}}, true}; }

  void plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const override {
    const bool generates = pass.mode == Mode::Generate;
    const i64 B = pass.B, T = pass.T, R = pass.rows(), M = generates ? pass.context : R, Q = H_ * D();
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, Gradient, Temporary.
    a.saved = {p.attention(work, {R, Q}),        p.attention(work, {R, rank_}),     p.attention(f32, {R}),
               p.attention(work, {R, rank_}),    p.attention(work, {M, H_ * kv()}), p.attention(work, {M, Q}),
               p.attention(work, {R, H_ * Dv_}), p.attention(f32, {B, H_, T})};
    if (query_rank_ > 0) {
      for (const TensorView& view :
           {p.attention(work, {R, query_rank_}), p.attention(f32, {R}), p.attention(work, {R, query_rank_})})
        a.saved.push_back(view);
    }
    a.temporary = {p.temporary(work, {R, rank_ + Dr_})};
    if (generates)
      for (const i64 dim : {rank_, Dr_}) a.temporary.push_back(p.temporary(work, {M, dim}));
    if (pass.mode == Mode::Train) plan_gradients(a, p, R, work);
    plan_attention(a, p, shard_, pass, {H_, H_, D(), Dv_});
    if (query_rank_ > 0) q_latent_.map.plan(acts, p, work, R, pass.mode, /*attention=*/true);
    for (const Linear* map : {&q_, &latent_.map}) map->plan(acts, p, work, R, pass.mode, /*attention=*/true);
    kv_.plan(acts, p, work, M, pass.mode, /*attention=*/true);
    o_.plan(acts, p, work, R, pass.mode);
    acts.inner.push_back(std::move(a));
  }

  void attend(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& s = a.saved;
    const TensorView all = all_rows(ctx, x), kv_a = a.temporary[kKvA];
    if (query_rank_ > 0) {
      q_latent_.map.forward(ctx, p, acts, s[kQRaw], all);
      ctx.ops.rmsnorm_fwd(s[kQLatent], s[kQRstd], s[kQRaw], p.own[q_latent_.norm], kLatentEps, ctx.stream);
    }
    q_.forward(ctx, p, acts, s[kQ], query_rank_ > 0 ? s[kQLatent] : all);
    latent_.map.forward(ctx, p, acts, kv_a, all);
    const TensorView raw = columns_of(kv_a, 0, rank_), key = columns_of(kv_a, rank_, Dr_);
    copy_rows(ctx, s[kRaw], raw);
    ctx.ops.rmsnorm_fwd(s[kLatent], s[kRstd], s[kRaw], p.own[latent_.norm], kLatentEps, ctx.stream);
    const TensorView q = heads(s[kQ], ctx.B, ctx.T, D());
    turn(ctx, part(q, Dn_, Dr_), false);
    turn(ctx, one_head(key, ctx.B, ctx.T), false);
    const TensorView o = heads(s[kAttn], ctx.B, ctx.T, Dv_);
    if (ctx.mode == Mode::Generate) return generate(ctx, p, q, key, o, acts);
    const Heads made = make(ctx, p, s[kLatent], one_head(key, ctx.B, ctx.T), acts);
    model::attend(ctx, o, s[kLse], {q, made.k, made.v}, dropout_.attention(ctx, attention_), a);
  }
  void backward_input(const PassContext& ctx, RowViews p, TensorView dx, TensorView dy,
                      const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dattn = a.temporary[kDAttn], dlatent = a.temporary[kDLatent];
    o_.backward_input(ctx, p, acts, dattn, all_rows(ctx, dy));
    const auto of = [&](TensorView rows, i64 dim) { return heads(rows, ctx.B, ctx.T, dim); };
    const TensorView dkv = of(g[kDKv], kv()), dk = of(a.temporary[kDK], D()), dq = of(g[kDQ], D());
    attend_backward(ctx, {dq, dk, part(dkv, Dn_, Dv_)}, of(dattn, Dv_),
                    {of(s[kQ], D()), of(s[kK], D()), part(of(s[kKv], kv()), Dn_, Dv_)}, of(s[kAttn], Dv_), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    turn(ctx, part(dq, Dn_, Dr_), true);
    ctx.ops.copy_heads(part(dkv, 0, Dn_), part(dk, 0, Dn_), ctx.stream);

    // The key that the heads share has the sum of their gradients.
    const TensorView dkey = columns_of(g[kDKvA], rank_, Dr_);
    TensorView each = columns_of(a.temporary[kDK].reshaped({dkey.dim(0) * H_, D()}), Dn_, Dr_);
    ctx.ops.combine_rows(dkey, each, {}, {}, {}, ctx.stream);
    turn(ctx, one_head(dkey, ctx.B, ctx.T), true);
    kv_.backward_input(ctx, p, acts, dlatent, g[kDKv]);
    ctx.ops.rmsnorm_bwd(dlatent, g[kDNorm], dlatent, {}, s[kRaw], p.own[latent_.norm], s[kRstd], ctx.stream);
    copy_rows(ctx, columns_of(g[kDKvA], 0, rank_), dlatent);
    latent_.map.backward_input(ctx, p, acts, partial_sum(ctx, dx), g[kDKvA]);

    if (query_rank_ > 0) {
      q_.backward_input(ctx, p, acts, g[kDQRaw], g[kDQ]);
      ctx.ops.rmsnorm_bwd(g[kDQRaw], g[kDQNorm], g[kDQRaw], {}, s[kQRaw], p.own[q_latent_.norm], s[kQRstd], ctx.stream);
    }
    const Linear& first = query_rank_ > 0 ? q_latent_.map : q_;
    first.backward_input(ctx, p, acts, partial_sum(ctx, dx), g[query_rank_ > 0 ? kDQRaw : kDQ], partial_sum(ctx, dx));
    sum_partials(ctx, dx);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView dy, TensorView x,
                       const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& s = a.saved;
    const auto& g = a.gradients;
    o_.backward_weight(ctx, out, acts, all_rows(ctx, dy), s[kAttn]);
    kv_.backward_weight(ctx, out, acts, g[kDKv], s[kLatent]);
    round_gradient(ctx, out.own[latent_.norm], g[kDNorm]);
    const TensorView all = all_rows(ctx, x);
    latent_.map.backward_weight(ctx, out, acts, g[kDKvA], all);
    if (query_rank_ > 0) {
      q_.backward_weight(ctx, out, acts, g[kDQ], s[kQLatent]);
      round_gradient(ctx, out.own[q_latent_.norm], g[kDQNorm]);
    }
    const Linear& first = query_rank_ > 0 ? q_latent_.map : q_;
    first.backward_weight(ctx, out, acts, g[query_rank_ > 0 ? kDQRaw : kDQ], all);
  }

 private:
  // kQRaw and later: with a latent of queries.
  enum Saved : size_t { kQ, kRaw, kRstd, kLatent, kKv, kK, kAttn, kLse, kQRaw, kQRstd, kQLatent };
  enum Gradient : size_t { kDQ, kDKv, kDKvA, kDNorm, kDQRaw, kDQNorm };
  enum Temporary : size_t { kKvA, kDAttn, kDK, kDLatent, kLatents = kDAttn, kKeys };  // when generating

  // With YaRN, scores are scaled by the square of its factor for all dims.
  static float softmax_scale(const ModelConfig& c) {
    const RopeScaling& rope = c.rope;
    double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
    if (rope.type == RopeType::Yarn && rope.mscale_all_dim != 0 && rope.factor > 1) {
      const double m = 0.1 * static_cast<double>(rope.mscale_all_dim) * std::log(static_cast<double>(rope.factor)) + 1;
      scale *= m * m;
    }
    return static_cast<float>(scale);
  }

  void plan_gradients(LayerActs& a, ActivationPlanner& p, i64 R, DType work) const {
    const i64 Q = H_ * D();
    a.gradients = {p.gradient(work, {R, Q}), p.gradient(work, {R, H_ * kv()}), p.gradient(work, {R, rank_ + Dr_}),
                   p.gradient(DType::F32, {rank_})};
    if (query_rank_ > 0) {
      a.gradients.push_back(p.gradient(work, {R, query_rank_}));
      a.gradients.push_back(p.gradient(DType::F32, {query_rank_}));
    }
    for (const i64 columns : {H_ * Dv_, Q, rank_}) a.temporary.push_back(p.temporary(work, {R, columns}));
  }

  i64 D() const noexcept { return Dn_ + Dr_; }
  i64 kv() const noexcept { return Dn_ + Dv_; }  // of a head: the part of its key that has no rotation, and its value
  TensorView heads(TensorView rows, i64 B, i64 T, i64 dim) const {
    return heads_view(rows, B, T, H_, dim, rows.stride[0], 0);
  }
  // Dims [first, first + n) of each head.
  static TensorView part(TensorView heads, i64 first, i64 n) {
    heads.data = static_cast<char*>(heads.data) + first * dtype_bytes(heads.dtype);
    heads.shape[3] = n;
    return heads;
  }
  static void copy_rows(const PassContext& ctx, TensorView to, TensorView from) {
    ctx.ops.copy_heads(one_head(to, 1, to.dim(0)), one_head(from, 1, from.dim(0)), ctx.stream);
  }
  void turn(const PassContext& ctx, TensorView x, bool inverse) const {
    rotate(ctx, x, ctx.rotations[0], {.inverse = inverse, .interleaved = interleaved_});
  }

  // Keys and values of the tokens of a pass, of their latents and turned keys [B,T,1,Dr].
  Heads make(const PassContext& ctx, RowViews p, TensorView latents, TensorView key, const LayerActs& acts) const {
    const auto& s = acts.inner.back().saved;
    const i64 B = key.dim(0), T = key.dim(1);
    const TensorView kv_rows = s[kKv].rows(0, B * T);
    kv_.forward(ctx, p, acts, kv_rows, latents);
    const TensorView made = heads(kv_rows, B, T, kv()), k = heads(s[kK], B, T, D());
    ctx.ops.copy_heads(part(k, 0, Dn_), part(made, 0, Dn_), ctx.stream);
    key.shape[2] = H_;  // the same for each head
    key.stride[2] = 0;
    ctx.ops.copy_heads(part(k, Dn_, Dr_), key, ctx.stream);
    return {{}, k, part(made, Dn_, Dv_)};
  }

  void generate(const PassContext& ctx, RowViews p, TensorView q, TensorView key, TensorView o,
                const LayerActs& acts) const {
    const LayerActs& a = acts.inner.back();
    const TensorView fresh[] = {one_head(a.saved[kLatent], 1, ctx.T), one_head(key, 1, ctx.T)};
    attend_made(ctx, o, a.saved[kLse], q, fresh, attention_, [&](const model::KvCache& cache) {
      const i64 n = cache.length;
      const TensorView latents = a.temporary[kLatents].rows(0, n), keys = one_head(a.temporary[kKeys].rows(0, n), 1, n);
      copy_cached(ctx, cache, 0, one_head(latents, 1, n));
      copy_cached(ctx, cache, 1, keys);
      if (!kv_.has_branch()) return make(ctx.over(1, n), p, latents, keys, acts);
      LayerActs some = acts;  // a branch has as many rows as its map
      for (BranchActs& branch : some.branches) {
        for (TensorView* view : {&branch.inner, &branch.product}) view->shape[0] = std::min(view->shape[0], n);
      }
      return make(ctx.over(1, n), p, latents, keys, some);
    });
  }

  i64 H_, Dr_, Dn_, Dv_;  // heads on this rank; of a head: turned dims, others, those of values
  i64 rank_, query_rank_;
  bool interleaved_;
  Shard shard_;
  BlockDropout dropout_;
  AttentionParams attention_;
  Latent q_latent_, latent_;
  Linear q_, kv_;
};

}  // namespace

std::unique_ptr<SelfAttention> make_latent_attention(std::vector<ParamRow>& rows, const std::string& name,
                                                     const ModelConfig& c, i64 block, const Shard& shard) {
  return std::make_unique<LatentAttention>(rows, name, c, block, shard);
}

}  // namespace ds::model
