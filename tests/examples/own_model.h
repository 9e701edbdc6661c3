// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model and samples of a program's own. The model is an embedding, blocks x + W2 gelu(W1 x), and a head. A sample is
// a sequence in which each id follows from the one before.

#include <ds/linear.h>
#include <ds/model_config.h>
#include <ds/sample_source.h>

#include <memory>
#include <string>
#include <utility>

namespace own {

using namespace ds::model;
using ds::DType, ds::i32, ds::i64, ds::TensorView;

class Embedding final : public Layer {
 public:
  Embedding(const ds::ModelConfig& c, const Shard& shard) : Layer("embedding"), vocab_(c.vocab_size) {
    rows_ = {
        cut_vocabulary({.name = "embedding.weight", .shape = {vocab_, c.hidden}, .std = 0.2f, .decay = true}, shard)};
  }
  std::string_view type() const noexcept override { return "Embedding"; }
  bool adds_gradients() const noexcept override { return true; }
  LayerActs plan(ActivationPlanner&, const PlannedPass&) const override { return {}; }
  void forward(const PassContext& ctx, RowViews p, TensorView, const LayerActs& acts) const override {
    embedding_forward(ctx, acts.output, p.own[0], vocab_);
  }
  void backward_input(const PassContext&, RowViews, TensorView, TensorView, const LayerActs&) const override {}
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView, TensorView dy,
                       const LayerActs&) const override {
    embedding_backward(ctx, grads.own[0], dy, vocab_);
  }

 private:
  i64 vocab_;
};

// y = x + W2 gelu(W1 x). Ranks of tensor parallelism share the inner columns.
class Block final : public Layer {
 public:
  Block(const ds::ModelConfig& c, i64 index, const Shard& shard)
      : Layer("blocks." + std::to_string(index)),
        wide_(rows_, linear("wide", c.hidden, c.intermediate, Split::Column), shard),
        narrow_(rows_, linear("narrow", c.intermediate, c.hidden, Split::Row), shard),
        inner_(c.intermediate / shard.tp) {
    allow_tiles();
  }
  std::string_view type() const noexcept override { return "Block"; }
  bool adds_gradients() const noexcept override { return true; }
  bool is_block() const noexcept override { return true; }
  std::vector<Linear*> linears() override { return {&wide_, &narrow_}; }
  std::vector<size_t> products(Products which) const override {
    if (which == Products::BackwardInput) return {narrow_.weight(), wide_.weight()};
    return {wide_.weight(), narrow_.weight()};
  }
  LayerActs plan(ActivationPlanner& planner, const PlannedPass& pass) const override {
    LayerActs a;
    const auto inner = {pass.rows(), inner_};
    a.saved = {planner.saved(pass.work, inner), planner.saved(pass.work, inner)};
    if (pass.mode == Mode::Train) a.gradients = {planner.gradient(pass.work, inner)};
    for (const Linear* map : {&wide_, &narrow_}) map->plan(a, planner, pass.work, pass.rows(), pass.mode);
    return a;
  }
  void forward(const PassContext& ctx, RowViews p, TensorView x, const LayerActs& a) const override {
    wide_.forward(ctx, p, a, a.saved[1], all_rows(ctx, x), {.activation = kGelu, .preact = a.saved[0]});
    narrow_.forward(ctx, p, a, a.output, a.saved[1], {.residual = x});
  }
  void backward_input(const PassContext& ctx, RowViews p, TensorView, TensorView dy,
                      const LayerActs& a) const override {
    const TensorView dinner = a.gradients[0];
    narrow_.backward_input(ctx, p, a, dinner, all_rows(ctx, dy));
    ctx.ops.activation_bwd(dinner, dinner, a.saved[0], kGelu, ctx.stream);
    wide_.backward_input(ctx, p, a, partial_sum(ctx, a.input_grad), dinner, first_term(ctx, dy));
    sum_partials(ctx, a.input_grad, dy);
  }
  void backward_weight(const PassContext& ctx, RowViews grads, TensorView x, TensorView dy,
                       const LayerActs& a) const override {
    wide_.backward_weight(ctx, grads, a, a.gradients[0], all_rows(ctx, x));
    narrow_.backward_weight(ctx, grads, a, all_rows(ctx, dy), a.saved[1]);
  }

 private:
  static constexpr ds::Activation kGelu = ds::Activation::GeluTanh;
  LinearSpec linear(const char* name, i64 in, i64 out, Split split) const {
    return {.name = name_ + "." + name, .in = in, .out = out, .split = split, .bias = false, .std = 0.1f};
  }
  Linear wide_, narrow_;
  i64 inner_;
};

struct MlpModel final : Source {
  explicit MlpModel(std::string given) : name(std::move(given)) {}
  std::string identity() const override { return name; }
  Model make(const ds::ModelConfig& c, const Shard& shard) const override {
    Model m;
    m.layers.push_back(std::make_unique<Embedding>(c, shard));
    for (i64 l = 0; l < c.layers; ++l) m.layers.push_back(std::make_unique<Block>(c, l, shard));
    m.layers.push_back(
        make_head(NormKind::RmsNorm, "norm", "head.weight", c.hidden, c.vocab_size, false, c.norm_eps, 0.02f, shard));
    return m;
  }
  std::string name;
};

struct Sequences final : ds::SampleSource {
  Sequences(i64 samples, i64 ids) : num(samples), vocab(ids) {}
  i64 count() const override { return num; }
  void sample(i64 k, ds::RngKey, std::span<i32> inputs, std::span<i32> targets) const override {
    i64 id = k % vocab;
    for (size_t t = 0; t < inputs.size(); ++t) {
      inputs[t] = static_cast<i32>(id);
      targets[t] = static_cast<i32>(id = (5 * id + 3) % vocab);
    }
  }
  std::string identity() const override { return "5 id + 3 modulo " + std::to_string(vocab); }
  i64 num, vocab;
};

}  // namespace own
