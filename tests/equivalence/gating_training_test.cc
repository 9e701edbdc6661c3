// SPDX-License-Identifier: Apache-2.0
// Experts with a capacity and routers with noise: the same choices are dropped, and the same random numbers drawn, in
// every layout. Layouts that divide neither matrices nor sums have the same bits, the others agree to rounding.

#include "equivalence/layouts.h"
#include "equivalence/training.h"
#include "model/models.h"

namespace ds::testing {
namespace gating_training_test {

using Kind = PipelineSchedule;
using Granularity = CheckpointGranularity;

constexpr i64 kSteps = 3;

ModelConfig tiny_gated(i64 k, DropPolicy policy) {
  ModelConfig m = of_four_heads(tiny_llama());
  m.layers = 4;
  m.experts = {.count = 8,
               .per_token = k,
               .intermediate = 24,
               .router = {.normalise = k > 1},
               .balance_loss = 0.02f,
               .capacity = {.limited = true, .factor = 0.6, .eval_factor = 0.8, .least = 1, .policy = policy},
               .layers = {true, true, false, true}};
  return m;
}
// DeepSpeed's layer.
ModelConfig tiny_moe(i64 k) {
  ModelConfig m = of_four_heads(tiny_gpt2());
  m.layers = 4;
  m.experts = {.count = 8,
               .per_token = k,
               .intermediate = m.intermediate,
               .plain = true,
               .router = {.normalise = k > 1},
               .balance_loss = 0.05f,
               .first_choice_loss = k == 2,
               .capacity = {.limited = true, .least = 2, .policy = k == 1 ? DropPolicy::Random : DropPolicy::Position},
               .noisy_choice = true,
               .layers = {false, true, false, true}};
  return m;
}

std::vector<std::pair<std::string, ModelConfig>> models() {
  ModelConfig second = tiny_gated(2, DropPolicy::Probs), jitter = tiny_gated(2, DropPolicy::Position),
              dropout = tiny_moe(1);
  second.experts.noisy_choice = true, second.experts.router_jitter = true;
  jitter.experts.input_jitter = 0.1f, jitter.experts.capacity.limited = false;
  dropout.resid_dropout = dropout.embd_dropout = 0.1f;
  ModelConfig residual = tiny_moe(2), pyramid = tiny_moe(1), rounded = tiny_gated(2, DropPolicy::Position);
  residual.experts.residual = pyramid.experts.residual = true;
  residual.experts.shared = pyramid.experts.shared = residual.intermediate;
  residual.resid_dropout = 0.1f;
  pyramid.experts.counts = {0, 4, 0, 8};
  rounded.experts.router_dtype = RouterDtype::Work;
  return {{"position of two", tiny_gated(2, DropPolicy::Position)},
          {"probs of three", tiny_gated(3, DropPolicy::Probs)},
          {"random of one", tiny_gated(1, DropPolicy::Random)},
          {"noisy second", second},
          {"input with jitter", jitter},
          {"layer of DeepSpeed, one", dropout},
          {"layer of DeepSpeed, two", tiny_moe(2)},
          {"residual layer", residual},
          {"pyramid of residual layers", pyramid},
          {"logits in the work dtype", rounded}};
}

Config config_for(const ModelConfig& model, const Layout& l, int ep, DType work, double room = 8) {
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  c.expert_parallel = {.enabled = ep > 1, .size = ep, .room = room};
  return c;
}

Trace train(const Config& c, const Layout& l, Hooks hooks = {}) {
  hooks.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {}));
  hooks.same_logits &= c.expert_parallel.size == 1;
  return train_threads(c, l.ranks(), kSteps, 1, hooks);
}
Trace train(const ModelConfig& model, const Layout& l, int ep = 1, DType work = DType::F32) {
  return train(config_for(model, l, ep, work), l);
}

i64 dropped(const Trace& t) {
  i64 n = 0;
  for (const ExpertTokens& layer : t.experts) n += layer.dropped;
  return n;
}

TEST(Gating, TrainsWithTheSameBitsInEveryLayout) {
  struct Cut {
    Layout l;
    int ep;
  };
  for (const auto& [name, model] : models()) {
    for (const DType work : {DType::F32, DType::BF16}) {
      const Trace want = train(model, {}, 1, work);
      EXPECT_EQ(dropped(want) > 0, model.experts.capacity.limited) << name;
      EXPECT_EQ(std::ssize(want.experts), kSteps * std::ranges::count(model.experts.layers, true));
      for (const ExpertTokens& layer : want.experts) {
        EXPECT_GT(layer.entropy, 0) << name;
        EXPECT_LE(layer.entropy, std::log(8.0) + 1e-3) << name;
      }
      for (const auto& [l, ep] : {Cut{{.dp = 2, .stage = 1}, 1},
                                  {{.dp = 4, .stage = 3}, 1},
                                  {{.pp = 2}, 1},
                                  {{.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}, 1},
                                  {{.dp = 2, .checkpoints = Granularity::Layer, .stage = 3}, 1},
                                  {{.checkpoints = Granularity::Selective}, 1},
                                  {{.dp = 2, .stage = 2}, 2},
                                  {{.dp = 4, .stage = 3}, 4},
                                  {{.dp = 2, .pp = 2, .checkpoints = Granularity::Layer, .stage = 1}, 2}}) {
        const std::string what = fmt::format("{} {} {} ep {}", name, dtype_name(work), l.name(), ep);
        expect_same_training(train(model, l, ep, work), want, what);
      }
    }
  }
}

// Experts with biases, some of which get more rows than there is memory for.
TEST(Gating, GoesInRoundsWithTheBitsOfOneRank) {
  ModelConfig model = tiny_moe(2);
  model.experts.capacity.limited = false;
  for (const DType work : {DType::F32, DType::BF16}) {
    const Trace want = train(model, {}, 1, work);
    for (const Layout& l : {Layout{.dp = 8, .stage = 2}, {.dp = 8, .checkpoints = Granularity::Layer, .stage = 1}}) {
      const Trace all = train(config_for(model, l, 8, work), l), some = train(config_for(model, l, 8, work, 1), l);
      EXPECT_GT(some.sent.at("ep.all_to_allv").calls, all.sent.at("ep.all_to_allv").calls);
      expect_same_training(some, want, fmt::format("{} {}", dtype_name(work), l.name()));
    }
  }
}

TEST(Gating, OverTensorAndSequenceParallelRanksAgreesToRounding) {
  for (const auto& [name, model] : models()) {
    const Trace want = train(model, {});
    const size_t of_a_step = static_cast<size_t>(std::ranges::count(model.experts.layers, true));
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 2, .sequence = true},
                            {.sp = 2},
                            {.sp = 4},
                            {.sp = 2, .mode = SequenceParallelMode::Ring},
                            {.dp = 2, .sp = 2, .checkpoints = Granularity::Layer, .stage = 2}}) {
      const std::string what = name + " " + l.name();
      const Trace got = train(model, l);
      expect_planned(got, kSteps, what);
      expect_close(got, want, what);
      ASSERT_EQ(got.experts.size(), want.experts.size());
      for (size_t i = 0; i < of_a_step; ++i) {  // of the first step: later ones begin with other weights
        EXPECT_EQ(got.experts[i].tokens, want.experts[i].tokens) << what;
        EXPECT_EQ(got.experts[i].dropped, want.experts[i].dropped) << what;
        EXPECT_NEAR(got.experts[i].entropy, want.experts[i].entropy, 1e-4) << what;
      }
    }
    const Layout l{.dp = 2, .tp = 2, .stage = 2};
    expect_close(train(model, l, 2), want, "ep 2 " + name + " " + l.name());
  }
}

// In several rounds, with biases and with choices that are dropped.
TEST(Gating, MoreRowsThanThereIsMemoryForGoInRounds) {
  ModelConfig model = tiny_moe(2);
  model.experts.capacity.factor = 3;
  for (const Layout& l : {Layout{.dp = 8, .stage = 1}, {.dp = 8, .checkpoints = Granularity::Layer, .stage = 1}}) {
    const auto run = [&](double room) { return train(config_for(model, l, l.dp, DType::F32, room), l); };
    const Trace all = run(8), some = run(1);
    EXPECT_GT(some.sent.at("ep.all_to_allv").calls, all.sent.at("ep.all_to_allv").calls) << l.name();
    EXPECT_EQ(some.losses[0], all.losses[0]) << l.name();
    expect_same_experts(std::span(some.experts).first(2), std::span(all.experts).first(2), l.name());
    expect_close(some, all, l.name());
  }
}

// Evaluations have a capacity of their own, and no noise.
TEST(Gating, EvaluationsHaveTheirOwnCapacity) {
  ModelConfig model = tiny_moe(1);
  model.experts.capacity.eval_factor = 8;
  const Trace all = train(model, {});
  model.experts.capacity.eval_factor = 0.3;
  const Trace few = train(model, {});
  EXPECT_EQ(few.losses, all.losses);
  EXPECT_EQ(few.weights, all.weights);
  EXPECT_NE(few.eval_loss, all.eval_loss);
  model.experts.capacity.limited = false;
  model.experts.noisy_choice = false;
  const auto loss_of = [](const ModelConfig& m) {
    double loss = 0;
    Config c = config_for(m, {}, 1, DType::F32);
    with_engines(c, 1, [&](engine::Engine& engine) {
      loss = *engine.evaluate(1, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
        fill_sample(1, c.model.vocab_size, ids, targets);
        return true;
      });
    });
    return loss;
  };
  ModelConfig noisy = model;
  noisy.experts.noisy_choice = noisy.experts.router_jitter = true;
  EXPECT_EQ(loss_of(noisy), loss_of(model));
  noisy.experts.capacity = {.limited = true, .eval_factor = 8};
  EXPECT_EQ(loss_of(noisy), loss_of(model));
}

// A completion depends on nothing but its own tokens.
TEST(Gating, GenerationDropsNothing) {
  const auto text = [](bool limited) {
    ModelConfig model = tiny_moe(2);
    model.experts.capacity = {.limited = limited, .factor = 0.1, .eval_factor = 0.1, .least = 0};
    std::vector<i32> written;
    with_engines(config_for(model, {}, 1, DType::F32), 1, [&](engine::Engine& engine) {
      written = text_of(engine, {3, 5, 8, 2, 7, 9, 4}, {});
    });
    return written;
  };
  EXPECT_EQ(text(true), text(false));
}

// Noise changes from step to step, and with the seed.
TEST(Gating, RandomNumbersAreThoseOfTheSeed) {
  Config c = config_for(tiny_gated(1, DropPolicy::Random), {}, 1, DType::F32);
  const Trace want = train(c, {});
  c.seed += 1;
  Hooks hooks;
  const Trace other = train(c, {});
  EXPECT_NE(other.losses[1], want.losses[1]);
}

}  // namespace gating_training_test
}  // namespace ds::testing
