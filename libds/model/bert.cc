// SPDX-License-Identifier: Apache-2.0
// BERT: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018). Post-LayerNorm blocks that see
// the whole sequence, learned positions and segments, biases everywhere, and the head of masked language modelling.

#include <cmath>

#include "model/building_blocks.h"
#include "model/models.h"

namespace ds::model {
namespace {

// Rows of a layer in Hugging Face's order of parameters, all under the layer's name.
class BertLayer : public Layer {
 protected:
  BertLayer(const ModelConfig& c, std::string name) : Layer(std::move(name)), std_(c.initializer_range) {}

  void table(const char* name, i64 size, i64 width) {
    rows_.push_back({.name = name_ + name + ".weight", .shape = {size, width}, .std = std_, .decay = true});
  }
  void linear(const char* name, i64 in, i64 out) {
    table(name, out, in);
    rows_.push_back({.name = name_ + name + ".bias", .shape = {out}, .init = Init::Zeros});
  }
  void norm(const char* name, i64 size) {
    rows_.push_back({.name = name_ + name + ".weight", .shape = {size}, .init = Init::Ones});
    rows_.push_back({.name = name_ + name + ".bias", .shape = {size}, .init = Init::Zeros});
  }

 private:
  float std_;
};

class BertEmbedding final : public BertLayer {
 public:
  explicit BertEmbedding(const ModelConfig& c)
      : BertLayer(c, "bert.embeddings"), C_(c.hidden), eps_(c.norm_eps), dropout_(c.embd_dropout) {
    table(".word_embeddings", c.vocab_size, C_);
    table(".position_embeddings", c.max_positions, C_);
    table(".token_type_embeddings", c.token_types, C_);
    norm(".LayerNorm", C_);
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode) const override {
    const i64 R = B * T;
    LayerActs a;
    a.saved = {planner.saved(work, {R, C_}), planner.saved(DType::F32, {R}), planner.saved(DType::F32, {R}),
               planner.saved(work, {R, C_})};
    a.output = a.saved[kOutput];
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView, const LayerActs& a) const override {
    const auto& s = a.saved;
    ctx.ops.embedding_fwd(s[kSum], p.own[kWords], ctx.ids, false, ctx.stream);
    ctx.ops.embedding_fwd(s[kSum], p.own[kTypes], ctx.token_types, true, ctx.stream);
    ctx.ops.embedding_fwd(s[kSum], p.own[kPositions], ctx.row_positions, true, ctx.stream);
    ctx.ops.layernorm_fwd(s[kOutput], s[kMean], s[kRstd], s[kSum], p.own[kNormW], p.own[kNormB], eps_, ctx.stream);
    if (ctx.mode == Mode::Train && dropout_ > 0)
      ctx.ops.dropout(s[kOutput], s[kOutput], dropout_, dropout_site(ctx, 0, 0), 0, ctx.stream);
  }

  void backward(const PassContext& ctx, RowViews p, RowViews g, TensorView, TensorView dy, TensorView dx,
                const LayerActs& a) const override {
    const auto& s = a.saved;
    if (dropout_ > 0) {
      ctx.ops.dropout(dx, dy, dropout_, dropout_site(ctx, 0, 0), 0, ctx.stream);
      dy = dx;
    }
    ctx.ops.layernorm_bwd(dx, g.own[kNormW], g.own[kNormB], dy, {}, s[kSum], p.own[kNormW], s[kMean], s[kRstd],
                          ctx.stream);
    ctx.ops.embedding_bwd(ctx.head_weight_grad, dx, ctx.ids, true, ctx.stream);  // both uses in fp32, rounded once
    ctx.ops.cast(g.own[kWords], ctx.head_weight_grad, ctx.stream);
    ctx.ops.embedding_bwd(g.own[kPositions], dx, ctx.row_positions, false, ctx.stream);
    ctx.ops.embedding_bwd(g.own[kTypes], dx, ctx.token_types, false, ctx.stream);
  }

 private:
  enum Row : size_t { kWords, kPositions, kTypes, kNormW, kNormB };
  enum Saved : size_t { kSum, kMean, kRstd, kOutput };
  i64 C_;
  float eps_, dropout_;
};

class BertBlock final : public BertLayer {
 public:
  BertBlock(const ModelConfig& c, i64 index)
      : BertLayer(c, "bert.encoder.layer." + std::to_string(index)),
        C_(c.hidden),
        H_(c.heads),
        D_(c.head_dim),
        F_(c.intermediate),
        eps_(c.norm_eps),
        activation_(c.activation),
        dropout_{.layer = index + 1, .branches = c.resid_dropout} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.causal = false;
    attention_.dropout = c.attn_dropout;
    linear(".attention.self.query", C_, C_);
    linear(".attention.self.key", C_, C_);
    linear(".attention.self.value", C_, C_);
    linear(".attention.output.dense", C_, C_);
    norm(".attention.output.LayerNorm", C_);
    linear(".intermediate.dense", C_, F_);
    linear(".output.dense", F_, C_);
    norm(".output.LayerNorm", C_);
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    const i64 R = B * T;
    const auto f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, then of enum Temporary.
    a.saved = {planner.saved(work, {R, C_}), planner.saved(work, {R, C_}),   planner.saved(work, {R, C_}),
               planner.saved(work, {R, C_}), planner.saved(f32, {B, H_, T}), planner.saved(work, {R, C_}),
               planner.saved(f32, {R}),      planner.saved(f32, {R}),        planner.saved(work, {R, C_}),
               planner.saved(work, {R, F_}), planner.saved(work, {R, F_}),   planner.saved(work, {R, C_}),
               planner.saved(f32, {R}),      planner.saved(f32, {R}),        planner.saved(work, {R, C_})};
    a.output = a.saved[kOutput];
    if (mode == Mode::Train) {
      a.temporary = {planner.temporary(work, {R, F_}), planner.temporary(work, {R, C_}),
                     planner.temporary(work, {R, C_}), planner.temporary(work, {R, C_}),
                     planner.temporary(work, {R, C_})};
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    const auto& s = a.saved;
    linear_forward(ctx, s[kQ], x, p.own[kQueryW], {.bias = p.own[kQueryB]});
    linear_forward(ctx, s[kK], x, p.own[kKeyW], {.bias = p.own[kKeyB]});
    linear_forward(ctx, s[kV], x, p.own[kValueW], {.bias = p.own[kValueB]});
    attend(ctx, heads(ctx, s[kAttn]), s[kLse], heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV]),
           dropout_.attention(ctx, attention_));
    dropout_.add_branch(ctx, s[kSum1], s[kAttn], p.own[kAttnW], {.bias = p.own[kAttnB], .residual = x}, 1);
    ctx.ops.layernorm_fwd(s[kMiddle], s[kMean1], s[kRstd1], s[kSum1], p.own[kNorm1W], p.own[kNorm1B], eps_, ctx.stream);
    linear_forward(ctx, s[kActivated], s[kMiddle], p.own[kWideW],
                   {.bias = p.own[kWideB], .activation = activation_, .preact = s[kPreact]});
    dropout_.add_branch(ctx, s[kSum2], s[kActivated], p.own[kNarrowW],
                        {.bias = p.own[kNarrowB], .residual = s[kMiddle]}, 2);
    ctx.ops.layernorm_fwd(s[kOutput], s[kMean2], s[kRstd2], s[kSum2], p.own[kNorm2W], p.own[kNorm2B], eps_, ctx.stream);
  }

  void backward(const PassContext& ctx, RowViews p, RowViews g, TensorView x, TensorView dy, TensorView dx,
                const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& t = a.temporary;
    const auto out_in = Orientation::OutIn;
    // dx is the gradient of the second sum, then of the middle, of the first sum, and of x.
    ctx.ops.layernorm_bwd(dx, g.own[kNorm2W], g.own[kNorm2B], dy, {}, s[kSum2], p.own[kNorm2W], s[kMean2], s[kRstd2],
                          ctx.stream);
    const TensorView dwide = t[kDWide];
    linear_backward(ctx, dwide, g.own[kNarrowW], g.own[kNarrowB], dropout_.branch_gradient(ctx, t[kDBranch], dx, 2),
                    s[kActivated], p.own[kNarrowW], out_in);
    ctx.ops.activation_bwd(dwide, dwide, s[kPreact], activation_, ctx.stream);
    linear_backward(ctx, dx, g.own[kWideW], g.own[kWideB], dwide, s[kMiddle], p.own[kWideW], out_in, dx);
    ctx.ops.layernorm_bwd(dx, g.own[kNorm1W], g.own[kNorm1B], dx, {}, s[kSum1], p.own[kNorm1W], s[kMean1], s[kRstd1],
                          ctx.stream);
    const TensorView dattn = t[kDBranch];
    linear_backward(ctx, dattn, g.own[kAttnW], g.own[kAttnB], dropout_.branch_gradient(ctx, t[kDQ], dx, 1), s[kAttn],
                    p.own[kAttnW], out_in);
    ctx.ops.attention_bwd(heads(ctx, t[kDQ]), heads(ctx, t[kDK]), heads(ctx, t[kDV]), heads(ctx, dattn),
                          heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV]), heads(ctx, s[kAttn]), s[kLse],
                          dropout_.attention(ctx, attention_), ctx.stream);
    linear_backward(ctx, dx, g.own[kQueryW], g.own[kQueryB], t[kDQ], x, p.own[kQueryW], out_in, dx);
    linear_backward(ctx, dx, g.own[kKeyW], g.own[kKeyB], t[kDK], x, p.own[kKeyW], out_in, dx);
    linear_backward(ctx, dx, g.own[kValueW], g.own[kValueB], t[kDV], x, p.own[kValueW], out_in, dx);
  }

 private:
  enum Row : size_t {
    kQueryW,
    kQueryB,
    kKeyW,
    kKeyB,
    kValueW,
    kValueB,
    kAttnW,
    kAttnB,
    kNorm1W,
    kNorm1B,
    kWideW,
    kWideB,
    kNarrowW,
    kNarrowB,
    kNorm2W,
    kNorm2B
  };
  enum Saved : size_t {
    kQ,
    kK,
    kV,
    kAttn,
    kLse,
    kSum1,
    kMean1,
    kRstd1,
    kMiddle,
    kPreact,
    kActivated,
    kSum2,
    kMean2,
    kRstd2,
    kOutput
  };
  enum Temporary : size_t { kDWide, kDBranch, kDQ, kDK, kDV };

  TensorView heads(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, C_, 0);
  }

  i64 C_, H_, D_, F_;
  float eps_;
  Activation activation_;
  BlockDropout dropout_;
  AttentionParams attention_;
};

// Logits = LayerNorm(activation(x W + b)) E^T + bias, E the word embedding.
class BertHead final : public BertLayer {
 public:
  explicit BertHead(const ModelConfig& c)
      : BertLayer(c, "cls.predictions"), C_(c.hidden), V_(c.vocab_size), eps_(c.norm_eps), activation_(c.activation) {
    rows_.push_back({.name = name_ + ".bias", .shape = {V_}, .init = Init::Zeros});
    linear(".transform.dense", C_, C_);
    norm(".transform.LayerNorm", C_);
  }

  LayerActs plan(ActivationPlanner& planner, DType work, i64 B, i64 T, Mode mode) const override {
    const i64 R = B * T;
    LayerActs a;
    a.saved = {planner.saved(work, {R, C_}), planner.saved(work, {R, C_}), planner.saved(DType::F32, {R}),
               planner.saved(DType::F32, {R}), planner.saved(work, {R, C_})};
    if (mode == Mode::Train) {
      a.saved.push_back(planner.saved(work, {R, C_}));
      a.saved.push_back(planner.saved(DType::F32, {V_}));
    }
    a.output = a.saved[kNormed];
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    DS_ASSERT(ctx.mode != Mode::Generate);
    const auto& s = a.saved;
    linear_forward(ctx, s[kActivated], x, p.own[kDenseW],
                   {.bias = p.own[kDenseB], .activation = activation_, .preact = s[kPreact]});
    ctx.ops.layernorm_fwd(s[kNormed], s[kMean], s[kRstd], s[kActivated], p.own[kNormW], p.own[kNormB], eps_,
                          ctx.stream);
    // The backward pass of the projection happens here, chunk by chunk, while the logits of a chunk exist.
    const bool train = ctx.mode == Mode::Train;
    const TensorView none{};
    ctx.ops.linear_cross_entropy(ctx.losses, train ? s[kNormedGrad] : none, train ? ctx.head_weight_grad : none,
                                 train ? s[kBiasGrad] : none, s[kNormed], p.tied, p.own[kBias], ctx.targets, ctx.logits,
                                 {.grad_scale = ctx.loss_grad, .chunk_tokens = ctx.logits.dim(0)}, ctx.stream);
  }

  void backward(const PassContext& ctx, RowViews p, RowViews g, TensorView x, TensorView, TensorView dx,
                const LayerActs& a) const override {
    const auto& s = a.saved;
    const TensorView d = s[kNormedGrad];
    ctx.ops.cast(g.own[kBias], s[kBiasGrad], ctx.stream);
    ctx.ops.layernorm_bwd(d, g.own[kNormW], g.own[kNormB], d, {}, s[kActivated], p.own[kNormW], s[kMean], s[kRstd],
                          ctx.stream);
    ctx.ops.activation_bwd(d, d, s[kPreact], activation_, ctx.stream);
    linear_backward(ctx, dx, g.own[kDenseW], g.own[kDenseB], d, x, p.own[kDenseW], Orientation::OutIn);
  }

  void logits(const PassContext& ctx, RowViews p, const LayerActs& a, TensorView out) const override {
    linear_forward(ctx, out, a.saved[kNormed], p.tied, {.bias = p.own[kBias]});
  }

 private:
  enum Row : size_t { kBias, kDenseW, kDenseB, kNormW, kNormB };
  enum Saved : size_t { kPreact, kActivated, kMean, kRstd, kNormed, kNormedGrad, kBiasGrad };
  i64 C_, V_;
  float eps_;
  Activation activation_;
};

}  // namespace

Model make_bert(const ModelConfig& c) {
  Model m;
  m.layers.push_back(std::make_unique<BertEmbedding>(c));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<BertBlock>(c, l));
  m.layers.push_back(std::make_unique<BertHead>(c));
  m.tied = true;
  m.ties = {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
            {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
  return m;
}

}  // namespace ds::model
