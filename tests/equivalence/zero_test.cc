// SPDX-License-Identifier: Apache-2.0
// The promises of ARCHITECTURE.md: no ZeRO stage, bucket size, overlap or number of threads changes a bit; N ranks
// with m micro-batches are one rank with N*m.

#include <algorithm>
#include <numbers>

#include "equivalence/training.h"
#include "slow_set.h"

namespace ds::testing {
namespace zero_test {

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
  c.communication_data_type = wire_type_of(c.work_dtype());
  return c;
}

class Stages : public ::testing::TestWithParam<std::tuple<int, Precision, Family>> {};

TEST_P(Stages, AllZeroStagesTrainAlikeBitForBit) {
  const auto& [ranks, precision, family] = GetParam();
  ModelConfig model = tiny_gpt2();
  if (family == Family::Qwen3) model = tiny_llama();
  if (family == Family::Bert) model = tiny_bert();
  const auto configure = [&](i64 stage) {
    Config c = with_precision(tiny_config(model, ranks, 1, stage), precision);
    if (family == Family::Bert) c.optimizer.lr = 1e-2;  // post-LayerNorm blocks begin slowly
    return c;
  };
  const Config c = configure(0);
  const Trace base = train_threads(c, ranks, kSteps);
  ASSERT_LT(base.losses.back(), base.losses.front());
  ASSERT_GT(base.norms.front(), c.gradient_clipping);  // so that clipping takes part in what is compared
  for (i64 stage = 0; stage <= 3; ++stage) {
    for (const i64 bucket : {i64{1}, i64{7000}, i64{500'000'000}}) {
      for (const bool overlap : {true, false}) {
        if (stage == 0 && bucket > 7000 && overlap) continue;  // that is `base`
        Config d = configure(stage);
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
                                            ::testing::Values(Family::Gpt2, Family::Qwen3, Family::Bert)),
                         [](const auto& test) {
                           return fmt::format("P{}_{}_{}", std::get<0>(test.param), std::get<1>(test.param).name,
                                              family_name(std::get<2>(test.param)));
                         });

// communication_data_type beside any type of parameters.
TEST(Wire, AnyTypeTrainsAlikeAtAllStages) {
  for (const Precision& precision : kPrecisions) {
    const Trace plain = train_threads(with_precision(tiny_config(tiny_gpt2(), 3, 2, 0), precision), 3, kSteps);
    for (const DType wire : {DType::F32, DType::BF16, DType::F16}) {
      const auto configure = [&](i64 stage) {
        Config c = with_precision(tiny_config(tiny_gpt2(), 3, 2, stage), precision);
        c.communication_data_type = wire_type_of(wire);
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

// "boundary" rounds to the wire type, not each gradient but the sum of each rank, an error of at most u (2^-24, 2^-8,
// 2^-11) of it. So the first norm differs by less than 2u, for the norms of two ranks add up to less than twice that of
// their sum. The update of a weight, a quotient of gradients, differs by about 2u of itself, and so does what the loss
// has fallen by: less than half of it, which leaves u of the loss. Later norms are of other weights: they only show
// that no sum of an earlier step is still there.
TEST(Accumulation, BoundaryOrderIsCloseToMicroOrder) {
  for (const Precision& precision : kPrecisions) {
    const double u = precision.bf16 ? 0x1p-8 : precision.fp16 ? 0x1p-11 : 0x1p-24;
    for (const LossNorm norm : {LossNorm::Micro, LossNorm::Token}) {
      const auto train = [&](i64 stage, ReduceOrder order) {
        Config c = with_precision(tiny_config(tiny_gpt2(), 2, 4, stage), precision);
        c.fp16.loss_scale = 256;
        c.loss.norm = norm;
        c.reduce_order = order;
        return train_threads(c, 2, 20);
      };
      const Trace base = train(1, ReduceOrder::Micro);
      ASSERT_EQ(std::ranges::count(base.skipped, true), 0);
      for (const i64 stage : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} stage {} norm {}", precision.name, stage, static_cast<int>(norm)));
        const Trace t = train(stage, ReduceOrder::Boundary);
        EXPECT_EQ(t.skipped, base.skipped);
        EXPECT_DOUBLE_EQ(t.losses.front(), base.losses.front());
        EXPECT_NEAR(t.norms.front(), base.norms.front(), 2 * u * base.norms.front());
        for (size_t s = 1; s < base.losses.size(); ++s) {
          EXPECT_NEAR(t.losses[s], base.losses[s], u * base.losses[s]) << s;
          EXPECT_NEAR(t.norms[s], base.norms[s], 16 * u * base.norms[s]) << s;
        }
      }
    }
  }
}

// The sum of many micro-batches must fit the wire type like the gradient of one: backward divides by them.
TEST(Accumulation, BoundarySumsOverflowNoMoreThanOneMicroBatch) {
  for (const LossNorm norm : {LossNorm::Micro, LossNorm::Token}) {
    for (const i64 m : {1, 32}) {
      Config c = with_precision(tiny_config(tiny_gpt2(), 2, m, 1), {"fp16", false, true});
      c.loss.norm = norm;
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
    for (const ModelConfig& model : {tiny_gpt2(), tiny_llama(), tiny_bert()}) {
      const Config c = with_precision(tiny_config(model, 2, 2, 2), precision);
      const Trace base = train_threads(c, 2, kSteps, 1);
      for (const int threads : {2, 3, 5}) {
        expect_same_training(train_threads(c, 2, kSteps, threads), base, fmt::format("{} threads", threads));
      }
    }
  }
}

TEST(GatherKnobs, PrefetchPersistenceAndReuseChangeNoBit) {
  test::EveryNth tried(5);
  const Trace base = train_threads(tiny_config(tiny_gpt2(), 3, 2, 2), 3, kSteps);
  for (const i64 persistence : {i64{0}, i64{200}, i64{100'000}}) {
    for (const i64 reuse : {i64{0}, i64{20'000}, i64{1'000'000'000}}) {
      for (const i64 prefetch : {i64{0}, i64{20'000}, i64{50'000'000}}) {
        for (const i64 live : {i64{1}, i64{1'000'000'000}}) {
          if (!tried()) continue;
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
  for (const auto& [model, ranks] : {std::pair{tiny_gpt2(), 2}, {tiny_llama(), 3}}) {
    Trace first;
    for (i64 stage = 0; stage <= 3; ++stage) {
      Config c = with_precision(tiny_config(model, ranks, 1, stage), kPrecisions[2]);
      c.fp16.initial_scale_power = 24;  // overflows until the scale has come down
      c.fp16.hysteresis = 1;
      const Trace t = train_threads(c, ranks, 16);
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
      const Trace none = train_threads(skip_all, ranks, 2);
      const Trace untouched = train_threads(c, ranks, 0);
      EXPECT_TRUE(same_bits(none.weights, untouched.weights));
      EXPECT_TRUE(same_bits(none.logits, untouched.logits));
      EXPECT_TRUE(same_bits(none.states[State::ExpAvg], untouched.states[State::ExpAvg]));
      if (stage == 0) first = t;
      expect_same_training(t, first, fmt::format("{} ranks stage {}", ranks, stage));
    }
  }
}

// Step by step the learning rate of the closed formula over the updates applied so far, -1 before the first: steps
// skipped at the start and, with a scale that soon grows again, later ones do not tick.
TEST(Schedule, FollowsTheUpdatesAppliedAndNotTheStepsTaken) {
  constexpr i64 W = 4, kTotal = 9;
  constexpr double kMin = 1e-4, kMax = 2e-3, kMinRatio = 0.1, kCosMinRatio = 0.01;
  for (const SchedulerType type : {SchedulerType::WarmupLR, SchedulerType::WarmupCosineLR}) {
    for (const WarmupType warmup : {WarmupType::Log, WarmupType::Linear}) {
      Config c = with_precision(tiny_config(tiny_gpt2(), 2, 1, 1), kPrecisions[2]);
      c.fp16.initial_scale_power = 24;
      c.fp16.hysteresis = 1;
      c.fp16.loss_scale_window = 2;
      c.scheduler = {.type = type,
                     .warmup_type = warmup,
                     .warmup_num_steps = W,
                     .warmup_min_lr = kMin,
                     .warmup_max_lr = kMax,
                     .total_num_steps = kTotal,
                     .warmup_min_ratio = kMinRatio,
                     .cos_min_ratio = kCosMinRatio};
      const Trace t = train_threads(c, 2, 32);
      i64 applied = 0, skipped_later = 0;
      for (size_t s = 0; s < t.lrs.size(); ++s) {
        const double tick = static_cast<double>(applied - 1);
        const double share = warmup == WarmupType::Log ? std::log(tick + 1) / std::log(W) : tick / W;
        const double decayed = std::min(1.0, (tick - W + 1) / (kTotal - W));
        double want = 0;
        if (type == SchedulerType::WarmupLR) {
          want = tick < 0 ? kMin : tick < W ? kMin + (kMax - kMin) * share : kMax;
        } else if (tick >= 0) {
          const double ratio = tick < W
                                   ? kMinRatio + (1 - kMinRatio) * share
                                   : kCosMinRatio + (1 - kCosMinRatio) * (1 + std::cos(std::numbers::pi * decayed)) / 2;
          want = c.optimizer.lr * ratio;
        }
        EXPECT_NEAR(t.lrs[s], want, 1e-12 * want) << "step " << s << " after " << applied << " updates";
        skipped_later += t.skipped[s] && applied > 0;
        applied += t.skipped[s] ? 0 : 1;
      }
      EXPECT_TRUE(t.skipped.front());
      EXPECT_GT(skipped_later, 0);
      EXPECT_GT(applied, kTotal + 1);
    }
  }
}

// DeepSpeed's WarmupLR from 0 has two updates of rate 0: before the first tick, and at the start of the ramp.
TEST(Schedule, WarmupFromZeroLeavesTheWeightsForTwoUpdates) {
  Config c = tiny_config(tiny_gpt2(), 2, 1, 2);
  c.scheduler = {.type = SchedulerType::WarmupLR, .warmup_num_steps = 4, .warmup_max_lr = 1e-3};
  const std::vector<float> initial = train_threads(c, 2, 0).weights;
  EXPECT_TRUE(same_bits(train_threads(c, 2, 2).weights, initial));
  EXPECT_FALSE(same_bits(train_threads(c, 2, 3).weights, initial));
}

// The first update of AdamW in closed form. Both moments are multiples of the same gradient, so that its size cancels.
TEST(AdamW, FirstUpdateWithoutBiasCorrectionHasOneSize) {
  Config c = tiny_config(tiny_gpt2(), 1, 1, 0);
  c.optimizer.bias_correction = false;
  c.optimizer.eps = 1e-30f;
  c.optimizer.weight_decay = 0;
  const std::vector<float> before = train_threads(c, 1, 0).weights;
  const Trace t = train_threads(c, 1, 1);
  const double want = c.optimizer.lr * (1 - c.optimizer.beta1) / std::sqrt(1 - c.optimizer.beta2);
  size_t moved = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const double step = static_cast<double>(t.weights[i]) - static_cast<double>(before[i]);
    if (std::fabs(t.states[State::ExpAvg][i]) < 1e-15f) continue;  // the square of such a gradient leaves fp32
    EXPECT_NEAR(std::abs(step), want, 2e-5 * want) << i;  // half a unit of the last place of a weight of 1 is 6e-6
    EXPECT_LT(step * static_cast<double>(t.states[State::ExpAvg][i]), 0) << i;
    ++moved;
  }
  EXPECT_GT(moved, before.size() * 9 / 10);
}

TEST(AdamW, DecayEntersTheGradientOnlyWithoutAdamWMode) {
  for (const bool adam_w : {false, true}) {
    Config c = tiny_config(tiny_gpt2(), 1, 1, 0);
    c.optimizer.adam_w_mode = adam_w;
    c.optimizer.weight_decay = 1000;
    const std::vector<float> before = train_threads(c, 1, 0).weights;
    const Trace t = train_threads(c, 1, 1);
    double largest = 0, largest_weight = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(t.weights[i]) - static_cast<double>(before[i])));
      if (before[i] != 1) largest_weight = std::max(largest_weight, std::abs(static_cast<double>(before[i])));
    }
    if (adam_w) {  // decoupled: lr (+-1 + 1000 w)
      EXPECT_NEAR(largest, c.optimizer.lr * 1000 * largest_weight, 1.01 * c.optimizer.lr);
      EXPECT_GT(largest, 10 * c.optimizer.lr);
    } else {  // L2: the gradient's size cancels, whatever it is made of
      EXPECT_LE(largest, c.optimizer.lr * (1 + 1e-5));
      EXPECT_GT(largest, c.optimizer.lr * (1 - 1e-5));
    }
  }
}

// From zero, the first moment is (1 - beta1) times the clipped mean gradient.
TEST(Clipping, ShortensTheGradientOfTheWorldToTheLimit) {
  for (i64 stage = 0; stage <= 3; ++stage) {
    Config c = tiny_config(tiny_llama(), 3, 2, stage);
    c.gradient_clipping = 0;
    const double norm = train_threads(c, 3, 1).norms.front();
    for (const double clip : {norm / 5, 5 * norm}) {
      c.gradient_clipping = clip;
      const Trace t = train_threads(c, 3, 1);
      EXPECT_NEAR(t.norms.front(), norm, 1e-12 * norm);  // reported as it was before clipping
      double squares = 0;
      for (const float x : t.states[State::ExpAvg]) squares += static_cast<double>(x) * static_cast<double>(x);
      const double want = (1 - c.optimizer.beta1) * std::min(norm, clip);
      EXPECT_NEAR(std::sqrt(squares), want, 1e-5 * want) << "stage " << stage << " clip " << clip;
    }
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
    f16& weight = *static_cast<f16*>(engine.lease(engine.plan().dp().layout.owned_pieces(0)[0])[State::Param]);
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
  EXPECT_LT(relative_error(dynamic.states[State::ExpAvg], constant.states[State::ExpAvg]), 1e-2);
  EXPECT_LT(relative_error(dynamic.states[State::ExpAvgSq], constant.states[State::ExpAvgSq]), 1e-2);
}

// Messages so large that ranks read each other's memory in place; those of the tiny models go through staging areas.
class InPlace : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(InPlace, StagesOverlapAndBucketsChangeNoBit) {
  constexpr i64 kDirectBytes = 256 << 10;  // of libds/comm/shared_communicator.cc
  const auto& [ranks, bf16] = GetParam();
  const int P = ranks;
  const bool is_bf16 = bf16;
  const auto configure = [&](int on, i64 m, i64 stage, i64 bucket, bool overlap) {
    ModelConfig model = tiny_gpt2();
    model.vocab_size = 19;
    model.hidden = 224;
    model.layers = 2;
    model.heads = model.kv_heads = 4;
    model.head_dim = 56;
    model.intermediate = 4 * 224;
    Config c = with_precision(tiny_config(model, on, m, stage), kPrecisions[is_bf16 ? 1 : 0]);
    c.data.seq_length = 5;
    c.reduce_order = ReduceOrder::Micro;
    c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = bucket;
    c.zero.overlap_comm = overlap;
    return c;
  };
  const Trace base = train_threads(configure(1, 2 * P, 0, 1, false), 1, 2);  // one rank sends nothing
  for (i64 stage = 0; stage <= 3; ++stage) {
    for (const i64 bucket : {1, 700'000}) {
      const Config c = configure(P, 2, stage, bucket, true);
      const model::Model model = model::make_model(c.model, c.data.seq_length);
      const plan::RunPlan plan = plan::make_run_plan(c, model, {.dp = P}, {});
      // A reduce-scatter exposes the P slices of its units, an all-gather one slice: a block is enough for either.
      for (const i64 block : {1, 2}) {
        const i64 slice_bytes =
            plan.dp().layout.units()[plan::RunPlan::unit_of(block)].padded / P * dtype_bytes(plan.work);
        ASSERT_GT(slice_bytes, kDirectBytes);
        ASSERT_EQ(plan.wire, plan.work);
      }
      ASSERT_EQ(plan.dp().buckets.size(),
                bucket == 1 ? 4u : 2u);  // each layer, or [head, block 1] and [block 0, embedding]
      for (const bool overlap : {true, false}) {
        expect_same_training(train_threads(configure(P, 2, stage, bucket, overlap), P, 2), base,
                             fmt::format("stage {} bucket {} overlap {}", stage, bucket, overlap));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, InPlace, ::testing::Combine(::testing::Values(2, 3), ::testing::Bool()),
                         [](const auto& test) {
                           return fmt::format("P{}_{}", std::get<0>(test.param),
                                              std::get<1>(test.param) ? "bf16" : "fp32");
                         });

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

// Two equal micro-batches have different masks, and so different losses; without dropout they are one.
TEST(Dropout, MasksDifferFromMicroBatchToMicroBatch) {
  for (const float dropout : {0.0f, 0.2f}) {
    ModelConfig model = tiny_gpt2();
    model.resid_dropout = dropout;
    const auto loss_of = [&](i64 m) {
      const Config c = tiny_config(model, 1, m, 0);
      double loss = 0;
      with_engines(c, 1, [&](engine::Engine& engine) {
        const std::vector<i32> ids(static_cast<size_t>(m * c.batch.micro * c.data.seq_length), 1),
            targets(ids.size(), 2);
        loss = engine.train_step({ids, targets}).loss;
      });
      return loss;
    };
    if (dropout == 0) {
      EXPECT_EQ(loss_of(2), loss_of(1));
    } else {
      EXPECT_NE(loss_of(2), loss_of(1));
    }
  }
}

// The report of a step and its counts, on meshes whose numbers of samples and tokens differ.
TEST(StepReport, CountsStepsSamplesAndTokens) {
  for (const auto& [ranks, sp, accumulation] : {std::tuple{1, 1, 3}, {2, 1, 3}, {4, 2, 2}}) {
    ModelConfig model = of_four_heads(tiny_gpt2());
    Config c = tiny_config(model, ranks / sp, accumulation, 1);
    c.sequence_parallel.size = sp;
    c.data.seq_length = 14;
    const i64 B = c.batch.micro, T = c.data.seq_length, m = accumulation, P = ranks / sp;
    with_engines(c, ranks, [&](engine::Engine& engine) {
      const std::vector<i32> ids(static_cast<size_t>(m * B * T), 1), targets(ids.size(), 2);
      for (i64 step = 1; step <= 2; ++step) {
        const StepRecord report = engine.train_step({ids, targets});
        EXPECT_EQ(report.step, step);
        EXPECT_EQ(report.tokens, B * T * m * P);
        EXPECT_EQ(engine.progress().step, step);
        EXPECT_EQ(engine.progress().consumed_samples, step * B * m * P);
      }
    });
  }
}

// The mean over the tokens that count is their own loss, however few there are, in both norms; a micro-batch without
// any adds nothing.
TEST(TokenNorm, OfOneTokenIsItsLoss) {
  for (const LossNorm norm : {LossNorm::Token, LossNorm::Micro}) {
    Config c = tiny_config(tiny_gpt2(), 1, 2, 0);
    c.loss.norm = norm;
    with_engines(c, 1, [&](engine::Engine& engine) {
      const size_t rows = static_cast<size_t>(c.batch.micro * c.data.seq_length);
      std::vector<i32> ids(2 * rows, 1), targets(ids.size(), -100);
      targets[5] = 3;
      const std::optional<double> alone =
          engine.evaluate(1, [&](i64, std::span<i32> i, std::span<i32> t, std::span<i32>) {
            std::copy_n(ids.begin(), rows, i.begin());
            std::copy_n(targets.begin(), rows, t.begin());
            return true;
          });
      const double loss = engine.train_step({ids, targets}).loss;
      EXPECT_GT(*alone, 1.0);
      EXPECT_NEAR(loss, norm == LossNorm::Token ? *alone : *alone / 2, 1e-6);
      targets[5] = -100;  // none at all
      EXPECT_EQ(engine.train_step({ids, targets}).loss, 0);
    });
  }
}

TEST(TokenNorm, EqualsTheMeanOverAllValidTokens) {
  Config token = tiny_config(tiny_gpt2(), 2, 2, 1);
  token.loss.norm = LossNorm::Token;
  token.reduce_order = ReduceOrder::Micro;
  Config one = tiny_config(tiny_gpt2(), 1, 4, 0);
  one.loss.norm = LossNorm::Token;
  one.reduce_order = ReduceOrder::Micro;
  const Trace t = train_threads(token, 2, kSteps);
  expect_same_training(t, train_threads(one, 1, kSteps), "token norm");
  one.loss.norm = LossNorm::Micro;
  EXPECT_NE(t.losses.front(), train_threads(one, 1, 1).losses.front());  // micro-batches have unequal counts
}

}  // namespace zero_test
}  // namespace ds::testing
