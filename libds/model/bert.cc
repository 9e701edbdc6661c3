// SPDX-License-Identifier: Apache-2.0
// BERT: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018). Post-LayerNorm blocks that see
// the whole sequence, learned positions and segments, biases everywhere, and the head of masked language modelling.

#include <array>
#include <cmath>

#include "base/check.h"
#include "config/parallel.h"
#include "ds/linear.h"
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
  LinearSpec spec(const std::string& name, i64 in, i64 out, Split split) const {
    return {.name = name_ + name, .in = in, .out = out, .split = split, .std = std_};
  }
  Linear linear(const std::string& name, i64 in, i64 out, Split split) {
    return {rows_, spec(name, in, out, split), shard_};
  }
  // Returns the row of the weight; the bias follows.
  size_t norm(const std::string& name, i64 size) {
    const size_t weight = add(whole_row(vector(name + ".weight", size, Init::Ones), shard_));
    add(whole_row(vector(name + ".bias", size, Init::Zeros), shard_));
    return weight;
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
  bool adds_gradients() const noexcept override { return true; }

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
    const auto column = [&](const char* name) { return spec(name, C_, C_, Split::Column); };
    qkv_ = LinearGroup(
        rows_,
        std::array{column(".attention.self.query"), column(".attention.self.key"), column(".attention.self.value")},
        shard, c.joined_products);
    attn_ = linear(".attention.output.dense", C_, C_, Split::Row);
    norm1_ = norm(".attention.output.LayerNorm", C_);
    wide_ = linear(".intermediate.dense", C_, c.intermediate, Split::Column);
    narrow_ = linear(".output.dense", c.intermediate, C_, Split::Row);
    norm2_ = norm(".output.LayerNorm", C_);
    allow_tiles();
  }

  std::string_view type() const noexcept override { return block_type(Family::Bert); }
  bool adds_gradients() const noexcept override { return true; }
  bool is_block() const noexcept override { return true; }
  std::vector<Linear*> linears() override { return {&qkv_[0], &qkv_[1], &qkv_[2], &attn_, &wide_, &narrow_}; }
  std::vector<size_t> products(Products which) const override {
    const size_t query = qkv_[0].weight(), key = qkv_[1].weight(), value = qkv_[2].weight(), attn = attn_.weight(),
                 wide = wide_.weight(), narrow = narrow_.weight();
    switch (which) {
      case Products::Forward:
      case Products::Recompute: return {query, key, value, attn, wide, narrow};
      case Products::RecomputeAttention: return {query, key, value};
      case Products::BackwardInput:
      case Products::BackwardWeight: break;
    }
    return {narrow, wide, attn, query, key, value};
  }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 B = pass.B, T = pass.T, R = pass.rows(), S = stream_rows(shard_, pass.mode, R);
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    const auto add = [](std::vector<TensorView>& to, std::initializer_list<TensorView> views) {
      to.insert(to.end(), views);
    };
    // In the order of enum Saved, Gradient, Temporary.
    qkv_.add_outputs(a.saved, [&](i64 columns) { return p.attention(work, {R, columns}); });
    add(a.saved, {p.attention(work, {R, Q_}), p.attention(f32, {B, H_, T}), p.saved(work, {S, C_}), p.saved(f32, {S}),
                  p.saved(f32, {S}), p.saved(work, {S, C_}), p.saved(work, {R, F_}), p.saved(work, {R, F_}),
                  p.saved(work, {S, C_}), p.saved(f32, {S}), p.saved(f32, {S})});
    if (pass.mode == Mode::Train) {
      a.gradients = {p.gradient(work, {S, C_}), p.gradient(work, {R, F_}), p.gradient(work, {S, C_})};
      qkv_.add_outputs(a.gradients, [&](i64 columns) { return p.gradient(work, {R, columns}); });
      for (int n = 0; n < 4; ++n) a.gradients.push_back(p.gradient(f32, {C_}));
      for (int n = 0; n < 2 && dropout_.branches > 0; ++n) a.gradients.push_back(p.gradient(work, {S, C_}));
      a.temporary = {p.temporary(work, {R, Q_})};
    }
    plan_attention(a, p, shard_, pass, {H_, H_, D_, D_});
    qkv_.plan(a, p, work, R, pass.mode, /*attention=*/true);
    for (const Linear* linear : {&attn_, &wide_, &narrow_}) linear->plan(a, p, work, R, pass.mode);
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
    const auto input = [&](const Linear& w, TensorView out, TensorView d, TensorView onto = {}) {
      w.backward_input(ctx, p, a, out, d, onto);
    };
    ctx.ops.layernorm_bwd(dsum2, g[kDNorm2W], g[kDNorm2B], dy, {}, s[kSum2], p.own[norm2_], s[kMean2], s[kRstd2],
                          ctx.stream);
    input(narrow_, dwide, all_rows(ctx, dropout_.branch_gradient(ctx, branch(a, kDNarrow), dsum2, 2)));
    ctx.ops.activation_bwd(dwide, dwide, s[kPreact], activation_, ctx.stream);
    input(wide_, partial_sum(ctx, dsum1), dwide, first_term(ctx, dsum2));
    sum_partials(ctx, dsum1, dsum2);  // the gradient of the middle, then of the first sum
    ctx.ops.layernorm_bwd(dsum1, g[kDNorm1W], g[kDNorm1B], dsum1, {}, s[kSum1], p.own[norm1_], s[kMean1], s[kRstd1],
                          ctx.stream);
    input(attn_, dattn, all_rows(ctx, dropout_.branch_gradient(ctx, branch(a, kDProj), dsum1, 1)));
    attend_backward(ctx, {heads(ctx, g[kDQ]), heads(ctx, g[kDK]), heads(ctx, g[kDV])}, heads(ctx, dattn),
                    {heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV])}, heads(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    const TensorView sum = partial_sum(ctx, a.input_grad);
    qkv_.backward_input(ctx, p, a, sum, std::span(g).subspan(kDQ), first_term(ctx, dsum1));
    sum_partials(ctx, a.input_grad, dsum1);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView x, TensorView,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const bool drops = dropout_.branches > 0;
    const auto weight = [&](const Linear& w, TensorView d, TensorView in) { w.backward_weight(ctx, out, a, d, in); };
    weight(narrow_, all_rows(ctx, drops ? branch(a, kDNarrow) : g[kDSum2]), s[kActivated]);
    weight(wide_, g[kDWide], all_rows(ctx, s[kMiddle]));
    weight(attn_, all_rows(ctx, drops ? branch(a, kDProj) : g[kDSum1]), s[kAttn]);
    qkv_.backward_weight(ctx, out, a, std::span(g).subspan(kDQ), all_rows(ctx, x));
    for (const auto& [row, grad] :
         {std::pair{norm1_, kDNorm1W}, {norm1_ + 1, kDNorm1B}, {norm2_, kDNorm2W}, {norm2_ + 1, kDNorm2B}})
      round_gradient(ctx, out.own[row], g[grad]);
  }

 private:
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
    qkv_.forward(ctx, p, a, std::span(s).subspan(kQ), all_rows(ctx, x));
    attend(ctx, heads(ctx, s[kAttn]), s[kLse], {heads(ctx, s[kQ]), heads(ctx, s[kK]), heads(ctx, s[kV])},
           dropout_.attention(ctx, attention_), a);
  }
  // The part after the attention.
  void mlp_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    attn_.forward(ctx, p, a, s[kSum1], s[kAttn], dropout_.branch(ctx, x, 1));
    ctx.ops.layernorm_fwd(s[kMiddle], s[kMean1], s[kRstd1], s[kSum1], p.own[norm1_], p.own[norm1_ + 1], eps_,
                          ctx.stream);
    wide_.forward(ctx, p, a, s[kActivated], all_rows(ctx, s[kMiddle]),
                  {.activation = activation_, .preact = s[kPreact]});
    narrow_.forward(ctx, p, a, s[kSum2], s[kActivated], dropout_.branch(ctx, s[kMiddle], 2));
    ctx.ops.layernorm_fwd(a.output, s[kMean2], s[kRstd2], s[kSum2], p.own[norm2_], p.own[norm2_ + 1], eps_, ctx.stream);
  }
  static TensorView branch(const LayerActs& a, Gradient which) {
    return a.gradients.size() > which ? a.gradients[which] : TensorView{};
  }
  TensorView heads(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, rows.stride[0], 0);
  }

  i64 C_, H_, D_, Q_, F_;
  float eps_;
  Activation activation_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t norm1_ = 0, norm2_ = 0;
  LinearGroup qkv_;
  Linear attn_, wide_, narrow_;
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
    bias_ = add(cut_vocabulary(vector(".bias", V_, Init::Zeros), shard_));
    dense_ = linear(".transform.dense", C_, C_, Split::Whole);
    norm_ = norm(".transform.LayerNorm", C_);
  }

  std::string_view type() const noexcept override { return kHeadType; }
  bool adds_gradients() const noexcept override { return true; }
  bool splits() const noexcept override { return false; }
  std::vector<Linear*> linears() override { return {&dense_}; }

  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    const i64 S = stream_rows(shard_, pass.mode, pass.rows());
    const DType work = pass.work;
    LayerActs a;
    a.saved = {planner.saved(work, {S, C_}), planner.saved(work, {S, C_}), planner.saved(DType::F32, {S}),
               planner.saved(DType::F32, {S}), planner.saved(work, {S, C_})};
    if (pass.mode == Mode::Train) {
      a.gradients = {planner.gradient(work, {S, C_}), planner.gradient(DType::F32, {rows_[bias_].numel()}),
                     planner.gradient(DType::F32, {C_}), planner.gradient(DType::F32, {C_})};
    }
    dense_.plan(a, planner, work, S, pass.mode);
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    DS_ASSERT(ctx.mode != Mode::Generate);
    const auto& s = a.saved;
    dense_.forward(ctx, p, a, s[kActivated], x, {.activation = activation_, .preact = s[kPreact]});
    ctx.ops.layernorm_fwd(s[kNormed], s[kMean], s[kRstd], s[kActivated], p.own[norm_], p.own[norm_ + 1], eps_,
                          ctx.stream);
    if (ctx.mode == Mode::Eval)
      projection_loss(ctx, s[kNormed], {.weight = p.shared, .bias = p.own[bias_], .vocab = V_});
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView, TensorView, const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView d = g[kDDense];
    projection_loss(ctx, s[kNormed],
                    {.weight = p.shared,
                     .bias = p.own[bias_],
                     .dh = d,
                     .dweight = ctx.head_weight_grad,
                     .dbias = g[kDBias],
                     .vocab = V_});
    ctx.ops.layernorm_bwd(d, g[kDNormW], g[kDNormB], d, {}, s[kActivated], p.own[norm_], s[kMean], s[kRstd],
                          ctx.stream);
    ctx.ops.activation_bwd(d, d, s[kPreact], activation_, ctx.stream);
    dense_.backward_input(ctx, p, a, a.input_grad, d);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView x, TensorView,
                       const LayerActs& a) const override {
    const auto& g = a.gradients;
    dense_.backward_weight(ctx, out, a, g[kDDense], x);
    round_gradient(ctx, out.own[bias_], g[kDBias]);
    round_gradient(ctx, out.own[norm_], g[kDNormW]);
    round_gradient(ctx, out.own[norm_ + 1], g[kDNormB]);
    round_projection_gradient(ctx, out.shared);
  }

  void logits(const PassContext& ctx, RowViews p, const LayerActs& a, TensorView out) const override {
    linear_forward(ctx, out, a.saved[kNormed], p.shared, {.bias = p.own[bias_]});
  }

 private:
  enum Saved : size_t { kPreact, kActivated, kMean, kRstd, kNormed };
  enum Gradient : size_t { kDDense, kDBias, kDNormW, kDNormB };
  i64 C_, V_;
  float eps_;
  Activation activation_;
  size_t bias_ = 0, norm_ = 0;
  Linear dense_;
};

}  // namespace

Model make_bert(const ModelConfig& c, const Shard& shard) {
  Model m;
  auto embedding = std::make_unique<BertEmbedding>(c, shard);
  m.shared = {embedding->words()};
  m.layers.push_back(std::move(embedding));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<BertBlock>(c, l, shard));
  m.layers.push_back(std::make_unique<BertHead>(c, shard));
  m.other_tasks = {"pooler.dense.", "bert.pooler.dense.", "cls.seq_relationship."};
  m.ties = {{"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"},
            {"cls.predictions.decoder.bias", "cls.predictions.bias"}};
  return m;
}

}  // namespace ds::model
