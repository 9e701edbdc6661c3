// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention of Llama and its relatives. Qwen2 adds biases on q, k, v; Qwen3 normalises each query and key
// head, OLMoE all together.

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

#include "base/check.h"
#include "model/self_attention.h"

namespace ds::model {
namespace {

class GroupedAttention final : public SelfAttention {
 public:
  GroupedAttention(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c, i64 block,
                   const Shard& shard)
      : SelfAttention(kAttn),
        H_(c.heads / shard.tp),
        G_(std::max<i64>(c.kv_heads / shard.tp, 1)),
        D_(c.head_dim),
        eps_(c.norm_eps),
        norm_heads_(c.qk_norm),
        norm_all_(c.whole_qk_norm),
        shard_(shard),
        dropout_{.layer = block + 1} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.dropout = c.attn_dropout;
    attention_.window = c.window(block);
    // Cut by heads; `heads` 0: any cut.
    const auto column = [&](const char* map, i64 out, i64 heads) {
      return LinearSpec{.name = name + map,
                        .in = c.hidden,
                        .out = out,
                        .split = Split::Column,
                        .bias = c.attention_bias,
                        .std = c.initializer_range,
                        .heads = heads};
    };
    // Norms of heads read and write their rows without gaps.
    qkv_ = LinearGroup(rows,
                       std::initializer_list<LinearSpec>{column(".q_proj", c.heads * D_, 0),
                                                         column(".k_proj", c.kv_heads * D_, c.kv_heads),
                                                         column(".v_proj", c.kv_heads * D_, c.kv_heads)},
                       shard, c.joined_products && !normalises());
    o_ = Linear(rows,
                {.name = name + ".o_proj",
                 .in = c.heads * D_,
                 .out = c.hidden,
                 .split = Split::Row,
                 .bias = c.output_bias,
                 .std = c.initializer_range},
                shard);
    add_norms(rows, name, c);
  }

  std::vector<Linear*> linears() override { return {&qkv_[0], &qkv_[1], &qkv_[2], &o_}; }
  std::vector<size_t> matrices() const override {
    return {qkv_[0].weight(), qkv_[1].weight(), qkv_[2].weight(), o_.weight()};
  }
  std::vector<size_t> backward_matrices() const override {
    return {o_.weight(), qkv_[0].weight(), qkv_[1].weight(), qkv_[2].weight()};
  }
  CacheShape cache() const override { return attention_cache(attention_.window, G_, D_); }

  void plan(LayerActs& acts, ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 B = pass.B, T = pass.T, R = pass.rows(), Q = H_ * D_;
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, Gradient.
    qkv_.add_outputs(a.saved, [&](i64 columns) { return p.attention(work, {R, columns}); });
    a.saved.push_back(p.attention(work, {R, Q}));
    a.saved.push_back(p.attention(f32, {B, H_, T}));
    if (normalises()) {
      for (const i64 heads : {H_, G_}) {
        const auto [rows, width] = normalised(R, heads);
        a.saved.push_back(p.attention(work, {rows, width}));
        a.saved.push_back(p.attention(f32, {rows}));
      }
    }
    if (pass.mode == Mode::Train) {
      qkv_.add_outputs(a.gradients, [&](i64 columns) { return p.gradient(work, {R, columns}); });
      if (normalises()) {
        for (const i64 heads : {H_, G_}) {
          a.gradients.push_back(p.gradient(work, {R, heads * D_}));
          a.gradients.push_back(p.gradient(f32, {normalised(R, heads).second}));
        }
      }
      a.temporary = {p.temporary(work, {R, Q})};
    }
    plan_attention(a, p, shard_, pass, {H_, G_, D_, D_});
    qkv_.plan(acts, p, work, R, pass.mode, /*attention=*/true);
    o_.plan(acts, p, work, R, pass.mode);
    acts.inner.push_back(std::move(a));
  }

  void attend(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& s = a.saved;
    qkv_.forward(ctx, p, acts, from(s, kQ), all_rows(ctx, x));
    if (normalises()) {
      head_norm(ctx, s[kQ], s[kQRaw], s[kQRstd], p.own[q_norm_]);
      head_norm(ctx, s[kK], s[kKRaw], s[kKRstd], p.own[k_norm_]);
    }
    const Heads h = heads(ctx, s[kQ], s[kK], s[kV]);
    rotate_heads(ctx, h, /*inverse=*/false);
    model::attend(ctx, queries(ctx, s[kAttn]), s[kLse], h, dropout_.attention(ctx, attention_), a);
  }
  void backward_input(const PassContext& ctx, RowViews p, TensorView dx, TensorView dy,
                      const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dattn = a.temporary[0];
    o_.backward_input(ctx, p, acts, dattn, all_rows(ctx, dy));
    const Heads dh = heads(ctx, g[kDQ], g[kDK], g[kDV]);
    attend_backward(ctx, dh, queries(ctx, dattn), heads(ctx, s[kQ], s[kK], s[kV]), queries(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    rotate_heads(ctx, dh, /*inverse=*/true);
    if (normalises()) {
      head_norm_backward(ctx, g[kDQRaw], g[kDQNorm], g[kDQ], s[kQRaw], p.own[q_norm_], s[kQRstd]);
      head_norm_backward(ctx, g[kDKRaw], g[kDKNorm], g[kDK], s[kKRaw], p.own[k_norm_], s[kKRstd]);
    }
    qkv_.backward_input(ctx, p, acts, partial_sum(ctx, dx), dqkv(a));
    sum_partials(ctx, dx);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView dy, TensorView x,
                       const LayerActs& acts) const override {
    const LayerActs& a = acts.inner.back();
    const auto& g = a.gradients;
    o_.backward_weight(ctx, out, acts, all_rows(ctx, dy), a.saved[kAttn]);
    qkv_.backward_weight(ctx, out, acts, dqkv(a), all_rows(ctx, x));
    if (normalises()) {
      round_gradient(ctx, out.own[q_norm_], g[kDQNorm]);
      round_gradient(ctx, out.own[k_norm_], g[kDKNorm]);
    }
  }

 private:
  enum Saved : size_t { kQ, kK, kV, kAttn, kLse, kQRaw, kQRstd, kKRaw, kKRstd };  // the last four with norms
  enum Gradient : size_t { kDQ, kDK, kDV, kDQRaw, kDQNorm, kDKRaw, kDKNorm };

  void add_norms(std::vector<ParamRow>& rows, const std::string& name, const ModelConfig& c) {
    const auto add = [&](const char* norm, i64 size) {
      rows.push_back({.name = name + norm + ".weight", .shape = {size}, .init = Init::Ones});
      return rows.size() - 1;
    };
    if (norm_heads_) {
      // One for all heads; each rank sees only its own.
      const auto of_heads = [&](const char* norm) {
        const size_t row = add(norm, D_);
        rows[row] = whole_row(rows[row], shard_);
        rows[row].also_summed = shard_.tp;
        return row;
      };
      q_norm_ = of_heads(".q_norm");
      k_norm_ = of_heads(".k_norm");
    }
    if (norm_all_) {
      DS_CHECK(
          shard_.tp == 1, Errc::Unavailable,
          "tensor_parallel: queries and keys of this model are normalised over all heads, which one rank must have");
      q_norm_ = add(".q_norm", c.heads * D_);
      k_norm_ = add(".k_norm", c.kv_heads * D_);
    }
  }

  bool normalises() const noexcept { return norm_heads_ || norm_all_; }
  // Rows and columns of what is normalised of R rows with so many heads.
  std::pair<i64, i64> normalised(i64 R, i64 heads) const noexcept {
    return norm_heads_ ? std::pair(R * heads, D_) : std::pair(R, heads * D_);
  }
  // RMSNorm of every head, or of all, in place; keeps the raw values for the backward pass.
  void head_norm(const PassContext& ctx, TensorView values, TensorView raw, TensorView rstd, TensorView weight) const {
    const TensorView rows = values.reshaped({raw.dim(0), raw.dim(1)});
    ctx.ops.cast(raw, rows, ctx.stream);
    ctx.ops.rmsnorm_fwd(rows, rstd, raw, weight, eps_, ctx.stream);
  }
  void head_norm_backward(const PassContext& ctx, TensorView dx, TensorView dweight, TensorView dy, TensorView raw,
                          TensorView weight, TensorView rstd) const {
    const auto rows = [&](TensorView v) { return v.reshaped({raw.dim(0), raw.dim(1)}); };
    ctx.ops.rmsnorm_bwd(rows(dx), dweight, rows(dy), {}, raw, weight, rstd, ctx.stream);
  }

  static std::span<const TensorView> from(const std::vector<TensorView>& views, size_t first) {
    return std::span(views).subspan(first);
  }
  // Gradients of the products' results.
  std::array<TensorView, 3> dqkv(const LayerActs& a) const {
    const auto& g = a.gradients;
    return {g[normalises() ? kDQRaw : kDQ], g[normalises() ? kDKRaw : kDK], g[kDV]};
  }
  TensorView queries(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, rows.stride[0], 0);
  }
  Heads heads(const PassContext& ctx, TensorView q, TensorView k, TensorView v) const {
    return {queries(ctx, q), heads_view(k, ctx.B, ctx.T, G_, D_, k.stride[0], 0),
            heads_view(v, ctx.B, ctx.T, G_, D_, v.stride[0], 0)};
  }
  void rotate_heads(const PassContext& ctx, const Heads& h, bool inverse) const {
    for (const TensorView& x : {h.q, h.k}) rotate(ctx, x, ctx.rotations[kRotation], {.inverse = inverse});
  }
  static constexpr size_t kRotation = 0;  // of Model::rotations

  i64 H_, G_, D_;
  float eps_;
  bool norm_heads_, norm_all_;
  Shard shard_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t q_norm_ = 0, k_norm_ = 0;
  LinearGroup qkv_;
};

}  // namespace

std::unique_ptr<SelfAttention> make_grouped_attention(std::vector<ParamRow>& rows, const std::string& name,
                                                      const ModelConfig& c, i64 block, const Shard& shard) {
  return std::make_unique<GroupedAttention>(rows, name, c, block, shard);
}

}  // namespace ds::model
