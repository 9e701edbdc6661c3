// SPDX-License-Identifier: Apache-2.0
// Llama and its relatives: Touvron et al., "LLaMA" (2023); Qwen2, Qwen3 technical reports. Pre-RMSNorm blocks, rotary
// positions, grouped-query attention, SwiGLU. Qwen2 adds biases on q, k, v; Qwen3 normalises each query and key head.
// Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE have experts in place of the MLP of some blocks or all.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "config/parallel.h"
#include "ds/linear.h"
#include "model/experts.h"
#include "model/feed_forward.h"
#include "model/models.h"

namespace ds::model {
namespace {

class TokenEmbedding final : public Layer {
 public:
  TokenEmbedding(const ModelConfig& c, const Shard& shard)
      : Layer("model.embed_tokens"), V_(c.vocab_size), tied_(c.tie_embeddings) {
    if (!tied_) rows_.push_back(table(c, shard));
  }
  static ParamRow table(const ModelConfig& c, const Shard& shard) {
    return cut_vocabulary({.name = "model.embed_tokens.weight",
                           .shape = {c.vocab_size, c.hidden},
                           .std = c.initializer_range,
                           .decay = true},
                          shard);
  }

  std::string_view type() const noexcept override { return kEmbeddingType; }
  bool adds_gradients() const noexcept override { return true; }
  LayerActs plan(ActivationPlanner&, const PlannedPass&) const override { return {}; }
  void forward(const PassContext& ctx, RowViews params, TensorView, const LayerActs& acts) const override {
    embedding_forward(ctx, acts.output, tied_ ? params.shared : params.own[0], V_);
  }
  void backward_input(const PassContext&, RowViews, TensorView, TensorView, const LayerActs&) const override {}
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView, TensorView dy,
                       const LayerActs&) const override {
    embedding_backward(ctx, tied_ ? grads.shared : grads.own[0], dy, V_);
  }

 private:
  i64 V_;
  bool tied_;
};

class LlamaBlock final : public Layer {
 public:
  LlamaBlock(const ModelConfig& c, i64 index, const Shard& shard)
      : Layer("model.layers." + std::to_string(index)),
        C_(c.hidden),
        H_(c.heads / shard.tp),
        G_(std::max<i64>(c.kv_heads / shard.tp, 1)),
        D_(c.head_dim),
        eps_(c.norm_eps),
        norm_heads_(c.qk_norm),
        norm_all_(c.whole_qk_norm),
        shard_(shard),
        dropout_{.layer = index + 1} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.dropout = c.attn_dropout;
    attention_.window = c.window(index);
    const auto norm = [&](const std::string& n, i64 size) {
      return ParamRow{.name = name_ + n + ".weight", .shape = {size}, .init = Init::Ones};
    };
    // Cut by heads; `heads` 0: any cut.
    const auto column = [&](const std::string& n, i64 out, bool bias, i64 heads) {
      return LinearSpec{.name = name_ + n,
                        .in = C_,
                        .out = out,
                        .split = Split::Column,
                        .bias = bias,
                        .std = c.initializer_range,
                        .heads = heads};
    };
    norm1_ = add(whole_row(norm(".input_layernorm", C_), shard));
    // Norms of heads read and write their rows without gaps.
    qkv_ = LinearGroup(
        rows_,
        std::initializer_list<LinearSpec>{column(".self_attn.q_proj", c.heads * D_, c.attention_bias, 0),
                                          column(".self_attn.k_proj", c.kv_heads * D_, c.attention_bias, c.kv_heads),
                                          column(".self_attn.v_proj", c.kv_heads * D_, c.attention_bias, c.kv_heads)},
        shard, c.joined_products && !normalises());
    o_ = Linear(rows_,
                {.name = name_ + ".self_attn.o_proj",
                 .in = c.heads * D_,
                 .out = C_,
                 .split = Split::Row,
                 .bias = c.output_bias,
                 .std = c.initializer_range},
                shard);
    if (norm_heads_) {
      // One for all heads; each rank sees only its own.
      const auto of_heads = [&](const std::string& n) {
        ParamRow r = whole_row(norm(n, D_), shard);
        r.also_summed = shard.tp;
        return r;
      };
      q_norm_ = add(of_heads(".self_attn.q_norm"));
      k_norm_ = add(of_heads(".self_attn.k_norm"));
    }
    if (norm_all_) {
      DS_CHECK(
          shard.tp == 1, Errc::Unavailable,
          "tensor_parallel: queries and keys of this model are normalised over all heads, which one rank must have");
      q_norm_ = add(norm(".self_attn.q_norm", c.heads * D_));
      k_norm_ = add(norm(".self_attn.k_norm", c.kv_heads * D_));
    }
    norm2_ = add(whole_row(norm(".post_attention_layernorm", C_), shard));
    const std::string mlp = name_ + ".mlp";
    if (c.experts.sparse(index)) {
      mlp_ = std::make_unique<Experts>(rows_, mlp, c, index + 1, shard);
    } else {
      mlp_ = std::make_unique<GatedMlp>(rows_, mlp, c, c.intermediate, shard);
    }
    allow_tiles();
  }

  std::string_view type() const noexcept override { return block_type(Family::Llama); }
  bool adds_gradients() const noexcept override { return true; }
  bool adds_loss() const noexcept override { return mlp_->adds_loss(); }
  i64 num_counts() const noexcept override { return mlp_->num_counts(); }
  i64 num_shared_stats() const noexcept override { return mlp_->num_shared_stats(); }
  i64 gradient_parts() const noexcept override { return mlp_->gradient_parts(); }
  bool reads_tokens() const noexcept override { return mlp_->num_counts() > 0; }  // counts those that have a target
  i64 product_rows(i64 R) const noexcept override { return mlp_->product_rows(R); }
  bool is_block() const noexcept override { return true; }
  CacheShape cache() const override { return attention_cache(attention_.window, G_, D_); }
  std::vector<Linear*> linears() override {
    std::vector<Linear*> all = {&qkv_[0], &qkv_[1], &qkv_[2], &o_};
    for (Linear* linear : mlp_->linears()) all.push_back(linear);
    return all;
  }
  std::vector<size_t> products(Products which) const override {
    const size_t q = qkv_[0].weight(), k = qkv_[1].weight(), v = qkv_[2].weight(), o = o_.weight();
    if (which == Products::RecomputeAttention) return {q, k, v};
    std::vector<size_t> mlp = mlp_->matrices(), all;
    const auto append = [&](std::span<const size_t> rows) { all.insert(all.end(), rows.begin(), rows.end()); };
    if (which == Products::Forward || which == Products::Recompute) {
      if (which == Products::Recompute && !mlp.empty()) mlp.pop_back();  // down
      append(std::array{q, k, v, o});
      append(mlp);
    } else {
      if (!mlp.empty()) std::rotate(mlp.begin(), std::prev(mlp.end()), mlp.end());
      append(mlp);
      append(std::array{o, q, k, v});
    }
    return all;
  }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 B = pass.B, T = pass.T, R = pass.rows(), S = stream_rows(shard_, pass.mode, R), Q = H_ * D_;
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    const auto add = [](std::vector<TensorView>& to, std::initializer_list<TensorView> views) {
      to.insert(to.end(), views);
    };
    const auto gradients = [&](i64 columns) { return p.gradient(work, {R, columns}); };
    // In the order of enum Saved, Gradient, Temporary.
    a.saved = {p.attention(work, {S, C_}), p.attention(f32, {S})};
    qkv_.add_outputs(a.saved, [&](i64 columns) { return p.attention(work, {R, columns}); });
    add(a.saved, {p.attention(work, {R, Q}), p.attention(f32, {B, H_, T}), p.saved(work, {S, C_}),
                  p.saved(work, {S, C_}), p.saved(f32, {S})});
    if (normalises()) {
      for (const i64 heads : {H_, G_}) {
        const auto [rows, width] = normalised(R, heads);
        a.saved.push_back(p.attention(work, {rows, width}));
        a.saved.push_back(p.attention(f32, {rows}));
      }
    }
    if (pass.mode == Mode::Train) {
      a.gradients.push_back(p.gradient(work, {S, C_}));
      qkv_.add_outputs(a.gradients, gradients);
      add(a.gradients, {p.gradient(f32, {C_}), p.gradient(f32, {C_})});
      if (normalises()) {
        for (const i64 heads : {H_, G_}) {
          a.gradients.push_back(p.gradient(work, {R, heads * D_}));
          a.gradients.push_back(p.gradient(f32, {normalised(R, heads).second}));
        }
      }
      a.temporary = {p.temporary(work, {S, C_}), p.temporary(work, {R, Q})};
    }
    plan_attention(a, p, shard_, pass, {H_, G_, D_});
    qkv_.plan(a, p, work, R, pass.mode, /*attention=*/true);
    o_.plan(a, p, work, R, pass.mode);
    mlp_->plan(a, p, pass);
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    attention_forward(ctx, p, x, a);
    finish_attention(ctx, p, x, a);
    mlp_->forward(ctx, p, a.output, a.saved[kNorm2], a.saved[kMiddle], a);
  }

  void recompute(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a, Keep keep) const override {
    attention_forward(ctx, p, x, a);
    if (keep != Keep::Input) return;
    finish_attention(ctx, p, x, a);
    mlp_->recompute(ctx, p, a.saved[kNorm2], a);
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView x, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dnorm = a.temporary[0], dattn = a.temporary[1];
    mlp_->backward_input(ctx, p, dnorm, dy, s[kNorm2], {}, a);
    ctx.ops.rmsnorm_bwd(g[kDMiddle], g[kDNorm2], dnorm, dy, s[kMiddle], p.own[norm2_], s[kRstd2], ctx.stream);

    o_.backward_input(ctx, p, a, dattn, all_rows(ctx, g[kDMiddle]));
    const Heads dh = heads(ctx, g[kDQ], g[kDK], g[kDV]);
    attend_backward(ctx, dh, queries(ctx, dattn), heads(ctx, s[kQ], s[kK], s[kV]), queries(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    rotate_heads(ctx, dh, /*inverse=*/true);
    if (normalises()) {
      head_norm_backward(ctx, g[kDQRaw], g[kDQNorm], g[kDQ], s[kQRaw], p.own[q_norm_], s[kQRstd]);
      head_norm_backward(ctx, g[kDKRaw], g[kDKNorm], g[kDK], s[kKRaw], p.own[k_norm_], s[kKRstd]);
    }
    qkv_.backward_input(ctx, p, a, partial_sum(ctx, dnorm), dqkv(a));
    sum_partials(ctx, dnorm);
    ctx.ops.rmsnorm_bwd(a.input_grad, g[kDNorm1], dnorm, g[kDMiddle], x, p.own[norm1_], s[kRstd1], ctx.stream);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView, TensorView dy,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    mlp_->backward_weight(ctx, out, dy, s[kNorm2], a);
    if (ctx.part > 0) return;
    o_.backward_weight(ctx, out, a, all_rows(ctx, g[kDMiddle]), s[kAttn]);
    qkv_.backward_weight(ctx, out, a, dqkv(a), all_rows(ctx, s[kNorm1]));
    round_gradient(ctx, out.own[norm1_], g[kDNorm1]);
    round_gradient(ctx, out.own[norm2_], g[kDNorm2]);
    if (normalises()) {
      round_gradient(ctx, out.own[q_norm_], g[kDQNorm]);
      round_gradient(ctx, out.own[k_norm_], g[kDKNorm]);
    }
  }

 private:
  enum Saved : size_t {
    kNorm1,
    kRstd1,
    kQ,
    kK,
    kV,
    kAttn,
    kLse,
    kMiddle,
    kNorm2,
    kRstd2,
    kQRaw,
    kQRstd,
    kKRaw,
    kKRstd  // with norms of queries and keys
  };
  enum Gradient : size_t {
    kDMiddle,
    kDQ,
    kDK,
    kDV,
    kDNorm1,
    kDNorm2,
    kDQRaw,
    kDQNorm,
    kDKRaw,
    kDKNorm  // with norms of queries and keys
  };

  bool normalises() const noexcept { return norm_heads_ || norm_all_; }
  // Rows and columns of what is normalised of R rows with so many heads.
  std::pair<i64, i64> normalised(i64 R, i64 heads) const noexcept {
    return norm_heads_ ? std::pair(R * heads, D_) : std::pair(R, heads * D_);
  }

  void attention_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    ctx.ops.rmsnorm_fwd(s[kNorm1], s[kRstd1], x, p.own[norm1_], eps_, ctx.stream);
    qkv_.forward(ctx, p, a, from(s, kQ), all_rows(ctx, s[kNorm1]));
    if (normalises()) {
      head_norm(ctx, s[kQ], s[kQRaw], s[kQRstd], p.own[q_norm_]);
      head_norm(ctx, s[kK], s[kKRaw], s[kKRstd], p.own[k_norm_]);
    }
    const Heads h = heads(ctx, s[kQ], s[kK], s[kV]);
    rotate_heads(ctx, h, /*inverse=*/false);
    attend(ctx, queries(ctx, s[kAttn]), s[kLse], h, dropout_.attention(ctx, attention_), a);
  }
  // From the attention's output to the input of the MLP.
  void finish_attention(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    o_.forward(ctx, p, a, s[kMiddle], s[kAttn], {.residual = x});
    ctx.ops.rmsnorm_fwd(s[kNorm2], s[kRstd2], s[kMiddle], p.own[norm2_], eps_, ctx.stream);
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
    for (const TensorView& x : {h.q, h.k}) rotate(ctx, x, ctx.rotations[kRotation], inverse);
  }
  static constexpr size_t kRotation = 0;  // of Model::rotations

  i64 C_, H_, G_, D_;
  float eps_;
  bool norm_heads_, norm_all_;
  Shard shard_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t norm1_ = 0, norm2_ = 0, q_norm_ = 0, k_norm_ = 0;
  LinearGroup qkv_;
  Linear o_;
  std::unique_ptr<FeedForward> mlp_;
};

}  // namespace

Model make_llama(const ModelConfig& c, const Shard& shard) {
  Model m;
  if (c.tie_embeddings) {
    m.shared = {TokenEmbedding::table(c, shard)};
    m.ties = {{"lm_head.weight", "model.embed_tokens.weight"}};
  }
  for (i64 l = c.layers; l < c.layers + c.later_predictors; ++l) {
    m.other_tasks.push_back(fmt::format("model.layers.{}.", l));
    m.other_tasks.push_back(fmt::format("layers.{}.", l));  // in files of the bare model
  }
  m.rotations = {rotation_of(c)};
  m.layers.push_back(std::make_unique<TokenEmbedding>(c, shard));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<LlamaBlock>(c, l, shard));
  m.layers.push_back(make_head(NormKind::RmsNorm, "model.norm", "lm_head.weight", c.hidden, c.vocab_size,
                               c.tie_embeddings, c.norm_eps, c.initializer_range, shard));
  return m;
}

}  // namespace ds::model
