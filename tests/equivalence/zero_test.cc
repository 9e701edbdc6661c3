// SPDX-License-Identifier: Apache-2.0
// What ARCHITECTURE.md promises: no ZeRO stage, bucket size, overlap or number of threads changes a bit; N ranks
// with m micro-batches are one rank with N*m.

#include <algorithm>

#include "equivalence/training.h"

namespace ds::testing {
namespace {

constexpr i64 kSteps = 6;

struct Precision {
  const char* name;
  bool bf16, fp16;
};
constexpr Precision kPrecisions[] = {{"fp32", false, false}, {"bf16", true, false}, {"fp16", false, true}};

Config with_precision(Config c, const Precision& p) {
  c.bf16.enabled = p.bf16;
  c.fp16.enabled = p.fp16;
  c.fp16.initial_scale_power = 8;
  c.communication_data_type = c.work_dtype();
  return c;
}

class Stages : public ::testing::TestWithParam<std::tuple<int, Precision, bool>> {};

TEST_P(Stages, AllZeroStagesTrainAlikeBitForBit) {
  const auto& [ranks, precision, llama] = GetParam();
  const ModelConfig model = llama ? tiny_llama() : tiny_gpt2();
  Config c = with_precision(tiny_config(model, ranks, 1, 0), precision);
  const Trace base = train_threads(c, ranks, kSteps);
  ASSERT_LT(base.losses.back(), base.losses.front());
  for (i64 stage = 0; stage <= 3; ++stage) {
    for (const i64 bucket : {i64{1}, i64{7000}, i64{500'000'000}}) {
      for (const bool overlap : {true, false}) {
        if (stage == 0 && bucket > 7000 && overlap) continue;  // that is `base`
        Config d = with_precision(tiny_config(model, ranks, 1, stage), precision);
        d.zero.reduce_bucket_size = bucket;
        d.zero.allgather_bucket_size = bucket;
        d.zero.overlap_comm = overlap;
        expect_same_training(train_threads(d, ranks, kSteps), base,
                             fmt::format("stage {} bucket {} overlap {}", stage, bucket, overlap));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, Stages,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::ValuesIn(kPrecisions),
                                            ::testing::Bool()),
                         [](const auto& test) {
                           return fmt::format("P{}_{}_{}", std::get<0>(test.param), std::get<1>(test.param).name,
                                              std::get<2>(test.param) ? "qwen3" : "gpt2");
                         });

// communication_data_type beside any type of parameters.
TEST(Wire, AnyTypeTrainsAlikeAtAllStages) {
  for (const Precision& precision : kPrecisions) {
    const Trace plain = train_threads(with_precision(tiny_config(tiny_gpt2(), 3, 2, 0), precision), 3, kSteps);
    for (const DType wire : {DType::F32, DType::BF16, DType::F16}) {
      const auto configure = [&](i64 stage) {
        Config c = with_precision(tiny_config(tiny_gpt2(), 3, 2, stage), precision);
        c.communication_data_type = wire;
        c.reduce_order = ReduceOrder::Micro;
        return c;
      };
      const std::string what = fmt::format("{} parameters, {} gradients", precision.name, dtype_name(wire));
      const Trace base = train_threads(configure(0), 3, kSteps);
      for (size_t s = 0; s < plain.losses.size(); ++s)
        EXPECT_NEAR(base.losses[s], plain.losses[s], 4e-3 * plain.losses[s]) << what << " step " << s;
      for (i64 stage = 1; stage <= 3; ++stage)
        expect_same_training(train_threads(configure(stage), 3, kSteps), base, fmt::format("{} stage {}", what, stage));
      Config boundary = configure(1);
      boundary.reduce_order = ReduceOrder::Boundary;
      const Trace t = train_threads(boundary, 3, kSteps);
      EXPECT_NEAR(t.losses.back(), base.losses.back(), 4e-3 * base.losses.back()) << what;
    }
  }
}

TEST(Accumulation, RanksTimesMicroBatchesAreOneRankWithAll) {
  for (const Precision& precision : kPrecisions) {
    Config one = with_precision(tiny_config(tiny_gpt2(), 1, 6, 0), precision);
    one.reduce_order = ReduceOrder::Micro;
    const Trace base = train_threads(one, 1, kSteps);
    for (const auto& [ranks, m] : {std::pair{2, 3}, {3, 2}, {6, 1}}) {
      for (i64 stage = 0; stage <= 3; ++stage) {
        Config c = with_precision(tiny_config(tiny_gpt2(), ranks, m, stage), precision);
        c.reduce_order = ReduceOrder::Micro;
        c.zero.reduce_bucket_size = 9000;
        expect_same_training(train_threads(c, ranks, kSteps), base,
                             fmt::format("{} ranks {} micro {} stage {}", precision.name, ranks, m, stage));
      }
    }
  }
}

TEST(Accumulation, BoundaryOrderIsCloseToMicroOrder) {
  Config micro = tiny_config(tiny_gpt2(), 2, 4, 1);
  micro.reduce_order = ReduceOrder::Micro;
  const Trace base = train_threads(micro, 2, 20);
  for (const i64 stage : {0, 1}) {
    const Trace t = train_threads(tiny_config(tiny_gpt2(), 2, 4, stage), 2, 20);
    for (size_t s = 0; s < base.losses.size(); ++s)
      EXPECT_NEAR(t.losses[s], base.losses[s], 1e-5 * base.losses[s]) << s;
  }
}

// The sum of many micro-batches must fit the wire type like the gradient of one: backward divides by them.
TEST(Accumulation, BoundarySumsOverflowNoMoreThanOneMicroBatch) {
  for (const LossNorm norm : {LossNorm::Micro, LossNorm::Token}) {
    for (const i64 m : {1, 32}) {
      Config c = with_precision(tiny_config(tiny_gpt2(), 2, m, 1), {"fp16", false, true});
      c.loss_norm = norm;
      c.fp16.loss_scale = 1 << 17;  // static
      const Trace t = train_threads(c, 2, 3);
      EXPECT_EQ(t.skipped, std::vector<bool>(3, false)) << m;
    }
  }
}

TEST(Accumulation, BoundaryOrderIsTheSameForStagesZeroAndOne) {
  for (const Precision& precision : kPrecisions) {
    const Trace zero = train_threads(with_precision(tiny_config(tiny_gpt2(), 3, 4, 0), precision), 3, kSteps);
    const Trace one = train_threads(with_precision(tiny_config(tiny_gpt2(), 3, 4, 1), precision), 3, kSteps);
    expect_same_training(one, zero, precision.name);
  }
}

TEST(Threads, ResultsDoNotDependOnTheirNumber) {
  for (const Precision& precision : kPrecisions) {
    for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
      const Config c = with_precision(tiny_config(model, 2, 2, 2), precision);
      const Trace base = train_threads(c, 2, kSteps, 1);
      for (const int threads : {2, 3, 5}) {
        expect_same_training(train_threads(c, 2, kSteps, threads), base, fmt::format("{} threads", threads));
      }
    }
  }
}

TEST(GatherKnobs, PrefetchPersistenceAndReuseChangeNoBit) {
  const Trace base = train_threads(tiny_config(tiny_gpt2(), 3, 2, 2), 3, kSteps);
  for (const i64 persistence : {i64{0}, i64{200}, i64{100'000}}) {
    for (const i64 reuse : {i64{0}, i64{20'000}, i64{1'000'000'000}}) {
      for (const i64 prefetch : {i64{0}, i64{20'000}, i64{50'000'000}}) {
        for (const i64 live : {i64{1}, i64{1'000'000'000}}) {
          Config c = tiny_config(tiny_gpt2(), 3, 2, 3);
          c.zero.param_persistence_threshold = persistence;
          c.zero.max_reuse_distance = reuse;
          c.zero.prefetch_bucket_size = prefetch;
          c.zero.max_live_parameters = live;
          expect_same_training(
              train_threads(c, 3, kSteps), base,
              fmt::format("persistence {} reuse {} prefetch {} live {}", persistence, reuse, prefetch, live));
        }
      }
    }
  }
}

TEST(Overflow, IsSkippedAlikeEverywhereAndTouchesNothing) {
  for (i64 stage = 0; stage <= 3; ++stage) {
    Config c = with_precision(tiny_config(tiny_gpt2(), 2, 1, stage), kPrecisions[2]);
    c.fp16.initial_scale_power = 24;  // overflows until the scale has come down
    c.fp16.hysteresis = 1;
    const Trace t = train_threads(c, 2, 16);
    ASSERT_TRUE(t.skipped.front());
    ASSERT_FALSE(t.skipped.back());
    for (size_t s = 1; s < t.skipped.size(); ++s) {
      if (!t.skipped[s - 1]) continue;
      EXPECT_EQ(t.scales[s], t.scales[s - 1] / 2);
      EXPECT_FALSE(std::isfinite(t.norms[s - 1]));
    }
    // The first steps see the same weights, so a model that skipped everything still has its initial weights.
    Config skip_all = c;
    skip_all.fp16.loss_scale = 0x1p40;
    const Trace none = train_threads(skip_all, 2, 2);
    Config initial = c;
    const Trace untouched = train_threads(initial, 2, 0);
    EXPECT_TRUE(same_bits(none.weights, untouched.weights));
    EXPECT_TRUE(same_bits(none.m, untouched.m));
    static Trace first;
    if (stage == 0) first = t;
    expect_same_training(t, first, fmt::format("stage {}", stage));
  }
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, sum = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    sum += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / sum);
}

// The machine that loss_scaler_test scripts (start 16, window 3, hysteresis 2), in training: the gradients of a step
// are unscaled with the scale that its backward pass used, also when its verdict then changes the scale.
TEST(LossScale, StepsThatChangeItUnscaleWithTheScaleTheyUsed) {
  constexpr bool kOverflows[] = {0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1};
  constexpr double kScales[] = {16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 32, 16, 16, 16, 16, 32};
  constexpr i64 kTicks = std::size(kOverflows);
  float healthy = 0;
  const Hooks hooks = {.before_step = [&](engine::Engine& engine, i64 step) {
    f16& weight = *static_cast<f16*>(engine.state(engine.plan().layout.owned_pieces(0)[0]).param);
    if (step > 0 && kOverflows[step - 1]) weight = to_f16(healthy);  // a skipped step publishes no weights
    healthy = to_float(weight);
    if (kOverflows[step]) weight = to_f16(INFINITY);
  }};
  Config c = with_precision(tiny_config(tiny_gpt2(), 1, 1, 0), kPrecisions[2]);
  c.fp16.initial_scale_power = 4;
  c.fp16.loss_scale_window = 3;
  const Trace dynamic = train_threads(c, 1, kTicks, 1, hooks);
  EXPECT_TRUE(std::ranges::equal(dynamic.scales, kScales));
  EXPECT_TRUE(std::ranges::equal(dynamic.skipped, kOverflows));

  // A power of two moves no digit of a gradient but those that fp16 loses near zero.
  c.fp16.loss_scale = 64;
  const Trace constant = train_threads(c, 1, kTicks, 1, hooks);
  EXPECT_EQ(constant.skipped, dynamic.skipped);
  for (size_t s = 0; s < constant.norms.size(); ++s) {
    if (constant.skipped[s]) continue;
    EXPECT_NEAR(dynamic.norms[s], constant.norms[s], 1e-2 * constant.norms[s]) << s;
  }
  EXPECT_LT(relative_error(dynamic.m, constant.m), 1e-2);
  EXPECT_LT(relative_error(dynamic.v, constant.v), 1e-2);
}

TEST(Dropout, DoesNotDependOnTheLayout) {
  ModelConfig model = tiny_gpt2();
  model.attn_dropout = model.resid_dropout = model.embd_dropout = 0.2f;
  Config one = tiny_config(model, 1, 4, 0);
  one.reduce_order = ReduceOrder::Micro;
  const Trace base = train_threads(one, 1, kSteps);
  for (i64 stage = 0; stage <= 3; ++stage) {
    Config c = tiny_config(model, 4, 1, stage);
    c.reduce_order = ReduceOrder::Micro;
    expect_same_training(train_threads(c, 4, kSteps), base, fmt::format("stage {}", stage));
  }
}

TEST(TokenNorm, EqualsTheMeanOverAllValidTokens) {
  Config token = tiny_config(tiny_gpt2(), 2, 2, 1);
  token.loss_norm = LossNorm::Token;
  token.reduce_order = ReduceOrder::Micro;
  Config one = tiny_config(tiny_gpt2(), 1, 4, 0);
  one.loss_norm = LossNorm::Token;
  one.reduce_order = ReduceOrder::Micro;
  const Trace t = train_threads(token, 2, kSteps);
  expect_same_training(t, train_threads(one, 1, kSteps), "token norm");
  one.loss_norm = LossNorm::Micro;
  EXPECT_NE(t.losses.front(), train_threads(one, 1, 1).losses.front());  // micro-batches have unequal counts
}

}  // namespace
}  // namespace ds::testing
