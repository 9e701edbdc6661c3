// SPDX-License-Identifier: Apache-2.0
// GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Pre-LayerNorm blocks, learned
// positions, biases everywhere, weights stored [in,out] as Hugging Face's Conv1D. Some blocks may have experts in place
// of the MLP, or beside it, as with DeepSpeed's MoE layer (Rajbhandari et al., "DeepSpeed-MoE", 2022).

#include <cmath>
#include <memory>

#include "config/parallel.h"
#include "ds/linear.h"
#include "model/experts.h"
#include "model/models.h"

namespace ds::model {
namespace {

class Gpt2Embedding final : public Layer {
 public:
  Gpt2Embedding(const ModelConfig& c, const std::string& prefix, const Shard& shard)
      : Layer(prefix + "wte"),
        C_(c.hidden),
        V_(c.vocab_size),
        tied_(c.tie_embeddings),
        dropout_(c.embd_dropout),
        shard_(shard) {
    if (!tied_) rows_.push_back(table(c, prefix, shard));
    rows_.push_back(whole_row(
        {.name = prefix + "wpe.weight", .shape = {c.max_positions, C_}, .std = c.initializer_range, .decay = true},
        shard));
  }

  static ParamRow table(const ModelConfig& c, const std::string& prefix, const Shard& shard) {
    return cut_vocabulary(
        {.name = prefix + "wte.weight", .shape = {c.vocab_size, c.hidden}, .std = c.initializer_range, .decay = true},
        shard);
  }

  std::string_view type() const noexcept override { return kEmbeddingType; }
  bool adds_gradients() const noexcept override { return true; }

  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    LayerActs a;
    if (pass.mode == Mode::Train && dropout_ > 0)
      a.gradients = {planner.gradient(pass.work, {shard_.stream_rows(pass.rows()), C_})};
    return a;
  }

  void forward(const PassContext& ctx, RowViews params, TensorView, const LayerActs& acts) const override {
    embedding_forward(ctx, acts.output, tied_ ? params.shared : params.own[0], V_);
    ctx.ops.embedding_fwd(acts.output, params.own.back(), stream_part(ctx, ctx.row_positions), 0, true, ctx.stream);
    if (ctx.mode == Mode::Train && dropout_ > 0)
      dropout_rows(ctx, acts.output, acts.output, first_stream_row(ctx), dropout_, dropout_site(ctx, 0, 0));
  }

  void backward_input(const PassContext& ctx, RowViews, TensorView, TensorView dy,
                      const LayerActs& acts) const override {
    if (dropout_ > 0)
      dropout_rows(ctx, acts.gradients[0], dy, first_stream_row(ctx), dropout_, dropout_site(ctx, 0, 0));
  }

  void backward_weight(const PassContext& ctx, RowViews grads, TensorView, TensorView dy,
                       const LayerActs& acts) const override {
    if (dropout_ > 0) dy = acts.gradients[0];
    look_up_backward(ctx, grads.own.back(), dy, stream_part(ctx, ctx.row_positions));
    embedding_backward(ctx, tied_ ? grads.shared : grads.own[0], dy, V_);
  }

 private:
  i64 C_, V_;
  bool tied_;
  float dropout_;
  Shard shard_;
};

class Gpt2Block final : public Layer {
 public:
  Gpt2Block(const ModelConfig& c, const std::string& prefix, i64 index, const Shard& shard)
      : Layer(prefix + "h." + std::to_string(index)),
        C_(c.hidden),
        H_(c.heads / shard.tp),
        D_(c.head_dim),
        Q_(H_ * D_),
        F_(c.intermediate / shard.tp),
        eps_(c.norm_eps),
        activation_(c.activation),
        shard_(shard),
        dropout_{.layer = index + 1, .branches = c.resid_dropout} {
    attention_.scale = c.scale_attn_weights ? 1.0f / std::sqrt(static_cast<float>(D_)) : 1.0f;
    if (c.scale_attn_by_inverse_layer_idx) attention_.scale /= static_cast<float>(index + 1);
    attention_.dropout = c.attn_dropout;
    const float std = c.initializer_range;
    const float projection_std = std / std::sqrt(2.0f * static_cast<float>(c.layers));
    const auto norm = [&](const std::string& n) {
      const size_t weight = add(whole_row({.name = name_ + n + ".weight", .shape = {C_}, .init = Init::Ones}, shard));
      add(whole_row({.name = name_ + n + ".bias", .shape = {C_}, .init = Init::Zeros}, shard));
      return weight;
    };
    const auto column = [&](const std::string& n, i64 out, i64 fused) {
      return Linear(rows_,
                    {.name = name_ + n,
                     .in = C_,
                     .out = out,
                     .split = Split::Column,
                     .orientation = Orientation::InOut,
                     .std = std,
                     .fused = fused},
                    shard);
    };
    const auto row = [&](const std::string& n, i64 in) {
      return Linear(rows_,
                    {.name = name_ + n,
                     .in = in,
                     .out = C_,
                     .split = Split::Row,
                     .orientation = Orientation::InOut,
                     .std = projection_std},
                    shard);
    };
    norm1_ = norm(".ln_1");
    qkv_ = column(".attn.c_attn", 3 * C_, 3);
    proj_ = row(".attn.c_proj", C_);
    norm2_ = norm(".ln_2");
    if (c.experts.sparse(index)) {
      ModelConfig own = c;
      own.experts.count = c.experts.count_of(index);
      experts_ = std::make_unique<Experts>(rows_, name_ + ".mlp", own, index + 1, shard);
    } else {
      wide_ = column(".mlp.c_fc", c.intermediate, 1);
      narrow_ = row(".mlp.c_proj", c.intermediate);
    }
    allow_tiles();
  }

  std::string_view type() const noexcept override { return block_type(Family::Gpt2); }
  bool adds_gradients() const noexcept override { return true; }
  bool is_block() const noexcept override { return true; }
  CacheShape cache() const override { return attention_cache(0, H_, D_); }
  bool adds_loss() const noexcept override { return experts_ && experts_->adds_loss(); }
  i64 num_counts() const noexcept override { return experts_ ? experts_->num_counts() : 0; }
  i64 num_step_counts() const noexcept override { return experts_ ? experts_->num_step_counts() : 0; }
  i64 num_shared_stats() const noexcept override { return experts_ ? experts_->num_shared_stats() : 0; }
  i64 gradient_parts() const noexcept override { return experts_ ? experts_->gradient_parts() : 1; }
  bool reads_tokens() const noexcept override { return experts_ != nullptr; }  // counts those that have a target
  std::vector<Linear*> linears() override {
    if (!experts_) return {&qkv_, &proj_, &wide_, &narrow_};
    std::vector<Linear*> all = experts_->linears();
    all.insert(all.begin(), {&qkv_, &proj_});
    return all;
  }
  std::vector<size_t> products(Products which) const override {
    if (experts_) {
      const size_t qkv = qkv_.weight(), proj = proj_.weight();
      if (which == Products::RecomputeAttention) return {qkv};
      if (which == Products::Forward || which == Products::Recompute) return {qkv, proj};
      return {proj, qkv};
    }
    const size_t qkv = qkv_.weight(), proj = proj_.weight(), wide = wide_.weight(), narrow = narrow_.weight();
    switch (which) {
      case Products::Forward: return {qkv, proj, wide, narrow};
      case Products::Recompute: return {qkv, proj, wide};
      case Products::RecomputeAttention: return {qkv};
      case Products::BackwardInput:
      case Products::BackwardWeight: break;
    }
    return {narrow, wide, proj, qkv};
  }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 B = pass.B, T = pass.T, R = pass.rows(), S = stream_rows(shard_, pass.mode, R);
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, Gradient, Temporary.
    a.saved = {p.attention(work, {S, C_}), p.attention(f32, {S}),
               p.attention(f32, {S}),      p.attention(work, {R, 3 * Q_}),
               p.attention(work, {R, Q_}), p.attention(f32, {B, H_, T}),
               p.saved(work, {S, C_}),     p.saved(work, {S, C_}),
               p.saved(f32, {S}),          p.saved(f32, {S})};
    if (!experts_) {
      a.saved.push_back(p.saved(work, {R, F_}));
      a.saved.push_back(p.saved(work, {R, F_}));
    }
    if (pass.mode == Mode::Train) {
      a.gradients = {experts_ ? TensorView{} : p.gradient(work, {R, F_}), p.gradient(work, {R, 3 * Q_}),
                     p.gradient(work, {S, C_})};
      for (int n = 0; n < 4; ++n) a.gradients.push_back(p.gradient(f32, {C_}));
      for (int n = 0; n < 2 && dropout_.branches > 0; ++n) a.gradients.push_back(p.gradient(work, {S, C_}));
      a.temporary = {p.temporary(work, {S, C_}), p.temporary(work, {R, Q_})};
    }
    plan_attention(a, p, shard_, pass, {H_, H_, D_, D_});
    qkv_.plan(a, p, work, R, pass.mode, /*attention=*/true);
    proj_.plan(a, p, work, R, pass.mode);
    if (experts_) {
      experts_->plan(a, p, pass);
    } else {
      for (const Linear* linear : {&wide_, &narrow_}) linear->plan(a, p, work, R, pass.mode);
    }
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    attention_forward(ctx, p, x, a);
    finish_attention(ctx, p, x, a);
    const Epilogue end = dropout_.branch(ctx, a.saved[kMiddle], 2);
    if (!experts_) {
      mlp_forward(ctx, p, a);
      return narrow_.forward(ctx, p, a, a.output, a.saved[kActivated], end);
    }
    if (end.dropout <= 0) return experts_->forward(ctx, p, a.output, a.saved[kNorm2], end.residual, a);
    experts_->forward(ctx, p, a.output, a.saved[kNorm2], {}, a);
    dropout_rows(ctx, a.output, a.output, first_stream_row(ctx), end.dropout, end.site);
    ctx.ops.add(a.output, a.output, end.residual, ctx.stream);
  }

  void recompute(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a, Keep keep) const override {
    attention_forward(ctx, p, x, a);
    if (keep != Keep::Input) return;
    finish_attention(ctx, p, x, a);
    if (experts_) return experts_->recompute(ctx, p, a.saved[kNorm2], a);
    mlp_forward(ctx, p, a);
    narrow_.recompute(ctx, p, a, a.saved[kActivated]);
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView x, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dwide = g[kDWide], dqkv = g[kDQkv], dmiddle = g[kDMiddle], dnarrow = a.temporary[0],
                     dattn = a.temporary[1];
    const TensorView dmlp = dropout_.branch_gradient(ctx, branch(a, kDMlp), dy, 2);
    if (experts_) {
      experts_->backward_input(ctx, p, dnarrow, dmlp, s[kNorm2], {}, a);
    } else {
      narrow_.backward_input(ctx, p, a, dwide, all_rows(ctx, dmlp));
      ctx.ops.activation_bwd(dwide, dwide, s[kPreact], activation_, ctx.stream);
      wide_.backward_input(ctx, p, a, partial_sum(ctx, dnarrow), dwide);
      sum_partials(ctx, dnarrow);
    }
    ctx.ops.layernorm_bwd(dmiddle, g[kDLn2W], g[kDLn2B], dnarrow, dy, s[kMiddle], p.own[norm2_], s[kMean2], s[kRstd2],
                          ctx.stream);

    const TensorView dproj = dropout_.branch_gradient(ctx, branch(a, kDProj), dmiddle, 1);
    proj_.backward_input(ctx, p, a, dattn, all_rows(ctx, dproj));
    attend_backward(ctx, heads(ctx, dqkv), flat(ctx, dattn), heads(ctx, s[kQkv]), flat(ctx, s[kAttn]), s[kLse],
                    dropout_.attention(ctx, attention_), a);
    qkv_.backward_input(ctx, p, a, partial_sum(ctx, dnarrow), dqkv);
    sum_partials(ctx, dnarrow);
    ctx.ops.layernorm_bwd(a.input_grad, g[kDLn1W], g[kDLn1B], dnarrow, dmiddle, x, p.own[norm1_], s[kMean1], s[kRstd1],
                          ctx.stream);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView, TensorView dy,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const bool drops = dropout_.branches > 0;
    const TensorView dmlp = drops ? branch(a, kDMlp) : dy;
    if (experts_) {
      experts_->backward_weight(ctx, out, dmlp, s[kNorm2], a);
      if (ctx.part > 0) return;
    } else {
      narrow_.backward_weight(ctx, out, a, all_rows(ctx, dmlp), s[kActivated]);
      wide_.backward_weight(ctx, out, a, g[kDWide], all_rows(ctx, s[kNorm2]));
    }
    proj_.backward_weight(ctx, out, a, all_rows(ctx, drops ? branch(a, kDProj) : g[kDMiddle]), s[kAttn]);
    qkv_.backward_weight(ctx, out, a, g[kDQkv], all_rows(ctx, s[kNorm1]));
    for (const auto& [row, grad] :
         {std::pair{norm1_, kDLn1W}, {norm1_ + 1, kDLn1B}, {norm2_, kDLn2W}, {norm2_ + 1, kDLn2B}})
      round_gradient(ctx, out.own[row], g[grad]);
  }

 private:
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
    kActivated
  };
  enum Gradient : size_t { kDWide, kDQkv, kDMiddle, kDLn1W, kDLn1B, kDLn2W, kDLn2B, kDMlp, kDProj };

  void attention_forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    ctx.ops.layernorm_fwd(s[kNorm1], s[kMean1], s[kRstd1], x, p.own[norm1_], p.own[norm1_ + 1], eps_, ctx.stream);
    qkv_.forward(ctx, p, a, s[kQkv], all_rows(ctx, s[kNorm1]));
    attend(ctx, flat(ctx, s[kAttn]), s[kLse], heads(ctx, s[kQkv]), dropout_.attention(ctx, attention_), a);
  }
  // From the attention's output to the input of the MLP.
  void finish_attention(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    proj_.forward(ctx, p, a, s[kMiddle], s[kAttn], dropout_.branch(ctx, x, 1));
    ctx.ops.layernorm_fwd(s[kNorm2], s[kMean2], s[kRstd2], s[kMiddle], p.own[norm2_], p.own[norm2_ + 1], eps_,
                          ctx.stream);
  }
  // To the input of the last product.
  void mlp_forward(const PassContext& ctx, RowViews p, const LayerActs& a) const {
    const auto& s = a.saved;
    wide_.forward(ctx, p, a, s[kActivated], all_rows(ctx, s[kNorm2]),
                  {.activation = activation_, .preact = s[kPreact]});
  }

  static TensorView branch(const LayerActs& a, Gradient which) {
    return a.gradients.size() > which ? a.gradients[which] : TensorView{};
  }
  Heads heads(const PassContext& ctx, TensorView qkv) const {
    return {heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * Q_, 0), heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * Q_, Q_),
            heads_view(qkv, ctx.B, ctx.T, H_, D_, 3 * Q_, 2 * Q_)};
  }
  TensorView flat(const PassContext& ctx, TensorView rows) const {
    return heads_view(rows, ctx.B, ctx.T, H_, D_, Q_, 0);
  }

  i64 C_, H_, D_, Q_, F_;
  float eps_;
  Activation activation_;
  Shard shard_;
  BlockDropout dropout_;
  AttentionParams attention_;
  size_t norm1_ = 0, norm2_ = 0;  // rows of the weights; the biases follow
  Linear qkv_, proj_, wide_, narrow_;
  std::unique_ptr<Experts> experts_;  // in place of the last two
};

}  // namespace

Model make_gpt2(const ModelConfig& c, const Shard& shard) {
  const std::string prefix = "transformer.";
  Model m;
  if (c.tie_embeddings) {
    m.shared = {Gpt2Embedding::table(c, prefix, shard)};
    m.ties = {{"lm_head.weight", prefix + "wte.weight"}};
  }
  m.layers.push_back(std::make_unique<Gpt2Embedding>(c, prefix, shard));
  for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<Gpt2Block>(c, prefix, l, shard));
  m.layers.push_back(make_head(NormKind::LayerNorm, prefix + "ln_f", "lm_head.weight", c.hidden, c.vocab_size,
                               c.tie_embeddings, c.norm_eps, c.initializer_range, shard));
  return m;
}

}  // namespace ds::model
