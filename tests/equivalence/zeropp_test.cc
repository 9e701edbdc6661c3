// SPDX-License-Identifier: Apache-2.0
// ZeRO++ at stage 3: second shards within groups of ranks (hpZ) move no bit and take what they send from the whole
// group; weights that travel as codes (qwZ) train nearly as well, with the same bits whatever else is chosen beside it;
// memory and messages are as predicted.

#include "equivalence/layouts.h"

namespace ds::testing {
namespace zeropp_test {

Config stage3(const ModelConfig& model, const Layout& l, i64 micro_batches = 8) {
  Config c = config_of(model, l, micro_batches);
  c.zero.stage = 3;
  return c;
}

Trace train(const Config& c, const Layout& l, i64 steps = 4) { return train_threads(c, l.ranks(), steps); }

i64 sent(const Trace& t, const std::string& name) {
  const auto found = t.sent.find(name);
  return found == t.sent.end() ? 0 : found->second.bytes;
}

TEST(SecondShards, MoveNoBit) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const Layout& l : {Layout{.dp = 4, .stage = 3},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.dp = 2, .tp = 2, .stage = 3},
                            {.dp = 2, .sp = 2, .stage = 3},
                            {.dp = 4, .checkpoints = Granularity::Layer, .stage = 3}}) {
      for (const bool tiles : {false, true}) {
        Config c = stage3(model, l);
        c.bf16.enabled = true;
        c.communication_data_type = WireType::BF16;
        if (tiles) c.zero.tile_size = 1500;
        const Trace want = train(c, l);
        for (int near = 2; near <= l.dp; near *= 2) {
          c.zero.hpz_partition_size = near;
          const Trace t = train(c, l);
          const std::string what = fmt::format("{} hpz {} tiles {}", l.name(), near, tiles);
          expect_same_training(t, want, what);
          expect_planned(t, 4, what);
          // A unit that is gathered a second time comes from the ranks nearby.
          EXPECT_LT(sent(t, "dp.all_gather"), sent(want, "dp.all_gather")) << what;
          EXPECT_GT(sent(t, "hpz.all_gather"), 0) << what;
        }
      }
    }
  }
}

// Each unit comes once in a step from all ranks, whatever the micro-batches.
TEST(SecondShards, AreUsedUntilTheNextUpdate) {
  const Layout l{.dp = 4, .stage = 3};
  Config c = stage3(of_four_heads(tiny_llama()), l, 16);
  c.zero.hpz_partition_size = 2;
  const Trace many = train(c, l);
  c = stage3(of_four_heads(tiny_llama()), l, 4);
  const Trace once = train(c, l);
  EXPECT_EQ(2 * sent(many, "dp.all_gather"), sent(once, "dp.all_gather"));  // forward, and not backward
}

TEST(CodedWeights, TrainNearlyAsWell) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const bool bf16 : {false, true}) {
      const Layout l{.dp = 4, .stage = 3};
      Config c = stage3(model, l);
      c.zero.param_persistence_threshold = 1000;  // vectors stay whole
      c.bf16.enabled = bf16;
      c.communication_data_type = wire_type_of(c.work_dtype());
      const Trace exact = train(c, l, 20);
      c.zero.quantized_weights = true;
      const Trace t = train(c, l, 20);
      expect_planned(t, 20, "qwZ");
      EXPECT_NE(t.losses, exact.losses);
      for (size_t i = 0; i < t.losses.size(); ++i)
        EXPECT_NEAR(t.losses[i], exact.losses[i], 0.02 * exact.losses[i]) << i;
      // A byte for each element, and four for each block of 256, or of what is left of a slice.
      EXPECT_LT(static_cast<double>(sent(t, "dp.all_gather")),
                static_cast<double>(sent(exact, "dp.all_gather")) * (bf16 ? 0.6 : 0.4));
      // Plans of gathers, buckets and second shards move nothing.
      Config other = c;
      other.zero.prefetch_bucket_size = 0;
      other.zero.max_live_parameters = 0;
      other.zero.overlap_comm = false;
      expect_same_training(train(other, l, 20), t, "without prefetch");
      other = c;
      other.zero.hpz_partition_size = 2;
      const Trace both = train(other, l, 20);
      expect_same_training(both, t, "with second shards");
      expect_planned(both, 20, "both");
      EXPECT_LT(sent(both, "dp.all_gather"), sent(t, "dp.all_gather"));
    }
  }
}

// Frozen layers travel as codes, and nothing else does.
TEST(CodedWeights, OfFrozenLayersAlone) {
  for (const bool tiles : {false, true}) {
    const Layout l{.dp = 2, .pp = tiles ? 1 : 2, .stage = 3};
    Config c = stage3(of_four_heads(tiny_gpt2()), l);
    ParamGroupConfig frozen;
    static_cast<UpdateConfig&>(frozen) = c.optimizer;
    frozen.frozen = true;
    frozen.params = {"transformer.h.1.*"};
    c.optimizer.groups = {frozen};
    if (tiles) c.zero.tile_size = 1500;
    const Trace want = train(c, l);
    c.zero.quantized_nontrainable_weights = true;
    const Trace t = train(c, l);
    expect_planned(t, 4, "frozen layers");
    EXPECT_LT(sent(t, "dp.all_gather"), sent(want, "dp.all_gather"));
    EXPECT_FALSE(same_bits(t.losses, want.losses));
    for (size_t s = 0; s < want.losses.size(); ++s) EXPECT_NEAR(t.losses[s], want.losses[s], 0.01 * want.losses[s]);
    c.zero.quantized_weights = true;
    EXPECT_LT(sent(train(c, l), "dp.all_gather"), sent(t, "dp.all_gather"));
    c.zero.quantized_weights = false;
    c.optimizer.groups[0].params = {"*mlp*"};
    if (tiles) {  // a matrix in tiles is gathered for itself
      const Trace matrices = train(c, l);
      EXPECT_LT(sent(matrices, "dp.all_gather"), sent(want, "dp.all_gather"));
    } else {
      EXPECT_THROW((void)train(c, l), Error);  // of no layer all is frozen
    }
  }
}

TEST(CodedGradients, TrainNearlyAsWell) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const int near : {1, 2, 4}) {
      const Layout l{.dp = 4, .stage = 3};
      Config c = stage3(model, l);
      c.zero.param_persistence_threshold = 1000;  // vectors stay whole
      c.zero.hpz_partition_size = near;
      c.bf16.enabled = true;
      c.communication_data_type = WireType::BF16;
      const Trace exact = train(c, l, 20);
      c.zero.quantized_gradients = true;
      const Trace t = train(c, l, 20);
      const std::string what = fmt::format("near {}", near);
      expect_planned(t, 20, what);
      EXPECT_NE(t.losses, exact.losses);
      for (size_t i = 0; i < t.losses.size(); ++i)
        EXPECT_NEAR(t.losses[i], exact.losses[i], 0.03 * exact.losses[i]) << what << " step " << i;
      // Half a byte for each element, and scales: once to all, or to those near, and of their sums to those across.
      const double whole = static_cast<double>(sent(exact, "dp.reduce_scatter") - sent(t, "dp.reduce_scatter")),
                   hops = near == 2 ? 2.0 / 3 + 1.0 / 3 : 1;
      EXPECT_NEAR(static_cast<double>(sent(t, "dp.all_to_all")) / whole, hops * 0.26, 0.01) << what;
      Config other = c;
      other.zero.reduce_bucket_size = 1;
      other.zero.overlap_comm = false;
      expect_same_training(train(other, l, 20), t, what + " in other buckets");
      other.zero.quantized_weights = true;
      const Trace all = train(other, l, 20);
      expect_planned(all, 20, what + " with coded weights");
      EXPECT_NEAR(all.losses.back(), exact.losses.back(), 0.03 * exact.losses.back());
    }
  }
}

TEST(CodedGradients, GoWithPipelinesAndTensors) {
  const ModelConfig model = of_four_heads(tiny_llama());
  for (const Layout& l : {Layout{.dp = 2, .pp = 2, .stage = 3}, {.dp = 2, .tp = 2, .stage = 3}}) {
    Config c = stage3(model, l);
    c.zero.param_persistence_threshold = 1000;
    const Trace exact = train(c, l);
    c.zero.quantized_gradients = true;
    const Trace t = train(c, l);
    expect_planned(t, 4, l.name());
    EXPECT_NEAR(t.losses.back(), exact.losses.back(), 0.01 * exact.losses.back());
  }
}

// communication_data_type: at any stage, over any ranks; errors are fed back there, too.
TEST(CodedGradients, AreOfEveryStage) {
  for (const Layout& l : {Layout{.dp = 4},
                          {.dp = 4, .stage = 1},
                          {.dp = 4, .stage = 2},
                          {.dp = 4, .stage = 3},
                          {.dp = 2, .pp = 2, .stage = 1},
                          {.dp = 2, .tp = 2, .stage = 2},
                          {.dp = 2, .sp = 2, .stage = 1},
                          {.dp = 2, .sp = 2, .stage = 3}}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      if (work == DType::BF16 && l.stage != 1) continue;
      Config c = config_of(of_four_heads(tiny_gpt2()), l);
      if (l.stage < 2 && work == DType::BF16) c.reduce_order = ReduceOrder::Boundary;
      c.bf16.enabled = work == DType::BF16;
      c.communication_data_type = wire_type_of(work);
      const Trace exact = train(c, l, 20);
      const i64 dense = sent(exact, "dp.reduce_scatter");
      double last = 1;
      for (const auto& [type, tolerance] : {std::pair(WireType::Int4, 0.03), std::pair(WireType::Int8, 0.004)}) {
        c.communication_data_type = type;
        const std::string what = fmt::format("{} {} {} bits", l.name(), dtype_name(work), c.gradient_code_bits());
        const Trace t = train(c, l, 20);
        expect_planned(t, 20, what);
        double most = 0;
        for (size_t i = 0; i < t.losses.size(); ++i) most = std::max(most, std::abs(t.losses[i] / exact.losses[i] - 1));
        EXPECT_LT(most, tolerance) << what;
        EXPECT_GT(most, 0) << what;
        EXPECT_LT(most, last) << what;  // what has more bits errs less
        last = most;
        const double share = static_cast<double>(sent(t, "dp.all_to_all")) / static_cast<double>(dense);
        EXPECT_LT(share * static_cast<double>(dtype_bytes(work)), c.gradient_code_bits() / 8.0 * 1.3) << what;
        c.zero.loco.enabled = true;
        const Trace fed = train(c, l, 20);
        expect_planned(fed, 20, what + ", fed back");
        EXPECT_NE(fed.losses, t.losses) << what;
        for (size_t i = 0; i < t.losses.size(); ++i)
          EXPECT_NEAR(fed.losses[i], exact.losses[i], tolerance * exact.losses[i]) << what;
        c.zero.loco.enabled = false;
      }
    }
  }
}

// Errors are fed back: nothing but losses and memory changes, and the prediction before a run equals the count in it.
TEST(CodedGradients, TrainWithErrorFeedback) {
  for (const int near : {1, 2, 4}) {
    const Layout l{.dp = 4, .stage = 3};
    Config c = stage3(of_four_heads(tiny_gpt2()), l);
    c.zero.param_persistence_threshold = 1000;
    c.zero.hpz_partition_size = near;
    const Trace exact = train(c, l, 20);
    c.zero.quantized_gradients = true;
    const Trace plain = train(c, l, 20);
    c.zero.loco.enabled = true;
    const Trace t = train(c, l, 20);
    const std::string what = fmt::format("near {}", near);
    expect_planned(t, 20, what);
    EXPECT_EQ(t.losses.front(), plain.losses.front()) << what;
    EXPECT_NE(t.losses.back(), plain.losses.back()) << what;
    EXPECT_EQ(sent(t, "dp.all_to_all"), sent(plain, "dp.all_to_all")) << what;
    for (size_t i = 0; i < t.losses.size(); ++i)
      EXPECT_NEAR(t.losses[i], exact.losses[i], 0.03 * exact.losses[i]) << what << " step " << i;
    Config other = c;
    other.zero.reduce_bucket_size = 1;
    other.zero.overlap_comm = false;
    expect_same_training(train(other, l, 20), t, what + " in other buckets");
    // With errors that begin again in each step there is no feedback.
    other.zero.loco.reset_period = 1;
    EXPECT_EQ(train(other, l, 20).losses, plain.losses) << what;
  }
}

// Errors follow the loss scale: with one that grows, losses are those of one that stays, but for what fp16 rounds.
TEST(CodedGradients, ErrorsFollowTheLossScale) {
  const Layout l{.dp = 2, .stage = 3};
  Config c = stage3(of_four_heads(tiny_gpt2()), l);
  c.zero.quantized_gradients = c.zero.loco.enabled = true;
  c.fp16 = {.enabled = true, .loss_scale = 4096};
  c.communication_data_type = WireType::F16;
  const Trace fixed = train(c, l, 10);
  c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 12, .loss_scale_window = 2};
  const Trace growing = train(c, l, 10);
  EXPECT_GE(growing.scales.back(), 16 * growing.scales.front());
  EXPECT_FALSE(growing.skipped.back());
  for (size_t i = 0; i < fixed.losses.size(); ++i)
    EXPECT_NEAR(growing.losses[i], fixed.losses[i], 5e-6 * fixed.losses[i]) << i;
}

// An overflow in 16 bits survives the encoding: the step is skipped, and the scale falls.
TEST(CodedGradients, WhatIsNotFiniteReachesTheLossScaler) {
  const Layout l{.dp = 4, .stage = 3};
  Config c = stage3(of_four_heads(tiny_gpt2()), l);
  c.zero.hpz_partition_size = 2;
  c.zero.quantized_gradients = true;
  c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 24};
  c.communication_data_type = WireType::F16;
  for (const bool loco : {false, true}) {
    c.zero.loco.enabled = loco;
    const Trace t = train(c, l, 20);
    EXPECT_TRUE(t.skipped.front());
    EXPECT_FALSE(t.skipped.back());
    EXPECT_LT(t.scales.back(), t.scales.front());
    EXPECT_LT(t.losses.back(), t.losses.front());
  }
}

}  // namespace zeropp_test
}  // namespace ds::testing
