// SPDX-License-Identifier: Apache-2.0
// Models with multi-head latent attention train with the same bits in every layout that divides neither matrices nor
// sums, and to rounding over ranks of tp and sp; memory, messages and FLOPs are predicted.

#include <cmath>

#include "equivalence/layouts.h"
#include "equivalence/training.h"
#include "model/models.h"

namespace ds::testing {
namespace latent_test {

using Kind = PipelineSchedule;
using Granularity = CheckpointGranularity;

constexpr i64 kSteps = 4;

Config latent_config(const ModelConfig& model, const Layout& l, DType work = DType::F32) {
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  return c;
}

Trace train(const Config& c, const Layout& l) {
  const Trace t = train_threads(c, l.ranks(), kSteps);
  expect_planned(t, kSteps, l.name());
  return t;
}

const std::vector<Layout> kWithTheSameBits = {{.dp = 2, .stage = 1},
                                              {.dp = 4, .stage = 3},
                                              {.pp = 2},
                                              {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 2},
                                              {.dp = 2, .checkpoints = Granularity::Layer, .stage = 3},
                                              {.dp = 2, .checkpoints = Granularity::Selective, .stage = 2}};

TEST(Latent, TrainsWithTheSameBitsInEveryLayout) {
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const bool latent_queries : {true, false}) {
      ModelConfig model = tiny_latent(latent_queries);
      model.layers = 4;
      model.attn_dropout = 0.1f;
      const auto run = [&](const Layout& l) { return train(latent_config(model, l, work), l); };
      const Trace want = run({});
      EXPECT_LT(want.losses.back(), want.losses.front());
      for (const Layout& l : kWithTheSameBits)
        expect_same_training(run(l), want, fmt::format("{} {}", dtype_name(work), l.name()));
    }
  }
}

TEST(Latent, OverTensorAndSequenceParallelRanksAgreesToRounding) {
  for (const bool latent_queries : {true, false}) {
    ModelConfig model = tiny_latent(latent_queries);
    model.attention_bias = model.output_bias = latent_queries;
    const Trace want = train(latent_config(model, {}), {});
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 4, .sequence = true},
                            {.sp = 2},
                            {.sp = 4},
                            {.tp = 2, .sp = 2},
                            {.sp = 2, .mode = SequenceParallelMode::Ring},
                            {.tp = 2, .checkpoints = Granularity::Selective},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3}})
      expect_close(train(latent_config(model, l), l), want, l.name());
  }
}

TEST(Latent, InTilesTrainsToRounding) {
  const ModelConfig model = tiny_latent();
  const Trace want = train(latent_config(model, {}), {});
  const Layout l{.dp = 2, .stage = 3};
  Config c = latent_config(model, l);
  c.zero.tile_size = 512;
  expect_close(train(c, l), want, "tiles");
}

// As DeepSeek-V3: experts of some of several groups, chosen with biases, beside a shared one.
ModelConfig tiny_deepseek() {
  ModelConfig model = tiny_latent();
  model.layers = 4;
  model.experts = {
      .count = 8,
      .per_token = 3,
      .intermediate = 24,
      .router =
          {.sigmoid = true, .normalise = true, .scale = 1.5f, .groups = 4, .chosen_groups = 2, .group_by_two = true},
      .balancing_bias = true,
      .shared = 24,
      .layers = {false, true, true, true}};
  return model;
}

TEST(Latent, WithExpertsTrainsWithTheSameBitsInEveryLayout) {
  const ModelConfig model = tiny_deepseek();
  for (const DType work : {DType::F32, DType::BF16}) {
    const auto run = [&](const Layout& l, int ep = 1) {
      Config c = latent_config(model, l, work);
      c.optimizer.router_bias_update_rate = 0.01f;
      c.expert_parallel = {.enabled = ep > 1, .size = ep, .room = 8};
      Hooks hooks{.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {}))};
      hooks.same_logits &= ep == 1;
      const Trace t = train_threads(c, l.ranks(), kSteps, 1, hooks);
      if (ep == 1) expect_planned(t, kSteps, l.name());
      return t;
    };
    const Trace want = run({});
    EXPECT_LT(want.losses.back(), want.losses.front());
    for (const Layout& l : kWithTheSameBits)
      expect_same_training(run(l), want, fmt::format("{} {}", dtype_name(work), l.name()));
    for (const i64 stage : {1, 3}) expect_same_training(run({.dp = 2, .stage = stage}, 2), want, "ep 2");
    expect_same_training(run({.dp = 4, .stage = 2}, 4), want, "ep 4");
    if (work == DType::BF16) continue;
    for (const Layout& l : {Layout{.tp = 2}, {.tp = 4, .sequence = true}, {.sp = 2}, {.dp = 2, .tp = 2, .stage = 3}})
      expect_close(run(l), want, l.name());
  }
}

// Operations: 2 M N K for the six maps, and attention with its two sizes of heads, written out.
TEST(Latent, CountsItsParametersAndOperations) {
  for (const bool latent_queries : {true, false}) {
    const ModelConfig c = tiny_latent(latent_queries);
    const model::Model m = model::make_model(c, 16);
    const LatentConfig& x = c.latent;
    const i64 q = c.heads * c.head_dim, plain = c.head_dim - x.rope_dim;
    const i64 queries = latent_queries ? (c.hidden + q) * x.query_rank : c.hidden * q;
    const i64 matrices = queries + c.hidden * (x.rank + x.rope_dim) + x.rank * c.heads * (plain + x.value_dim) +
                         c.heads * x.value_dim * c.hidden + 3 * c.hidden * c.intermediate;
    const i64 norms = 2 * c.hidden + x.rank + x.query_rank;
    EXPECT_EQ(m.num_params(), c.layers * (matrices + norms) + 2 * c.vocab_size * c.hidden + c.hidden);
    const double attention = 6.0 * static_cast<double>(c.layers * c.heads * (c.head_dim + x.value_dim) * 16);
    EXPECT_EQ(m.flops_per_token(16),
              6.0 * static_cast<double>(c.layers * matrices + c.vocab_size * c.hidden) + attention);
  }
}

}  // namespace latent_test
}  // namespace ds::testing
