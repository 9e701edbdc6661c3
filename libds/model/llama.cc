// SPDX-License-Identifier: Apache-2.0
// Llama and its relatives: Touvron et al., "LLaMA" (2023); Qwen2, Qwen3 technical reports. Pre-RMSNorm blocks, rotary
// positions, grouped-query attention, SwiGLU. Qwen2 adds biases on q, k, v; Qwen3 normalises each query and key head.

#include <cmath>

#include "model/building_blocks.h"
#include "model/models.h"

namespace ds::model {
namespace {

class TokenEmbedding final : public Layer {
 public:
  explicit TokenEmbedding(const ModelConfig& c) : Layer("model.embed_tokens"), C_(c.hidden), tied_(c.tie_embeddings) {
    rows_.push_back(
        {.name = "model.embed_tokens.weight", .shape = {c.vocab_size, C_}, .std = c.initializer_range, .decay = true});
  }
  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode) const override {
    LayerActs a;
    a.output = planner.saved(work, {B * T, C_});
    return a;
  }
  void forward(const PassContext& ctx, RowViews params, TensorView, const LayerActs& acts) const override {
    ctx.ops.embedding_fwd(acts.output, params.own[0], ctx.ids, false, ctx.stream);
  }
  void backward(const PassContext& ctx, RowViews, RowViews grads, TensorView, TensorView dy, TensorView,
                const LayerActs&) const override {
    if (!tied_) {
      ctx.ops.embedding_bwd(grads.own[0], dy, ctx.ids, false, ctx.stream);
      return;
    }
    ctx.ops.embedding_bwd(ctx.head_weight_grad, dy, ctx.ids, true, ctx.stream);  // both uses in fp32, rounded once
    ctx.ops.cast(grads.own[0], ctx.head_weight_grad, ctx.stream);
  }

 private:
  i64 C_;
  bool tied_;
};

class LlamaBlock final : public Layer {
 public:
  LlamaBlock(const ModelConfig& c, i64 index)
      : Layer("model.layers." + std::to_string(index)),
        C_(c.hidden),
        H_(c.heads),
        G_(c.kv_heads),
        D_(c.head_dim),
        F_(c.intermediate),
        eps_(c.norm_eps),
        qk_norm_(c.qk_norm),
        dropout_{.layer = index + 1} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.dropout = c.attn_dropout;
    attention_.window = c.window(index);
    const auto norm = [&](const char* n, i64 size) {
      rows_.push_back({.name = name_ + n + ".weight", .shape = {size}, .init = Init::Ones});
      return rows_.size() - 1;
    };
    const auto linear = [&](const char* n, i64 in, i64 out, bool bias) {
      const size_t at = rows_.size();
      rows_.push_back({.name = name_ + n + ".weight", .shape = {out, in}, .std = c.initializer_range, .decay = true});
      if (bias) rows_.push_back({.name = name_ + n + ".bias", .shape = {out}, .init = Init::Zeros});
      return Projection{at, bias};
    };
    norm1_ = norm(".input_layernorm", C_);
    q_ = linear(".self_attn.q_proj", C_, H_ * D_, c.attention_bias);
    k_ = linear(".self_attn.k_proj", C_, G_ * D_, c.attention_bias);
    v_ = linear(".self_attn.v_proj", C_, G_ * D_, c.attention_bias);
    o_ = linear(".self_attn.o_proj", H_ * D_, C_, c.output_bias);
    if (qk_norm_) {
      q_norm_ = norm(".self_attn.q_norm", D_);
      k_norm_ = norm(".self_attn.k_norm", D_);
    }
    norm2_ = norm(".post_attention_layernorm", C_);
    gate_ = linear(".mlp.gate_proj", C_, F_, c.mlp_bias);
    up_ = linear(".mlp.up_proj", C_, F_, c.mlp_bias);
    down_ = linear(".mlp.down_proj", F_, C_, c.mlp_bias);
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    const i64 R = B * T, Q = H_ * D_, K = G_ * D_;
    const auto f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, then of enum Temporary.
    a.saved = {planner.saved(work, {R, C_}),   planner.saved(f32, {R}),      planner.saved(work, {R, Q}),
               planner.saved(work, {R, K}),    planner.saved(work, {R, K}),  planner.saved(work, {R, Q}),
               planner.saved(f32, {B, H_, T}), planner.saved(work, {R, C_}), planner.saved(work, {R, C_}),
               planner.saved(f32, {R}),        planner.saved(work, {R, F_}), planner.saved(work, {R, F_}),
               planner.saved(work, {R, F_}),   planner.saved(work, {R, C_})};
    if (qk_norm_) {
      for (const i64 heads : {H_, G_}) {
        a.saved.push_back(planner.saved(work, {R * heads, D_}));
        a.saved.push_back(planner.saved(f32, {R * heads}));
      }
    }
    a.output = a.saved[kOutput];
    if (mode == Mode::Train) {
      a.temporary = {planner.temporary(work, {R, F_}), planner.temporary(work, {R, F_}),
                     planner.temporary(work, {R, C_}), planner.temporary(work, {R, Q}),
                     planner.temporary(work, {R, Q}),  planner.temporary(work, {R, K}),
                     planner.temporary(work, {R, K})};
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    const auto& s = a.saved;
    ctx.ops.rmsnorm_fwd(s[kNorm1], s[kRstd1], x, p.own[norm1_], eps_, ctx.stream);
    project(ctx, p, q_, s[kQ], s[kNorm1]);
    project(ctx, p, k_, s[kK], s[kNorm1]);
    project(ctx, p, v_, s[kV], s[kNorm1]);
    if (qk_norm_) {
      head_norm(ctx, s[kQ], s[kQRaw], s[kQRstd], p.own[q_norm_], H_);
      head_norm(ctx, s[kK], s[kKRaw], s[kKRstd], p.own[k_norm_], G_);
    }
    const Heads h = heads(ctx, s[kQ], s[kK], s[kV]);
    rotate(ctx, h, /*inverse=*/false);
    attend(ctx, queries(ctx, s[kAttn]), s[kLse], h.q, h.k, h.v, dropout_.attention(ctx, attention_));
    project(ctx, p, o_, s[kMiddle], s[kAttn], x);
    ctx.ops.rmsnorm_fwd(s[kNorm2], s[kRstd2], s[kMiddle], p.own[norm2_], eps_, ctx.stream);
    project(ctx, p, gate_, s[kGate], s[kNorm2]);
    project(ctx, p, up_, s[kUp], s[kNorm2]);
    ctx.ops.swiglu_fwd(s[kGated], s[kGate], s[kUp], ctx.stream);
    project(ctx, p, down_, s[kOutput], s[kGated], s[kMiddle]);
  }

  void backward(const PassContext& ctx, RowViews p, RowViews g, TensorView x, TensorView dy, TensorView dx,
                const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& t = a.temporary;
    project_backward(ctx, p, g, down_, t[kDGate], dy, s[kGated]);
    ctx.ops.swiglu_bwd(t[kDGate], t[kDUp], t[kDGate], s[kGate], s[kUp], ctx.stream);
    project_backward(ctx, p, g, gate_, t[kDNorm], t[kDGate], s[kNorm2]);
    project_backward(ctx, p, g, up_, t[kDNorm], t[kDUp], s[kNorm2], t[kDNorm]);
    ctx.ops.rmsnorm_bwd(dx, g.own[norm2_], t[kDNorm], dy, s[kMiddle], p.own[norm2_], s[kRstd2],
                        ctx.stream);  // dx: the gradient of the middle of the block from here on

    project_backward(ctx, p, g, o_, t[kDAttn], dx, s[kAttn]);
    const Heads h = heads(ctx, s[kQ], s[kK], s[kV]), dh = heads(ctx, t[kDQ], t[kDK], t[kDV]);
    ctx.ops.attention_bwd(dh.q, dh.k, dh.v, queries(ctx, t[kDAttn]), h.q, h.k, h.v, queries(ctx, s[kAttn]), s[kLse],
                          dropout_.attention(ctx, attention_), ctx.stream);
    rotate(ctx, dh, /*inverse=*/true);
    TensorView dq = t[kDQ], dk = t[kDK];
    if (qk_norm_) dq = head_norm_backward(ctx, t[kDAttn], dq, g.own[q_norm_], s[kQRaw], s[kQRstd], p.own[q_norm_], H_);
    project_backward(ctx, p, g, q_, t[kDNorm], dq, s[kNorm1]);
    if (qk_norm_) dk = head_norm_backward(ctx, t[kDAttn], dk, g.own[k_norm_], s[kKRaw], s[kKRstd], p.own[k_norm_], G_);
    project_backward(ctx, p, g, k_, t[kDNorm], dk, s[kNorm1], t[kDNorm]);
    project_backward(ctx, p, g, v_, t[kDNorm], t[kDV], s[kNorm1], t[kDNorm]);
    ctx.ops.rmsnorm_bwd(dx, g.own[norm1_], t[kDNorm], dx, x, p.own[norm1_], s[kRstd1], ctx.stream);
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
    kOutput,
    kQRaw,
    kQRstd,
    kKRaw,
    kKRstd  // with head norms
  };
  enum Temporary : size_t { kDGate, kDUp, kDNorm, kDAttn, kDQ, kDK, kDV };

  struct Projection {
    size_t weight = 0;  // row; the bias, if any, is the next one
    bool bias = false;
  };
  struct Heads {
    TensorView q, k, v;
  };

  static void project(const PassContext& ctx, RowViews p, Projection w, TensorView y, TensorView x,
                      TensorView residual = {}) {
    linear_forward(ctx, y, x, p.own[w.weight],
                   {.bias = w.bias ? p.own[w.weight + 1] : TensorView{}, .residual = residual});
  }
  static void project_backward(const PassContext& ctx, RowViews p, RowViews g, Projection w, TensorView dx,
                               TensorView dy, TensorView x, TensorView dx_residual = {}) {
    linear_backward(ctx, dx, g.own[w.weight], w.bias ? g.own[w.weight + 1] : TensorView{}, dy, x, p.own[w.weight],
                    Orientation::OutIn, dx_residual);
  }
  // RMSNorm of every head in place; the raw values are kept for the backward pass.
  void head_norm(const PassContext& ctx, TensorView values, TensorView raw, TensorView rstd, TensorView weight,
                 i64 num_heads) const {
    const TensorView rows = values.reshaped({ctx.B * ctx.T * num_heads, D_});
    ctx.ops.cast(raw, rows, ctx.stream);
    ctx.ops.rmsnorm_fwd(rows, rstd, raw, weight, eps_, ctx.stream);
  }
  // The gradient of the raw heads, in the memory of `out` [at least as many elements].
  TensorView head_norm_backward(const PassContext& ctx, TensorView out, TensorView grad, TensorView dweight,
                                TensorView raw, TensorView rstd, TensorView weight, i64 num_heads) const {
    const i64 R = ctx.B * ctx.T;
    ctx.ops.rmsnorm_bwd(out.reshaped({R * num_heads, D_}), dweight, grad.reshaped({R * num_heads, D_}), {}, raw, weight,
                        rstd, ctx.stream);
    return out.reshaped({R, num_heads * D_});
  }
  TensorView queries(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, H_ * D_, 0);
  }
  Heads heads(const PassContext& ctx, TensorView q, TensorView k, TensorView v) const {
    return {queries(ctx, q), heads_view(k, ctx.B, ctx.T, G_, D_, G_ * D_, 0),
            heads_view(v, ctx.B, ctx.T, G_, D_, G_ * D_, 0)};
  }
  void rotate(const PassContext& ctx, const Heads& h, bool inverse) const {
    ctx.ops.rope(h.q, h.q, ctx.rope_cos, ctx.rope_sin, ctx.positions, inverse, ctx.stream);
    ctx.ops.rope(h.k, h.k, ctx.rope_cos, ctx.rope_sin, ctx.positions, inverse, ctx.stream);
  }

  i64 C_, H_, G_, D_, F_;
  float eps_;
  bool qk_norm_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t norm1_ = 0, norm2_ = 0, q_norm_ = 0, k_norm_ = 0;
  Projection q_, k_, v_, o_, gate_, up_, down_;
};

}  // namespace

Model make_llama(const ModelConfig& c) {
  Model m;
  m.tied = c.tie_embeddings;
  if (m.tied) m.ties = {{"lm_head.weight", "model.embed_tokens.weight"}};
  m.layers.push_back(std::make_unique<TokenEmbedding>(c));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<LlamaBlock>(c, l));
  m.layers.push_back(make_head(NormKind::RmsNorm, "model.norm", "lm_head.weight", c.hidden, c.vocab_size,
                               c.tie_embeddings, c.norm_eps, c.initializer_range));
  return m;
}

}  // namespace ds::model
