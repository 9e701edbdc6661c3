// SPDX-License-Identifier: Apache-2.0
// GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Pre-LayerNorm blocks, learned
// positions, biases everywhere, weights stored [in,out] as Hugging Face's Conv1D.

#include <cmath>

#include "model/building_blocks.h"
#include "model/models.h"

namespace ds::model {
namespace {

class Gpt2Embedding final : public Layer {
 public:
  explicit Gpt2Embedding(const ModelConfig& c, const std::string& prefix)
      : Layer(prefix + "wte"), C_(c.hidden), tied_(c.tie_embeddings), dropout_(c.embd_dropout) {
    rows_.push_back(
        {.name = prefix + "wte.weight", .shape = {c.vocab_size, C_}, .std = c.initializer_range, .decay = true});
    rows_.push_back(
        {.name = prefix + "wpe.weight", .shape = {c.max_positions, C_}, .std = c.initializer_range, .decay = true});
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    LayerActs a;
    a.output = planner.saved(work, {B * T, C_});
    if (mode == Mode::Train && dropout_ > 0) a.temporary = {planner.temporary(work, {B * T, C_})};
    return a;
  }

  void forward(const PassContext& ctx, RowViews params, TensorView, const LayerActs& acts) const override {
    ctx.ops.embedding_fwd(acts.output, params.own[0], ctx.ids, false, ctx.stream);
    ctx.ops.embedding_fwd(acts.output, params.own[1], ctx.row_positions, true, ctx.stream);
    if (ctx.mode == Mode::Train && dropout_ > 0) {
      ctx.ops.dropout(acts.output, acts.output, dropout_, dropout_site(ctx, 0, 0), 0, ctx.stream);
    }
  }

  void backward(const PassContext& ctx, RowViews, RowViews grads, TensorView, TensorView dy, TensorView,
                const LayerActs& acts) const override {
    if (dropout_ > 0) {
      ctx.ops.dropout(acts.temporary[0], dy, dropout_, dropout_site(ctx, 0, 0), 0, ctx.stream);
      dy = acts.temporary[0];
    }
    if (tied_) {  // both uses of the matrix add up in fp32 and are rounded once
      ctx.ops.embedding_bwd(ctx.head_weight_grad, dy, ctx.ids, true, ctx.stream);
      ctx.ops.cast(grads.own[0], ctx.head_weight_grad, ctx.stream);
    } else {
      ctx.ops.embedding_bwd(grads.own[0], dy, ctx.ids, false, ctx.stream);
    }
    ctx.ops.embedding_bwd(grads.own[1], dy, ctx.row_positions, false, ctx.stream);
  }

 private:
  i64 C_;
  bool tied_;
  float dropout_;
};

class Gpt2Block final : public Layer {
 public:
  Gpt2Block(const ModelConfig& c, const std::string& prefix, i64 index)
      : Layer(prefix + "h." + std::to_string(index)),
        C_(c.hidden),
        H_(c.heads),
        D_(c.head_dim),
        F_(c.intermediate),
        eps_(c.norm_eps),
        activation_(c.activation),
        dropout_{.layer = index + 1, .branches = c.resid_dropout} {
    attention_.scale = c.scale_attn_weights ? 1.0f / std::sqrt(static_cast<float>(D_)) : 1.0f;
    if (c.scale_attn_by_inverse_layer_idx) attention_.scale /= static_cast<float>(index + 1);
    attention_.dropout = c.attn_dropout;
    const float std = c.initializer_range;
    const float projection_std = std / std::sqrt(2.0f * static_cast<float>(c.layers));
    const auto norm = [&](const char* n) {
      rows_.push_back({.name = name_ + n + ".weight", .shape = {C_}, .init = Init::Ones});
      rows_.push_back({.name = name_ + n + ".bias", .shape = {C_}, .init = Init::Zeros});
    };
    const auto conv1d = [&](const char* n, i64 in, i64 out, float s) {
      rows_.push_back({.name = name_ + n + ".weight", .shape = {in, out}, .std = s, .decay = true});
      rows_.push_back({.name = name_ + n + ".bias", .shape = {out}, .init = Init::Zeros});
    };
    norm(".ln_1");
    conv1d(".attn.c_attn", C_, 3 * C_, std);
    conv1d(".attn.c_proj", C_, C_, projection_std);
    norm(".ln_2");
    conv1d(".mlp.c_fc", C_, F_, std);
    conv1d(".mlp.c_proj", F_, C_, projection_std);
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    const i64 R = B * T;
    LayerActs a;
    // In the order of enum Saved, then of enum Temporary.
    a.saved = {planner.saved(work, {R, C_}),     planner.saved(DType::F32, {R}), planner.saved(DType::F32, {R}),
               planner.saved(work, {R, 3 * C_}), planner.saved(work, {R, C_}),   planner.saved(DType::F32, {B, H_, T}),
               planner.saved(work, {R, C_}),     planner.saved(work, {R, C_}),   planner.saved(DType::F32, {R}),
               planner.saved(DType::F32, {R}),   planner.saved(work, {R, F_}),   planner.saved(work, {R, F_}),
               planner.saved(work, {R, C_})};
    a.output = a.saved[kOutput];
    if (mode == Mode::Train) {
      a.temporary = {planner.temporary(work, {R, F_}), planner.temporary(work, {R, 3 * C_}),
                     planner.temporary(work, {R, C_})};
      if (dropout_.branches > 0) a.temporary.push_back(planner.temporary(work, {R, C_}));
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    const auto& s = a.saved;
    ctx.ops.layernorm_fwd(s[kNorm1], s[kMean1], s[kRstd1], x, p.own[kLn1W], p.own[kLn1B], eps_, ctx.stream);
    linear_forward(ctx, s[kQkv], s[kNorm1], p.own[kAttnW], {.orientation = Orientation::InOut, .bias = p.own[kAttnB]});
    const Heads h = heads(ctx, s[kQkv]);
    attend(ctx, heads_view(s[kAttn], ctx.B, ctx.T, H_, D_, C_, 0), s[kLse], h.q, h.k, h.v,
           dropout_.attention(ctx, attention_));
    dropout_.add_branch(ctx, s[kMiddle], s[kAttn], p.own[kProjW],
                        {.orientation = Orientation::InOut, .bias = p.own[kProjB], .residual = x}, 1);
    ctx.ops.layernorm_fwd(s[kNorm2], s[kMean2], s[kRstd2], s[kMiddle], p.own[kLn2W], p.own[kLn2B], eps_, ctx.stream);
    linear_forward(
        ctx, s[kActivated], s[kNorm2], p.own[kFcW],
        {.orientation = Orientation::InOut, .bias = p.own[kFcB], .activation = activation_, .preact = s[kPreact]});
    dropout_.add_branch(ctx, s[kOutput], s[kActivated], p.own[kMlpProjW],
                        {.orientation = Orientation::InOut, .bias = p.own[kMlpProjB], .residual = s[kMiddle]}, 2);
  }

  void backward(const PassContext& ctx, RowViews p, RowViews g, TensorView x, TensorView dy, TensorView dx,
                const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto conv = Orientation::InOut;
    const TensorView dwide = a.temporary[kWide], dqkv = a.temporary[kDQkv], dnarrow = a.temporary[kNarrow];
    const TensorView branch = dropout_.branches > 0 ? a.temporary[kBranch] : TensorView{};
    const TensorView dbranch = dropout_.branch_gradient(ctx, branch, dy, 2);
    linear_backward(ctx, dwide, g.own[kMlpProjW], g.own[kMlpProjB], dbranch, s[kActivated], p.own[kMlpProjW], conv);
    ctx.ops.activation_bwd(dwide, dwide, s[kPreact], activation_, ctx.stream);
    linear_backward(ctx, dnarrow, g.own[kFcW], g.own[kFcB], dwide, s[kNorm2], p.own[kFcW], conv);
    ctx.ops.layernorm_bwd(dx, g.own[kLn2W], g.own[kLn2B], dnarrow, dy, s[kMiddle], p.own[kLn2W], s[kMean2], s[kRstd2],
                          ctx.stream);  // dx: the gradient of the middle of the block from here on

    const TensorView dattn_branch = dropout_.branch_gradient(ctx, branch, dx, 1);
    linear_backward(ctx, dnarrow, g.own[kProjW], g.own[kProjB], dattn_branch, s[kAttn], p.own[kProjW], conv);
    const Heads h = heads(ctx, s[kQkv]), dh = heads(ctx, dqkv);
    const auto flat = [&](TensorView v) { return heads_view(v, ctx.B, ctx.T, H_, D_, C_, 0); };
    ctx.ops.attention_bwd(dh.q, dh.k, dh.v, flat(dnarrow), h.q, h.k, h.v, flat(s[kAttn]), s[kLse],
                          dropout_.attention(ctx, attention_), ctx.stream);
    linear_backward(ctx, dnarrow, g.own[kAttnW], g.own[kAttnB], dqkv, s[kNorm1], p.own[kAttnW], conv);
    ctx.ops.layernorm_bwd(dx, g.own[kLn1W], g.own[kLn1B], dnarrow, dx, x, p.own[kLn1W], s[kMean1], s[kRstd1],
                          ctx.stream);
  }

 private:
  enum Row : size_t { kLn1W, kLn1B, kAttnW, kAttnB, kProjW, kProjB, kLn2W, kLn2B, kFcW, kFcB, kMlpProjW, kMlpProjB };
  enum Saved : size_t {
    kNorm1,
    kMean1,
    kRstd1,
    kQkv,
    kAttn,
    kLse,
    kMiddle,
    kNorm2,
    kMean2,
    kRstd2,
    kPreact,
    kActivated,
    kOutput
  };
  enum Temporary : size_t { kWide, kDQkv, kNarrow, kBranch };

  struct Heads {
    TensorView q, k, v;
  };
  Heads heads(const PassContext& ctx, TensorView qkv) const {
    return {heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * C_, 0), heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * C_, C_),
            heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * C_, 2 * C_)};
  }

  i64 C_, H_, D_, F_;
  float eps_;
  Activation activation_;
  BlockDropout dropout_;
  AttentionParams attention_;
};

}  // namespace

Model make_gpt2(const ModelConfig& c) {
  const std::string prefix = "transformer.";
  Model m;
  m.tied = c.tie_embeddings;
  if (m.tied) m.ties = {{"lm_head.weight", prefix + "wte.weight"}};
  m.layers.push_back(std::make_unique<Gpt2Embedding>(c, prefix));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<Gpt2Block>(c, prefix, l));
  m.layers.push_back(make_head(NormKind::LayerNorm, prefix + "ln_f", "lm_head.weight", c.hidden, c.vocab_size,
                               c.tie_embeddings, c.norm_eps, c.initializer_range));
  return m;
}

}  // namespace ds::model
