// SPDX-License-Identifier: Apache-2.0
// Llama and its relatives: Touvron et al., "LLaMA" (2023); Qwen2, Qwen3 technical reports. Pre-RMSNorm blocks of an
// attention with rotary positions (self_attention.h) and a SwiGLU. Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and DeepSeek-V2
// have experts in place of the MLP of some blocks or all.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "config/parallel.h"
#include "ds/linear.h"
#include "model/experts.h"
#include "model/feed_forward.h"
#include "model/models.h"
#include "model/self_attention.h"

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
      : Layer("model.layers." + std::to_string(index)), C_(c.hidden), eps_(c.norm_eps), shard_(shard) {
    const auto norm = [&](const char* n) {
      return add(whole_row({.name = name_ + n + ".weight", .shape = {C_}, .init = Init::Ones}, shard));
    };
    norm1_ = norm(".input_layernorm");
    const auto make_attention = c.latent.on() ? make_latent_attention : make_grouped_attention;
    attention_ = make_attention(rows_, name_ + ".self_attn", c, index, shard);
    norm2_ = norm(".post_attention_layernorm");
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
  i64 num_step_counts() const noexcept override { return mlp_->num_step_counts(); }
  i64 num_shared_stats() const noexcept override { return mlp_->num_shared_stats(); }
  i64 gradient_parts() const noexcept override { return mlp_->gradient_parts(); }
  bool reads_tokens() const noexcept override { return mlp_->num_counts() > 0; }  // counts those that have a target
  i64 product_rows(i64 R) const noexcept override { return mlp_->product_rows(R); }
  bool is_block() const noexcept override { return true; }
  CacheShape cache() const override { return attention_->cache(); }
  std::vector<Linear*> linears() override {
    std::vector<Linear*> all = attention_->linears();
    for (Linear* linear : mlp_->linears()) all.push_back(linear);
    return all;
  }
  std::vector<size_t> products(Products which) const override {
    std::vector<size_t> attention = attention_->matrices(), mlp = mlp_->matrices(), all;
    if (which == Products::RecomputeAttention) {
      attention.pop_back();  // the output projection
      return attention;
    }
    const auto append = [&](std::span<const size_t> rows) { all.insert(all.end(), rows.begin(), rows.end()); };
    if (which == Products::Forward || which == Products::Recompute) {
      if (which == Products::Recompute && !mlp.empty()) mlp.pop_back();  // down
      append(attention);
      append(mlp);
    } else {
      if (!mlp.empty()) std::rotate(mlp.begin(), std::prev(mlp.end()), mlp.end());
      append(mlp);
      append(attention_->backward_matrices());
    }
    return all;
  }

  LayerActs plan(ActivationPlanner& p, const PlannedPass& pass) const override {
    const i64 S = stream_rows(shard_, pass.mode, pass.rows());
    const auto work = pass.work, f32 = DType::F32;
    LayerActs a;
    // In the order of enum Saved, Gradient.
    a.saved = {p.attention(work, {S, C_}), p.attention(f32, {S}), p.saved(work, {S, C_}), p.saved(work, {S, C_}),
               p.saved(f32, {S})};
    if (pass.mode == Mode::Train) {
      a.gradients = {p.gradient(work, {S, C_}), p.gradient(f32, {C_}), p.gradient(f32, {C_})};
      a.temporary = {p.temporary(work, {S, C_})};
    }
    mlp_->plan(a, p, pass);
    attention_->plan(a, p, pass);
    return a;
  }

  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    attend(ctx, p, x, a);
    finish_attention(ctx, p, x, a);
    mlp_->forward(ctx, p, a.output, a.saved[kNorm2], a.saved[kMiddle], a);
  }

  void recompute(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a, Keep keep) const override {
    attend(ctx, p, x, a);
    if (keep != Keep::Input) return;
    finish_attention(ctx, p, x, a);
    mlp_->recompute(ctx, p, a.saved[kNorm2], a);
  }

  void backward_input(const PassContext& ctx, RowViews p, TensorView x, TensorView dy,
                      const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    const TensorView dnorm = a.temporary[0];
    mlp_->backward_input(ctx, p, dnorm, dy, s[kNorm2], {}, a);
    ctx.ops.rmsnorm_bwd(g[kDMiddle], g[kDNorm2], dnorm, dy, s[kMiddle], p.own[norm2_], s[kRstd2], ctx.stream);
    attention_->backward_input(ctx, p, dnorm, g[kDMiddle], a);
    ctx.ops.rmsnorm_bwd(a.input_grad, g[kDNorm1], dnorm, g[kDMiddle], x, p.own[norm1_], s[kRstd1], ctx.stream);
  }

  void backward_weight(const PassContext& ctx, RowViews out, TensorView, TensorView dy,
                       const LayerActs& a) const override {
    const auto& s = a.saved;
    const auto& g = a.gradients;
    mlp_->backward_weight(ctx, out, dy, s[kNorm2], a);
    if (ctx.part > 0) return;
    attention_->backward_weight(ctx, out, g[kDMiddle], s[kNorm1], a);
    round_gradient(ctx, out.own[norm1_], g[kDNorm1]);
    round_gradient(ctx, out.own[norm2_], g[kDNorm2]);
  }

 private:
  enum Saved : size_t { kNorm1, kRstd1, kMiddle, kNorm2, kRstd2 };
  enum Gradient : size_t { kDMiddle, kDNorm1, kDNorm2 };

  void attend(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    ctx.ops.rmsnorm_fwd(a.saved[kNorm1], a.saved[kRstd1], x, p.own[norm1_], eps_, ctx.stream);
    attention_->attend(ctx, p, a.saved[kNorm1], a);
  }
  // From the attention's output to the input of the MLP.
  void finish_attention(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const {
    const auto& s = a.saved;
    attention_->project(ctx, p, s[kMiddle], x, a);
    ctx.ops.rmsnorm_fwd(s[kNorm2], s[kRstd2], s[kMiddle], p.own[norm2_], eps_, ctx.stream);
  }

  i64 C_;
  float eps_;
  Shard shard_;
  size_t norm1_ = 0, norm2_ = 0;
  std::unique_ptr<SelfAttention> attention_;
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
