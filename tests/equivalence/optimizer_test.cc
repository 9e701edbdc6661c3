// SPDX-License-Identifier: Apache-2.0
// Every optimizer keeps the promises of the README: no ZeRO stage, number of ranks or stage of a pipeline moves a bit,
// and ranks of tp train as one up to rounding. A new optimizer is a row of kOptimizers (optimizers.h).

#include "equivalence/optimizers.h"

namespace ds::testing {
namespace optimizer_test {

constexpr i64 kSteps = 5;

class Optimizers : public ::testing::TestWithParam<OptimizerCase> {
 protected:
  static Config config(const ModelConfig& model, const Layout& l, bool bf16 = false) {
    Config c = config_of(model, l, 4);
    if (GetParam().rounds_states) c.model.intermediate = 100;  // matrices of 4800 elements: no multiple of a block
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    c.gradient_clipping = 1;
    GetParam().choose(c.optimizer);
    return c;
  }
  static Trace train(const ModelConfig& model, const Layout& l, bool bf16 = false) {
    return train_threads(config(model, l, bf16), l.ranks(), kSteps);
  }
};

TEST_P(Optimizers, NoLayoutMovesABit) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const bool bf16 : {false, true}) {
      const Trace one = train(model, {}, bf16);
      ASSERT_LT(one.losses.back(), one.losses.front());
      ASSERT_TRUE(std::isfinite(one.losses.back()));
      for (const Layout& l : {Layout{.stage = 1},
                              {.stage = 3},
                              {.dp = 2, .stage = 0},
                              {.dp = 2, .stage = 1},
                              {.dp = 2, .stage = 2},
                              {.dp = 2, .stage = 3},
                              {.dp = 4, .stage = 3},
                              {.pp = 2, .stage = 1},
                              {.dp = 2, .pp = 2, .stage = 3}}) {
        const Trace t = train(model, l, bf16);
        expect_same_training(t, one, l.name());
        expect_planned(t, kSteps, l.name());
      }
    }
  }
}

// Parameters that are their own masters, with sums in 16 bits: every rank's sums are rounded with each micro-batch, so
// layouts of the same data-parallel ranks are alike, whatever their ZeRO stage, their stages of a pipeline and the tier
// of their states.
TEST_P(Optimizers, NoLayoutMovesABitWithoutMasters) {
  if (any_optimizer(GetParam(), &OptimizerRow::needs_matrices)) return;  // the configuration refuses it
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    for (const bool stochastic : {false, true}) {
      for (const int dp : {1, 2}) {
        const auto without_masters = [&](const Layout& l) {
          Config c = config(model, l, true);
          c.bf16.bf16_master_weights_and_grads = true;
          c.bf16.stochastic_rounding = stochastic;
          c.grad_accum_dtype = DType::BF16;
          c.reduce_order = ReduceOrder::Micro;
          const Trace t = train_threads(c, l.ranks(), kSteps);
          expect_planned(t, kSteps, l.name());
          return t;
        };
        const Trace one = without_masters({.dp = dp});
        ASSERT_LT(one.losses.back(), one.losses.front());
        ASSERT_TRUE(std::isfinite(one.losses.back()));
        EXPECT_EQ(one.counted[static_cast<size_t>(Tag::Master)], 0);
        for (const Layout& l : {Layout{.dp = dp, .stage = 1},
                                {.dp = dp, .stage = 2},
                                {.dp = dp, .stage = 3},
                                {.dp = dp, .pp = 2, .stage = 1}})
          expect_same_training(without_masters(l), one, fmt::format("{} stochastic {}", l.name(), stochastic));
      }
    }
  }
}

TEST_P(Optimizers, RanksThatShareLayersTrainAsOne) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    const Trace one = train(model, {});
    // A sign that turns moves a weight by two steps of the rate.
    const bool signs = std::string_view(GetParam().name) == "Lion" || GetParam().rounds_states;
    const Tolerance tolerance = signs ? Tolerance{.loss = 1e-3, .first_norm = 1e-5, .norm = 2e-2} : Tolerance{};
    for (const Layout& l : {Layout{.tp = 2}, {.dp = 2, .tp = 2, .stage = 2}, {.tp = 2, .sp = 2}, {.pp = 2, .tp = 2}}) {
      const Trace t = train(model, l);
      expect_close(t, one, l.name(), tolerance);
      expect_planned(t, kSteps, l.name());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Optimizers, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

// OneCycle with a constant momentum trains like the same momentum in betas, with every optimizer that uses betas.
TEST(OneCycle, MovesTheBetasOfEveryOptimizerThatHasThem) {
  for (const OptimizerType type : {OptimizerType::AdamW, OptimizerType::Lion, OptimizerType::Lamb}) {
    Config given = config_of(of_four_heads(tiny_gpt2()), {}, 4);
    given.optimizer.type = type;
    given.optimizer.lr = 1e-3;
    Config cycled = given;
    given.optimizer.beta1 = 0.5, given.optimizer.beta2 = 0.99;
    cycled.scheduler.type = SchedulerType::OneCycle;
    cycled.scheduler.cycle_min_lr = cycled.scheduler.cycle_max_lr = 1e-3;
    cycled.scheduler.cycle_min_mom = cycled.scheduler.cycle_max_mom = 0.5;
    cycled.scheduler.cycle_first_step_size = cycled.scheduler.cycle_second_step_size = 2;
    expect_same_training(train_threads(cycled, 1, kSteps), train_threads(given, 1, kSteps),
                         std::to_string(static_cast<int>(type)));
    cycled.scheduler.cycle_max_mom = 0.9;  // and it does move
    EXPECT_NE(train_threads(cycled, 1, kSteps).weights, train_threads(given, 1, kSteps).weights);
  }
}

// Smoothed targets and z-loss: no layout moves a bit but tp, and evaluations have the plain loss.
TEST(TermsOfTheLoss, TrainAlikeEverywhere) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    const auto train = [&](const Layout& l, double smoothing, double z_loss) {
      Config c = config_of(model, l, 4);
      c.loss.label_smoothing = smoothing, c.loss.z_loss = z_loss;
      return train_threads(c, l.ranks(), kSteps);
    };
    const Trace one = train({}, 0.1, 1e-3), plain = train({}, 0, 0);
    ASSERT_LT(one.losses.back(), one.losses.front());
    EXPECT_GT(one.losses[0], plain.losses[0]);
    EXPECT_NE(one.weights, plain.weights);
    for (const Layout& l : {Layout{.stage = 3}, {.dp = 2, .stage = 2}, {.pp = 2}, {.sp = 2}}) {
      const Trace t = train(l, 0.1, 1e-3);
      if (l.sp > 1) {
        expect_close(t, one, l.name());
      } else {
        expect_same_training(t, one, l.name());
      }
    }
    for (const Layout& l : {Layout{.tp = 2}, {.dp = 2, .tp = 2, .stage = 2}})
      expect_close(train(l, 0.1, 1e-3), one, l.name());
  }
}

// Logits in 16 bits: no layout moves a bit but tp, and training is that of logits in fp32 but for their rounding.
TEST(LogitsIn16Bits, TrainAlikeEverywhere) {
  for (const ModelConfig& model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    const auto train = [&](const Layout& l, DType logits) {
      Config c = config_of(model, l, 4);
      c.bf16.enabled = true;
      c.communication_data_type = WireType::BF16;
      c.loss.logits = logits;
      return train_threads(c, l.ranks(), kSteps);
    };
    const Trace one = train({}, DType::BF16), plain = train({}, DType::F32);
    ASSERT_LT(one.losses.back(), one.losses.front());
    EXPECT_NE(one.losses, plain.losses);
    for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(one.losses[i], plain.losses[i], 0.01);
    for (const Layout& l : {Layout{.stage = 3}, {.dp = 2, .stage = 2}, {.pp = 2}})
      expect_same_training(train(l, DType::BF16), train({.dp = l.dp, .stage = l.stage}, DType::BF16), l.name());
    for (const Layout& l : {Layout{.tp = 2}, {.dp = 2, .tp = 2, .stage = 2}}) {
      const Trace t = train(l, DType::BF16);
      for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(t.losses[i], one.losses[i], 0.01) << l.name();
    }
  }
}

// The sum of gradients over ranks is so many times their mean.
TEST(GradientReduce, ASumIsSoManyTimesTheMean) {
  for (const i64 stage : {0, 3}) {
    Config c = config_of(of_four_heads(tiny_gpt2()), {.dp = 2, .stage = stage}, 4);
    c.gradient_clipping = 0;
    const Trace mean = train_threads(c, 2, 1);
    c.gradient_reduce = GradientReduce::Sum;
    const Trace sum = train_threads(c, 2, 1);
    EXPECT_EQ(sum.losses, mean.losses);
    EXPECT_EQ(sum.norms[0], 2 * mean.norms[0]);
  }
}

// Bytes of the states of optimizers on one rank.
i64 state_bytes(void (*choose)(OptimizerConfig&), const Layout& l, const ModelConfig& model) {
  Config c = config_of(model, l, 4);
  choose(c.optimizer);
  const Trace t = train_threads(c, l.ranks(), 1);
  EXPECT_EQ(t.counted[static_cast<size_t>(Tag::Optimizer)], t.predicted[static_cast<size_t>(Tag::Optimizer)]);
  return t.counted[static_cast<size_t>(Tag::Optimizer)];
}

TEST(NarrowStates, TakeTheBytesThatTheyAreSaidToTake) {
  ModelConfig model = of_four_heads(tiny_gpt2());
  model.hidden = 96, model.head_dim = 24, model.intermediate = 384;  // 97 % of it in matrices of 4096 elements or more
  for (const Layout& l : {Layout{}, {.dp = 2, .stage = 0}, {.dp = 2, .stage = 3}, {.tp = 2}}) {
    const i64 exact = state_bytes([](OptimizerConfig&) {}, l, model);
    const i64 coded = state_bytes([](OptimizerConfig& o) { o.type = OptimizerType::AdamW8bit; }, l, model);
    const i64 bf16 = state_bytes([](OptimizerConfig& o) { o.state_dtype = StateDtype::BF16; }, l, model);
    EXPECT_LT(static_cast<double>(coded), 0.28 * static_cast<double>(exact)) << l.name();
    EXPECT_GT(static_cast<double>(coded), 0.254 * static_cast<double>(exact)) << l.name();
    EXPECT_NEAR(static_cast<double>(bf16), 0.5 * static_cast<double>(exact), 0.02 * static_cast<double>(exact))
        << l.name();
  }
}

// Sums in 16 bits alone, and masters, too: half the bytes, and none; "boundary" and "micro", every stage of ZeRO.
TEST(OwnMasters, TakeTheBytesThatTheyAreSaidToTake) {
  const auto bytes = [](const Trace& t, Tag tag) { return t.counted[static_cast<size_t>(tag)]; };
  for (const i64 stage : {0, 1, 2, 3}) {
    for (const ReduceOrder order : {ReduceOrder::Boundary, ReduceOrder::Micro}) {
      if (stage >= 2 && order == ReduceOrder::Boundary) continue;
      for (const DType work : {DType::BF16, DType::F16}) {
        const auto train = [&](bool sums, bool masters) {
          Config c = config_of(of_four_heads(tiny_gpt2()), {.dp = 2, .stage = stage}, 4);
          (work == DType::BF16 ? c.bf16.enabled : c.fp16.enabled) = true;
          c.fp16.initial_scale_power = 8;
          c.communication_data_type = wire_type_of(work);
          c.reduce_order = order;
          if (sums) c.grad_accum_dtype = work;
          (work == DType::BF16 ? c.bf16.bf16_master_weights_and_grads : c.fp16.fp16_master_weights_and_grads) = masters;
          const Trace t = train_threads(c, 2, kSteps);
          expect_planned(t, kSteps, fmt::format("stage {} sums {} masters {}", stage, sums, masters));
          EXPECT_LT(t.losses.back(), t.losses.front());
          return t;
        };
        const Trace exact = train(false, false), sums = train(true, false), none = train(true, true);
        EXPECT_EQ(2 * bytes(sums, Tag::GradAccum), bytes(exact, Tag::GradAccum));
        EXPECT_EQ(bytes(sums, Tag::Master), bytes(exact, Tag::Master));
        EXPECT_EQ(bytes(none, Tag::GradAccum), bytes(sums, Tag::GradAccum));
        EXPECT_EQ(bytes(none, Tag::Master), 0);
        EXPECT_EQ(bytes(none, Tag::Optimizer), bytes(exact, Tag::Optimizer));
        EXPECT_NE(sums.weights, exact.weights);
        EXPECT_NEAR(sums.losses.back(), exact.losses.back(), 0.02);
        EXPECT_NEAR(none.losses.back(), exact.losses.back(), 0.1);
      }
    }
  }
}

TEST(NarrowStates, AreUntouchedByASkippedStep) {
  for (const bool coded : {true, false}) {
    std::vector<u8> before;
    const auto bytes_of = [](engine::Engine& engine) {
      std::vector<u8> bytes;
      for (const zero::Piece& piece : engine.held_pieces()) {
        const auto state = engine.lease(piece);
        for (const State s : kOptimizerStates) {
          if (state[s] == nullptr) continue;
          const TensorView v = state.view(s, piece.count);
          bytes.insert(bytes.end(), v.as<u8>(), v.as<u8>() + v.bytes());
          if (v.scale == nullptr) continue;
          const auto* const scales = reinterpret_cast<const u8*>(v.scale);
          bytes.insert(bytes.end(), scales, scales + 4 * state_blocks(piece.count));
        }
      }
      return bytes;
    };
    i64 skipped = 0;
    const Hooks hooks = {.before_step =
                             [&](engine::Engine& engine, i64 step) {
                               f16& weight = *static_cast<f16*>(
                                   engine.lease(engine.plan().dp().layout.owned_pieces(0)[0])[State::Param]);
                               if (step == 2) weight = to_f16(INFINITY);
                               before = bytes_of(engine);
                             },
                         .after_step =
                             [&](engine::Engine& engine, i64 step) {
                               EXPECT_EQ(before == bytes_of(engine), step == 2) << step;
                               skipped += engine.progress().skipped_steps;
                             }};
    Config c = tiny_config(tiny_gpt2(), 1, 1, 0);
    c.fp16.enabled = true;
    c.communication_data_type = WireType::F16;
    if (coded) {
      c.optimizer.type = OptimizerType::AdamW8bit;
    } else {
      c.optimizer.state_dtype = StateDtype::BF16;
    }
    train_threads(c, 1, 3, 1, hooks);
    EXPECT_EQ(skipped, 1);
  }
}

// A number that is none shows, whatever its state is kept in.
TEST(NarrowStates, ThatAreNoNumbersAreFound) {
  for (const State s : {State::ExpAvg, State::ExpAvgSq}) {
    for (const bool coded : {true, false}) {
      Config c = tiny_config(tiny_gpt2(), 1, 1, 0);
      if (coded) {
        c.optimizer.type = OptimizerType::AdamW8bit;
      } else {
        c.optimizer.state_dtype = StateDtype::BF16;
      }
      const Hooks hooks = {.at_end = [&](engine::Engine& engine) {
        EXPECT_TRUE(engine.is_finite());
        for (const zero::Piece& piece : engine.held_pieces()) {
          const TensorView v = engine.lease(piece).view(s, piece.count);
          if (v.dtype == DType::F32) continue;
          std::vector<float> values(static_cast<size_t>(piece.count), 1.0f);
          values.back() = std::numeric_limits<float>::quiet_NaN();
          encode_state(v, values.data(), 0, piece.count);
          EXPECT_FALSE(engine.is_finite());
          values.back() = 1.0f;
          encode_state(v, values.data(), 0, piece.count);
          EXPECT_TRUE(engine.is_finite());
        }
      }};
      train_threads(c, 1, 1, 1, hooks);
    }
  }
}

// Encoding the decoded values of a state restores its bytes.
TEST(NarrowStates, ComeBackAsTheyWere) {
  Config c = tiny_config(tiny_gpt2(), 2, 1, 2);
  c.optimizer.type = OptimizerType::AdamW8bit;
  const Hooks hooks = {.at_end = [&](engine::Engine& engine) {
    for (const zero::Piece& piece : engine.held_pieces()) {
      for (const State s : {State::ExpAvg, State::ExpAvgSq}) {
        const TensorView v = engine.lease(piece).view(s, piece.count);
        std::vector<float> values(static_cast<size_t>(piece.count));
        decode_state(values.data(), v, 0, piece.count);
        std::vector<u8> before(v.as<u8>(), v.as<u8>() + v.bytes());
        encode_state(v, values.data(), 0, piece.count);
        EXPECT_TRUE(std::equal(before.begin(), before.end(), v.as<u8>()));
      }
    }
  }};
  train_threads(c, 2, 3, 1, hooks);
}

TEST(ParamGroups, FrozenOnesKeepTheirBitsAndCountInNoNorm) {
  Config c = tiny_config(tiny_gpt2(), 1, 1, 1), all = c;
  c.optimizer.groups = {group(c.optimizer, {"*"})};
  c.optimizer.groups[0].frozen = true;
  const Trace none = train_threads(c, 1, 3), untouched = train_threads(c, 1, 0);
  EXPECT_TRUE(same_bits(none.weights, untouched.weights));
  for (const double norm : none.norms) EXPECT_EQ(norm, 0);
  EXPECT_GT(train_threads(all, 1, 1).norms[0], 0);
  EXPECT_EQ(none.counted[static_cast<size_t>(Tag::Optimizer)], 0);
}

TEST(ParamGroups, APatternThatMatchesNothingIsRefusedWithTheNearestName) {
  Config c = tiny_config(tiny_gpt2(), 1, 1, 1);
  c.optimizer.groups = {group(c.optimizer, {"*.bias"}), group(c.optimizer, {"transformer.wte.wieght"})};
  try {
    train_threads(c, 1, 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_NE(
        std::string(e.what()).find("optimizer.param_groups[1].params: 'transformer.wte.wieght' matches no parameter"),
        std::string::npos)
        << e.what();
  }
}

// The first update of LAMB in closed form: along the sign of the gradient, with a length given by the parameter's norm.
TEST(Lamb, FirstUpdateHasTheLengthOfTheParameterTimesTheRate) {
  Config c = tiny_config(tiny_gpt2(), 2, 1, 2);
  c.optimizer.type = OptimizerType::Lamb;
  c.optimizer.weight_decay = 0;
  c.optimizer.bias_correction = false;
  c.optimizer.min_coeff = 1e-9;
  c.optimizer.max_coeff = 1e9;
  c.optimizer.lr = 1e-2;
  const Trace before = train_threads(c, 2, 0), after = train_threads(c, 2, 1);
  const model::Model model = model::make_model(c.model, c.data.seq_length);
  size_t at = 0;
  for (const model::ParamRow* row : model.params()) {
    double old = 0, moved = 0;
    for (i64 i = 0; i < row->numel(); ++i, ++at) {
      const double w = static_cast<double>(before.weights[at]), d = static_cast<double>(after.weights[at]) - w;
      old += w * w;
      moved += d * d;
    }
    if (old > 0 && moved > 0) {
      EXPECT_NEAR(std::sqrt(moved / old), 1e-2, 2e-5) << row->name;
    }
  }
}

}  // namespace optimizer_test
}  // namespace ds::testing
