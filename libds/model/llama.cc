// SPDX-License-Identifier: Apache-2.0
// Llama and its relatives: Touvron et al., "LLaMA" (2023); Qwen2, Qwen3 technical reports. Pre-RMSNorm blocks, rotary
// positions, grouped-query attention, SwiGLU. Qwen2 adds biases on q, k, v; Qwen3 normalises each query and key head.

#include <array>
#include <cmath>

#include "config/parallel.h"
#include "ds/linear.h"
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
        F_(c.intermediate / shard.tp),
        eps_(c.norm_eps),
        qk_norm_(c.qk_norm),
        shard_(shard),
        dropout_{.layer = index + 1} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.dropout = c.attn_dropout;
    attention_.window = c.window(index);
    const auto norm = [&](const std::string& n, i64 size) {
      return ParamRow{.name = name_ + n + ".weight", .shape = {size}, .init = Init::Ones};
    };
    // Cut by heads, or by the outputs of the gated MLP; `heads` 0: any cut.
    const auto column = [&](const std::string& n, i64 out, bool bias, i64 heads) {
      return LinearSpec{.name = name_ + n,
                        .in = C_,
                        .out = out,
                        .split = Split::Column,
                        .bias = bias,
                        .std = c.initializer_range,
                        .heads = heads};
    };
    const auto group = [&](std::initializer_list<LinearSpec> specs, bool join) {
      return LinearGroup(rows_, specs, shard, join);
    };
    const auto row = [&](const std::string& n, i64 in, bool bias) {
      return Linear(
          rows_,
          {.name = name_ + n, .in = in, .out = C_, .split = Split::Row, .bias = bias, .std = c.initializer_range},
          shard);
    };
    norm1_ = add(whole_row(norm(".input_layernorm", C_), shard));
    // Norms of heads read and write their rows without gaps.
    qkv_ = group({column(".self_attn.q_proj", c.heads * D_, c.attention_bias, 0),
                  column(".self_attn.k_proj", c.kv_heads * D_, c.attention_bias, c.kv_heads),
                  column(".self_attn.v_proj", c.kv_heads * D_, c.attention_bias, c.kv_heads)},
                 c.joined_products && !qk_norm_);
    o_ = row(".self_attn.o_proj", c.heads * D_, c.output_bias);
    if (qk_norm_) {
      // One for all heads; each rank sees only its own.
      const auto of_heads = [&](const std::string& n) {
        ParamRow r = whole_row(norm(n, D_), shard);
        r.also_summed = shard.tp;
        return r;
      };
      q_norm_ = add(of_heads(".self_attn.q_norm"));
      k_norm_ = add(of_heads(".self_attn.k_norm"));
    }
    norm2_ = add(whole_row(norm(".post_attention_layernorm", C_), shard));
    gate_up_ = group({column(".mlp.gate_proj", c.intermediate, c.mlp_bias, 0),
                      column(".mlp.up_proj", c.intermediate, c.mlp_bias, 0)},
                     c.joined_products);
    down_ = row(".mlp.down_proj", c.intermediate, c.mlp_bias);
    allow_tiles();
  }

  std::string_view type() const noexcept override { return block_type(Family::Llama); }
  bool adds_gradients() const noexcept override { return true; }
  bool is_block() const noexcept override { return true; }
  CacheShape cache() const override { return attention_cache(attention_.window, G_, D_); }
  std::vector<Linear*> linears() override {
    return {&qkv_[0], &qkv_[1], &qkv_[2], &o_, &gate_up_[0], &gate_up_[1], &down_};
  }
  std::vector<size_t> products(Products which) const override {
    const size_t q = qkv_[0].weight(), k = qkv_[1].weight(), v = qkv_[2].weight(), o = o_.weight(),
                 gate = gate_up_[0].weight(), up = gate_up_[1].weight(), down = down_.weight();
    switch (which) {
      case Products::Forward: return {q, k, v, o, gate, up, down};
      case Products::Recompute: return {q, k, v, o, gate, up};
      case Products::RecomputeAttention: return {q, k, v};
      case Products::BackwardInput:
      case Products::BackwardWeight: break;
    }
    return {down, gate, up, o, q, k, v};
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
    gate_up_.add_outputs(a.saved, [&](i64 columns) { return p.saved(work, {R, columns}); });
    a.saved.push_back(p.saved(work, {R, F_}));
    if (qk_norm_) {
      for (const i64 heads : {H_, G_}) {
        a.saved.push_back(p.attention(work, {R * heads, D_}));
        a.saved.push_back(p.attention(f32, {R * heads}));
      }
    }
    if (pass.mode == Mode::Train) {
      gate_up_.add_outputs(a.gradients, gradients);
      a.gradients.push_back(p.gradient(work, {S, C_}));
      qkv_.add_outputs(a.gradients, gradients);
      add(a.gradients, {p.gradient(f32, {C_}), p.gradient(f32, {C_})});
      if (qk_norm_) {
        for (const i64 heads : {H_, G_}) {
          a.gradients.push_back(p.gradient(work, {R, heads * D_}));
          a.gradients.push_back(p.gradient(f32, {D_}));
        }
      }
      a.temporary = {p.temporary(work, {S, C_}), p.temporary(work, {R, Q})};
    }
    plan_attention(a, p, shard_, pass, {H_, G_, D_});
    qkv_.plan(a, p, work, R, pass.mode, /*attention=*/true);
    o_.plan(a, p, work, R, pass.mode);
    gate_up_.plan(a, p, work, R, pass.mode);
    down_.plan(a, p, work, R, pass.mode);
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    attention_forward(ctx, p, x, a);
    mlp_forward(ctx, p, x, a);
    down_.forward(ctx, p, a, a.output, a.saved[kGated], {.residual = a.saved[kMiddle]});
  }

  void recompute(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a, Keep keep) const override {
    attention_forward(ctx, p, x, a);
    if (keep != Keep::Input) return;
    mlp_forward(ctx, p, x, a);
    down_.recompute(ctx, p, a, a.saved[kGated]);
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView x, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dnorm = a.temporary[0], dattn = a.temporary[1];
    down_.backward_input(ctx, p, a, g[kDGate], all_rows(ctx, dy));
    ctx.ops.swiglu_bwd(g[kDGate], g[kDUp], g[kDGate], s[kGate], s[kUp], ctx.stream);
    const TensorView sum = partial_sum(ctx, dnorm);
    gate_up_.backward_input(ctx, p, a, sum, from(g, kDGate));
    sum_partials(ctx, dnorm);
    ctx.ops.rmsnorm_bwd(g[kDMiddle], g[kDNorm2], dnorm, dy, s[kMiddle], p.own[norm2_], s[kRstd2], ctx.stream);

    o_.backward_input(ctx, p, a, dattn, all_rows(ctx, g[kDMiddle]));
    const Heads dh = heads(ctx, g[kDQ], g[kDK], g[kDV]);
    attend_backward(ctx, dh, queries(ctx, dattn), heads(ctx, s[kQ], s[kK], s[kV]), queries(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    rotate_heads(ctx, dh, /*inverse=*/true);
    if (qk_norm_) {
      head_norm_backward(ctx, g[kDQRaw], g[kDQNorm], g[kDQ], s[kQRaw], p.own[q_norm_], s[kQRstd], H_);
      head_norm_backward(ctx, g[kDKRaw], g[kDKNorm], g[kDK], s[kKRaw], p.own[k_norm_], s[kKRstd], G_);
    }
    qkv_.backward_input(ctx, p, a, sum, dqkv(a));
    sum_partials(ctx, dnorm);
    ctx.ops.rmsnorm_bwd(a.input_grad, g[kDNorm1], dnorm, g[kDMiddle], x, p.own[norm1_], s[kRstd1], ctx.stream);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView, TensorView dy,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    down_.backward_weight(ctx, out, a, all_rows(ctx, dy), s[kGated]);
    gate_up_.backward_weight(ctx, out, a, from(g, kDGate), all_rows(ctx, s[kNorm2]));
    o_.backward_weight(ctx, out, a, all_rows(ctx, g[kDMiddle]), s[kAttn]);
    qkv_.backward_weight(ctx, out, a, dqkv(a), all_rows(ctx, s[kNorm1]));
    round_gradient(ctx, out.own[norm1_], g[kDNorm1]);
    round_gradient(ctx, out.own[norm2_], g[kDNorm2]);
    if (qk_norm_) {
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
    kGate,
    kUp,
    kGated,
    kQRaw,
    kQRstd,
    kKRaw,
    kKRstd  // with head norms
  };
  enum Gradient : size_t {
    kDGate,
    kDUp,
    kDMiddle,
    kDQ,
    kDK,
    kDV,
    kDNorm1,
    kDNorm2,
    kDQRaw,
    kDQNorm,
    kDKRaw,
    kDKNorm  // with head norms
  };

  void attention_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    ctx.ops.rmsnorm_fwd(s[kNorm1], s[kRstd1], x, p.own[norm1_], eps_, ctx.stream);
    qkv_.forward(ctx, p, a, from(s, kQ), all_rows(ctx, s[kNorm1]));
    if (qk_norm_) {
      head_norm(ctx, s[kQ], s[kQRaw], s[kQRstd], p.own[q_norm_], H_);
      head_norm(ctx, s[kK], s[kKRaw], s[kKRstd], p.own[k_norm_], G_);
    }
    const Heads h = heads(ctx, s[kQ], s[kK], s[kV]);
    rotate_heads(ctx, h, /*inverse=*/false);
    attend(ctx, queries(ctx, s[kAttn]), s[kLse], h, dropout_.attention(ctx, attention_), a);
  }
  // From the attention's output to the input of the last product.
  void mlp_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    o_.forward(ctx, p, a, s[kMiddle], s[kAttn], {.residual = x});
    ctx.ops.rmsnorm_fwd(s[kNorm2], s[kRstd2], s[kMiddle], p.own[norm2_], eps_, ctx.stream);
    gate_up_.forward(ctx, p, a, from(s, kGate), all_rows(ctx, s[kNorm2]));
    ctx.ops.swiglu_fwd(s[kGated], s[kGate], s[kUp], ctx.stream);
  }

  // RMSNorm of every head in place; keeps the raw values for the backward pass.
  void head_norm(const PassContext& ctx, TensorView values, TensorView raw, TensorView rstd, TensorView weight,
                 i64 num_heads) const {
    const TensorView rows = values.reshaped({ctx.B * ctx.T * num_heads, D_});
    ctx.ops.cast(raw, rows, ctx.stream);
    ctx.ops.rmsnorm_fwd(rows, rstd, raw, weight, eps_, ctx.stream);
  }
  void head_norm_backward(const PassContext& ctx, TensorView dx, TensorView dweight, TensorView dy, TensorView raw,
                          TensorView weight, TensorView rstd, i64 num_heads) const {
    const i64 rows = ctx.B * ctx.T * num_heads;
    ctx.ops.rmsnorm_bwd(dx.reshaped({rows, D_}), dweight, dy.reshaped({rows, D_}), {}, raw, weight, rstd, ctx.stream);
  }
  static std::span<const TensorView> from(const std::vector<TensorView>& views, size_t first) {
    return std::span(views).subspan(first);
  }
  // Gradients of the products' results.
  std::array<TensorView, 3> dqkv(const LayerActs& a) const {
    const auto& g = a.gradients;
    return {g[qk_norm_ ? kDQRaw : kDQ], g[qk_norm_ ? kDKRaw : kDK], g[kDV]};
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

  i64 C_, H_, G_, D_, F_;
  float eps_;
  bool qk_norm_;
  Shard shard_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t norm1_ = 0, norm2_ = 0, q_norm_ = 0, k_norm_ = 0;
  LinearGroup qkv_, gate_up_;
  Linear o_, down_;
};

}  // namespace

Model make_llama(const ModelConfig& c, const Shard& shard) {
  Model m;
  if (c.tie_embeddings) {
    m.shared = {TokenEmbedding::table(c, shard)};
    m.ties = {{"lm_head.weight", "model.embed_tokens.weight"}};
  }
  m.rotations = {rotation_of(c)};
  m.layers.push_back(std::make_unique<TokenEmbedding>(c, shard));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<LlamaBlock>(c, l, shard));
  m.layers.push_back(make_head(NormKind::RmsNorm, "model.norm", "lm_head.weight", c.hidden, c.vocab_size,
                               c.tie_embeddings, c.norm_eps, c.initializer_range, shard));
  return m;
}

}  // namespace ds::model
