// SPDX-License-Identifier: Apache-2.0
// BERT: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018). Post-LayerNorm blocks that see
// the whole sequence, learned positions and segments, biases everywhere, and the head of masked language modelling.

#include <cmath>

#include "base/check.h"
#include "config/parallel.h"
#include "ds/building_blocks.h"
#include "model/models.h"

namespace ds::model {
namespace {

// Rows in Hugging Face's order of parameters, all prefixed by the layer's name.
class BertLayer : public Layer {
 protected:
  BertLayer(const ModelConfig& c, std::string name, const Shard& shard)
      : Layer(std::move(name)), shard_(shard), std_(c.initializer_range) {}

  ParamRow matrix(const std::string& name, i64 out, i64 in) const {
    return {.name = name_ + name + ".weight", .shape = {out, in}, .std = std_, .decay = true};
  }
  ParamRow vector(const std::string& name, i64 size, Init init) const {
    return {.name = name_ + name, .shape = {size}, .init = init};
  }
  void table(const std::string& name, i64 size, i64 width) {
    rows_.push_back(whole_row(matrix(name, size, width), shard_));
  }
  void linear(const std::string& name, i64 in, i64 out) {
    table(name, out, in);
    rows_.push_back(whole_row(vector(name + ".bias", out, Init::Zeros), shard_));
  }
  void column_linear(const std::string& name, i64 in, i64 out) {
    rows_.push_back(cut_row(matrix(name, out, in), shard_, 0));
    rows_.push_back(cut_row(vector(name + ".bias", out, Init::Zeros), shard_, 0));
  }
  void row_linear(const std::string& name, i64 in, i64 out) {
    rows_.push_back(cut_row(matrix(name, out, in), shard_, 1));
    rows_.push_back(equal_row(vector(name + ".bias", out, Init::Zeros), shard_));
  }
  void norm(const std::string& name, i64 size) {
    rows_.push_back(whole_row(vector(name + ".weight", size, Init::Ones), shard_));
    rows_.push_back(whole_row(vector(name + ".bias", size, Init::Zeros), shard_));
  }

  Shard shard_;

 private:
  float std_;
};

class BertEmbedding final : public BertLayer {
 public:
  BertEmbedding(const ModelConfig& c, const Shard& shard)
      : BertLayer(c, "bert.embeddings", shard),
        C_(c.hidden),
        V_(c.vocab_size),
        padding_(c.pad_token_id),
        eps_(c.norm_eps),
        dropout_(c.embd_dropout) {
    table(".position_embeddings", c.max_positions, C_);
    table(".token_type_embeddings", c.token_types, C_);
    norm(".LayerNorm", C_);
  }
  ParamRow words() const { return cut_vocabulary(matrix(".word_embeddings", V_, C_), shard_); }

  std::string_view type() const noexcept override { return kEmbeddingType; }

  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    const i64 S = stream_rows(shard_, pass.mode, pass.rows());
    const DType work = pass.work;
    LayerActs a;
    a.saved = {planner.saved(work, {S, C_}), planner.saved(DType::F32, {S}), planner.saved(DType::F32, {S})};
    if (pass.mode == Mode::Train) {
      a.gradients = {planner.gradient(work, {S, C_}), planner.gradient(DType::F32, {C_}),
                     planner.gradient(DType::F32, {C_})};
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView, const LayerActs& a) const override {
    const auto& s = a.saved;
    embedding_forward(ctx, s[kSum], p.shared, V_);
    ctx.ops.embedding_fwd(s[kSum], p.own[kTypes], stream_part(ctx, ctx.token_types), 0, true, ctx.stream);
    ctx.ops.embedding_fwd(s[kSum], p.own[kPositions], stream_part(ctx, ctx.row_positions), 0, true, ctx.stream);
    ctx.ops.layernorm_fwd(a.output, s[kMean], s[kRstd], s[kSum], p.own[kNormW], p.own[kNormB], eps_, ctx.stream);
    if (ctx.mode == Mode::Train && dropout_ > 0)
      dropout_rows(ctx, a.output, a.output, first_stream_row(ctx), dropout_, dropout_site(ctx, 0, 0));
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const TensorView dsum = a.gradients[kDSum];
    if (dropout_ > 0) {
      dropout_rows(ctx, dsum, dy, first_stream_row(ctx), dropout_, dropout_site(ctx, 0, 0));
      dy = dsum;
    }
    ctx.ops.layernorm_bwd(dsum, a.gradients[kDNormW], a.gradients[kDNormB], dy, {}, s[kSum], p.own[kNormW], s[kMean],
                          s[kRstd], ctx.stream);
  }

  void backward_weight(const PassContext& ctx, RowViews g, TensorView, TensorView, const LayerActs& a) const override {
    const TensorView dsum = a.gradients[kDSum];
    look_up_backward(ctx, g.own[kPositions], dsum, stream_part(ctx, ctx.row_positions));
    look_up_backward(ctx, g.own[kTypes], dsum, stream_part(ctx, ctx.token_types));
    round_gradient(ctx, g.own[kNormW], a.gradients[kDNormW]);
    round_gradient(ctx, g.own[kNormB], a.gradients[kDNormB]);
    embedding_backward(ctx, g.shared, dsum, V_, padding_);
  }

 private:
  enum Row : size_t { kPositions, kTypes, kNormW, kNormB };
  enum Saved : size_t { kSum, kMean, kRstd };
  enum Gradient : size_t { kDSum, kDNormW, kDNormB };
  i64 C_, V_, padding_;
  float eps_, dropout_;
};

class BertBlock final : public BertLayer {
 public:
  BertBlock(const ModelConfig& c, i64 index, const Shard& shard)
      : BertLayer(c, "bert.encoder.layer." + std::to_string(index), shard),
        C_(c.hidden),
        H_(c.heads / shard.tp),
        D_(c.head_dim),
        Q_(H_ * D_),
        F_(c.intermediate / shard.tp),
        eps_(c.norm_eps),
        activation_(c.activation),
        dropout_{.layer = index + 1, .branches = c.resid_dropout} {
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    attention_.causal = false;
    attention_.dropout = c.attn_dropout;
    column_linear(".attention.self.query", C_, C_);
    column_linear(".attention.self.key", C_, C_);
    column_linear(".attention.self.value", C_, C_);
    row_linear(".attention.output.dense", C_, C_);
    norm(".attention.output.LayerNorm", C_);
    column_linear(".intermediate.dense", C_, c.intermediate);
    row_linear(".output.dense", c.intermediate, C_);
    norm(".output.LayerNorm", C_);
    allow_tiles();
  }

  std::string_view type() const noexcept override { return block_type(Family::Bert); }
  bool is_block() const noexcept override { return true; }
  std::vector<size_t> products(Products which) const override {
    switch (which) {
      case Products::Forward:
      case Products::Recompute: return {kQueryW, kKeyW, kValueW, kAttnW, kWideW, kNarrowW};
      case Products::RecomputeAttention: return {kQueryW, kKeyW, kValueW};
      case Products::BackwardInput:
      case Products::BackwardWeight: break;
    }
    return {kNarrowW, kWideW, kAttnW, kQueryW, kKeyW, kValueW};
  }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 B = pass.B, T = pass.T, R = pass.rows(), S = stream_rows(shard_, pass.mode, R);
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, Gradient, Temporary.
    a.saved = {p.attention(work, {R, Q_}),
               p.attention(work, {R, Q_}),
               p.attention(work, {R, Q_}),
               p.attention(work, {R, Q_}),
               p.attention(f32, {B, H_, T}),
               p.saved(work, {S, C_}),
               p.saved(f32, {S}),
               p.saved(f32, {S}),
               p.saved(work, {S, C_}),
               p.saved(work, {R, F_}),
               p.saved(work, {R, F_}),
               p.saved(work, {S, C_}),
               p.saved(f32, {S}),
               p.saved(f32, {S})};
    if (pass.mode == Mode::Train) {
      a.gradients = {p.gradient(work, {S, C_}), p.gradient(work, {R, F_}), p.gradient(work, {S, C_}),
                     p.gradient(work, {R, Q_}), p.gradient(work, {R, Q_}), p.gradient(work, {R, Q_})};
      for (int n = 0; n < 4; ++n) a.gradients.push_back(p.gradient(f32, {C_}));
      for (int n = 0; n < 2 && dropout_.branches > 0; ++n) a.gradients.push_back(p.gradient(work, {S, C_}));
      a.temporary = {p.temporary(work, {R, Q_})};
    }
    plan_attention(a, p, shard_, pass, {H_, H_, D_});
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    attention_forward(ctx, p, x, a);
    mlp_forward(ctx, p, x, a);
  }

  void recompute(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a, Keep keep) const override {
    attention_forward(ctx, p, x, a);
    if (keep == Keep::Input) mlp_forward(ctx, p, x, a);
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dwide = g[kDWide], dsum2 = g[kDSum2], dsum1 = g[kDSum1], dattn = a.temporary[0];
    const auto input = [&](Row w, TensorView out, TensorView d, TensorView onto = {}) {
      linear_backward_input(ctx, out, d, p.matrix(w), Orientation::OutIn, onto);
    };
    ctx.ops.layernorm_bwd(dsum2, g[kDNorm2W], g[kDNorm2B], dy, {}, s[kSum2], p.own[kNorm2W], s[kMean2], s[kRstd2],
                          ctx.stream);
    input(kNarrowW, dwide, all_rows(ctx, dropout_.branch_gradient(ctx, branch(a, kDNarrow), dsum2, 2)));
    ctx.ops.activation_bwd(dwide, dwide, s[kPreact], activation_, ctx.stream);
    input(kWideW, partial_sum(ctx, dsum1), dwide, first_term(ctx, dsum2));
    sum_partials(ctx, dsum1, dsum2);  // the gradient of the middle, then of the first sum
    ctx.ops.layernorm_bwd(dsum1, g[kDNorm1W], g[kDNorm1B], dsum1, {}, s[kSum1], p.own[kNorm1W], s[kMean1], s[kRstd1],
                          ctx.stream);
    input(kAttnW, dattn, all_rows(ctx, dropout_.branch_gradient(ctx, branch(a, kDProj), dsum1, 1)));
    attend_backward(ctx, {heads(ctx, g[kDQ]), heads(ctx, g[kDK]), heads(ctx, g[kDV])}, heads(ctx, dattn),
                    {heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV])}, heads(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    const TensorView sum = partial_sum(ctx, a.input_grad);
    input(kQueryW, sum, g[kDQ], first_term(ctx, dsum1));
    input(kKeyW, sum, g[kDK], sum);
    input(kValueW, sum, g[kDV], sum);
    sum_partials(ctx, a.input_grad, dsum1);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView x, TensorView,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const bool drops = dropout_.branches > 0;
    const auto weight = [&](Row w, TensorView d, TensorView in) {
      linear_backward_weight(ctx, out.matrix(w), out.own[w + 1], d, in, Orientation::OutIn);
    };
    weight(kNarrowW, all_rows(ctx, drops ? branch(a, kDNarrow) : g[kDSum2]), s[kActivated]);
    weight(kWideW, g[kDWide], all_rows(ctx, s[kMiddle]));
    weight(kAttnW, all_rows(ctx, drops ? branch(a, kDProj) : g[kDSum1]), s[kAttn]);
    const TensorView all = all_rows(ctx, x);
    weight(kQueryW, g[kDQ], all);
    weight(kKeyW, g[kDK], all);
    weight(kValueW, g[kDV], all);
    for (const auto& [row, grad] :
         {std::pair{kNorm1W, kDNorm1W}, {kNorm1B, kDNorm1B}, {kNorm2W, kDNorm2W}, {kNorm2B, kDNorm2B}})
      round_gradient(ctx, out.own[row], g[grad]);
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
    kRstd2
  };
  enum Gradient : size_t {
    kDSum2,
    kDWide,
    kDSum1,
    kDQ,
    kDK,
    kDV,
    kDNorm1W,
    kDNorm1B,
    kDNorm2W,
    kDNorm2B,
    kDNarrow,
    kDProj
  };

  void attention_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    const TensorView all = all_rows(ctx, x);
    linear_forward(ctx, s[kQ], all, p.matrix(kQueryW), {.bias = p.own[kQueryB]});
    linear_forward(ctx, s[kK], all, p.matrix(kKeyW), {.bias = p.own[kKeyB]});
    linear_forward(ctx, s[kV], all, p.matrix(kValueW), {.bias = p.own[kValueB]});
    attend(ctx, heads(ctx, s[kAttn]), s[kLse], {heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV])},
           dropout_.attention(ctx, attention_), a);
  }
  // The part after the attention.
  void mlp_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    row_parallel_forward(ctx, s[kSum1], s[kAttn], p.matrix(kAttnW),
                         dropout_.branch(ctx, {.bias = p.own[kAttnB], .residual = x}, 1));
    ctx.ops.layernorm_fwd(s[kMiddle], s[kMean1], s[kRstd1], s[kSum1], p.own[kNorm1W], p.own[kNorm1B], eps_, ctx.stream);
    linear_forward(ctx, s[kActivated], all_rows(ctx, s[kMiddle]), p.matrix(kWideW),
                   {.bias = p.own[kWideB], .activation = activation_, .preact = s[kPreact]});
    row_parallel_forward(ctx, s[kSum2], s[kActivated], p.matrix(kNarrowW),
                         dropout_.branch(ctx, {.bias = p.own[kNarrowB], .residual = s[kMiddle]}, 2));
    ctx.ops.layernorm_fwd(a.output, s[kMean2], s[kRstd2], s[kSum2], p.own[kNorm2W], p.own[kNorm2B], eps_, ctx.stream);
  }
  static TensorView branch(const LayerActs& a, Gradient which) {
    return a.gradients.size() > which ? a.gradients[which] : TensorView{};
  }
  TensorView heads(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, Q_, 0);
  }

  i64 C_, H_, D_, Q_, F_;
  float eps_;
  Activation activation_;
  BlockDropout dropout_;
  AttentionParams attention_;
};

// Logits = LayerNorm(activation(x W + b)) E^T + bias, where E is the word embedding.
class BertHead final : public BertLayer {
 public:
  BertHead(const ModelConfig& c, const Shard& shard)
      : BertLayer(c, "cls.predictions", shard),
        C_(c.hidden),
        V_(c.vocab_size),
        eps_(c.norm_eps),
        activation_(c.activation) {
    rows_.push_back(cut_vocabulary(vector(".bias", V_, Init::Zeros), shard_));
    linear(".transform.dense", C_, C_);
    norm(".transform.LayerNorm", C_);
  }

  std::string_view type() const noexcept override { return kHeadType; }
  bool splits() const noexcept override { return false; }

  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    const i64 S = stream_rows(shard_, pass.mode, pass.rows());
    const DType work = pass.work;
    LayerActs a;
    a.saved = {planner.saved(work, {S, C_}), planner.saved(work, {S, C_}), planner.saved(DType::F32, {S}),
               planner.saved(DType::F32, {S}), planner.saved(work, {S, C_})};
    if (pass.mode == Mode::Train) {
      a.gradients = {planner.gradient(work, {S, C_}), planner.gradient(DType::F32, {rows_[kBias].numel()}),
                     planner.gradient(DType::F32, {C_}), planner.gradient(DType::F32, {C_})};
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    DS_ASSERT(ctx.mode != Mode::Generate);
    const auto& s = a.saved;
    linear_forward(ctx, s[kActivated], x, p.own[kDenseW],
                   {.bias = p.own[kDenseB], .activation = activation_, .preact = s[kPreact]});
    ctx.ops.layernorm_fwd(s[kNormed], s[kMean], s[kRstd], s[kActivated], p.own[kNormW], p.own[kNormB], eps_,
                          ctx.stream);
    if (ctx.mode == Mode::Eval)
      projection_loss(ctx, s[kNormed], {.weight = p.shared, .bias = p.own[kBias], .vocab = V_});
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView, TensorView, const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView d = g[kDDense];
    projection_loss(ctx, s[kNormed],
                    {.weight = p.shared,
                     .bias = p.own[kBias],
                     .dh = d,
                     .dweight = ctx.head_weight_grad,
                     .dbias = g[kDBias],
                     .vocab = V_});
    ctx.ops.layernorm_bwd(d, g[kDNormW], g[kDNormB], d, {}, s[kActivated], p.own[kNormW], s[kMean], s[kRstd],
                          ctx.stream);
    ctx.ops.activation_bwd(d, d, s[kPreact], activation_, ctx.stream);
    linear_backward_input(ctx, a.input_grad, d, p.own[kDenseW], Orientation::OutIn);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView x, TensorView,
                       const LayerActs& a) const override {
    const auto& g = a.gradients;
    linear_backward_weight(ctx, out.own[kDenseW], out.own[kDenseB], g[kDDense], x, Orientation::OutIn);
    round_gradient(ctx, out.own[kBias], g[kDBias]);
    round_gradient(ctx, out.own[kNormW], g[kDNormW]);
    round_gradient(ctx, out.own[kNormB], g[kDNormB]);
    round_gradient(ctx, out.shared, ctx.head_weight_grad);
  }

  void logits(const PassContext& ctx, RowViews p, const LayerActs& a, TensorView out) const override {
    linear_forward(ctx, out, a.saved[kNormed], p.shared, {.bias = p.own[kBias]});
  }

 private:
  enum Row : size_t { kBias, kDenseW, kDenseB, kNormW, kNormB };
  enum Saved : size_t { kPreact, kActivated, kMean, kRstd, kNormed };
  enum Gradient : size_t { kDDense, kDBias, kDNormW, kDNormB };
  i64 C_, V_;
  float eps_;
  Activation activation_;
};

}  // namespace

Model make_bert(const ModelConfig& c, const Shard& shard) {
  Model m;
  auto embedding = std::make_unique<BertEmbedding>(c, shard);
  m.shared = {embedding->words()};
  m.layers.push_back(std::move(embedding));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<BertBlock>(c, l, shard));
  m.layers.push_back(std::make_unique<BertHead>(c, shard));
  m.ties = {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
            {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
  return m;
}

}  // namespace ds::model
