// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam updates like a simulation of all ranks in fp64 with the same gradients, through warm-up and freeze. ZeRO
// stage 1 is stage 0 to the bit, ranks of a pipeline and of tp agree, overflows change nothing, and traffic is counted
// against the formula. Some of it holds for 1-bit LAMB, too.

#include "equivalence/one_bit.h"

namespace ds::testing {
namespace one_bit_test {

// In fp64 up to where a sign is another one, for what is averaged is as small as its rounding; from the freeze on in
// fp32, to the bit.
TEST(OneBitAdam, DoesWhatASimulationOfAllRanksDoes) {
  constexpr i64 kSteps = 200, kExact = 30;
  for (const int P : {1, 2, 3, 4}) {
    Config c = one_bit(P % 2 == 0 ? tiny_gpt2() : tiny_llama(), {.dp = P}, P == 2 ? 3 : 1);
    c.optimizer.bias_correction = P == 3;
    std::vector<std::vector<double>> gradients(static_cast<size_t>(P));
    std::optional<Simulation<double>> exact;
    std::optional<Simulation<float>> rounded;
    double away = 0;
    i64 others = 0;
    Hooks hooks;
    hooks.before_step = [&](engine::Engine& engine, i64 step) {
      if (engine.mesh().rank() != 0) return;
      const std::vector<Chunk> chunks = chunks_of(engine.plan().dp().layout);
      if (step == 0) {
        exact.emplace(c.optimizer, decays_of(engine), chunks, static_cast<size_t>(P));
        exact->w = state_of<double>(engine, State::Master);
      }
      if (step == kFreeze) {
        rounded.emplace(c.optimizer, decays_of(engine), chunks, static_cast<size_t>(P));
        rounded->w = state_of<float>(engine, State::Master);
        rounded->m = state_of<float>(engine, State::ExpAvg);
        rounded->v = state_of<float>(engine, State::ExpAvgSq);
        rounded->t = step;
      }
    };
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      const bool summed = step < kFreeze;
      gradients[static_cast<size_t>(engine.mesh().rank())] = gradients_of(engine, summed ? P : 1);
      engine.mesh().world().barrier("test");
      if (engine.mesh().rank() == 0) {
        if (summed) {
          exact->warm_up(gradients.front());
        } else {
          if (step < kFreeze + kExact) exact->compressed(gradients);
          rounded->compressed(gradients);
          EXPECT_TRUE(same_bits(rounded->w, state_of<float>(engine, State::Master))) << P << " step " << step;
          EXPECT_TRUE(same_bits(rounded->m, state_of<float>(engine, State::ExpAvg))) << P << " step " << step;
        }
        if (step == kFreeze - 1 || step == kFreeze + kExact - 1) {
          const std::vector<double> now = state_of<double>(engine, State::Master);
          for (size_t i = 0; i < now.size(); ++i) {
            const double off = std::abs(now[i] - exact->w[i]);
            if (off > 1e-5) ++others;
            away = std::max(away, off > 1e-5 ? 0 : off);
          }
          EXPECT_LT(others, std::ssize(now) / 500) << P << " step " << step;
        }
      }
      engine.mesh().world().barrier("test");
    };
    const Trace t = train_threads(c, P, kSteps, 1, hooks);
    EXPECT_LT(t.losses.back(), 0.7 * t.losses.front()) << P;
    EXPECT_GT(away, 0);
  }
}

// Stage 1 owns slices of masters and variances; the rest is the same.
TEST(OneBitAdam, StageOneIsStageZero) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const int work : {0, 1, 2}) {
      for (const i64 accumulation : {1, 3}) {
        for (const ReduceOrder order : {ReduceOrder::Boundary, ReduceOrder::Micro}) {
          const auto train = [&](const Layout& l) {
            Config c = one_bit(model, l, accumulation);
            c.optimizer.freeze_step = 3;
            c.bf16.enabled = work == 1;
            if (work == 2) c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 20};
            c.communication_data_type = wire_type_of(c.work_dtype());
            c.reduce_order = order;
            if (accumulation == 3) {  // groups have messages of their own
              ParamGroupConfig slow, frozen;
              static_cast<UpdateConfig&>(slow) = static_cast<UpdateConfig&>(frozen) = c.optimizer;
              slow.lr /= 2, slow.params = {"*mlp*"};
              frozen.frozen = true, frozen.params = {model.family == Family::Gpt2 ? "*ln_*" : "*norm*"};
              c.optimizer.groups = {slow, frozen};
            }
            return train_threads(c, l.ranks(), 8);
          };
          const Trace zero = train({.dp = 3}), one = train({.dp = 3, .stage = 1});
          EXPECT_TRUE(std::isfinite(zero.losses.back()));
          expect_same_training(one, zero, fmt::format("work {} accumulation {}", work, accumulation));
        }
      }
    }
  }
}

TEST(OneBitAdam, StagesOfAPipelineMoveNoBit) {
  const auto models = {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())};
  for (const auto& [model, type] : {std::pair{*models.begin(), OptimizerType::OneBitAdam},
                                    {models.begin()[1], OptimizerType::OneBitAdam},
                                    {*models.begin(), OptimizerType::OneBitLamb}}) {
    const auto train = [&](const Layout& l) {
      Config c = one_bit(model, l);
      c.optimizer.type = type;
      c.optimizer.freeze_step = 2;
      return train_threads(c, l.ranks(), 6);
    };
    const Trace flat = train({.dp = 2});
    for (const Layout& l : {Layout{.dp = 2, .pp = 2}, {.dp = 2, .pp = 2, .stage = 1}})
      expect_same_training(train(l), flat, l.name());
    // Copies on ranks of tp get the same signs, though each rank averages its own.
    Config c = one_bit(model, {.dp = 2, .tp = 2});
    c.optimizer.type = type;
    c.optimizer.freeze_step = 2;
    Hooks hooks;
    hooks.at_end = [&](engine::Engine& engine) {
      for (const zero::Piece& piece : engine.plan().dp().layout.whole_pieces()) {
        if (!engine.row_of(piece.param).slice.whole()) continue;
        const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
        const auto* const values = static_cast<const float*>(lease[State::Param]);
        std::vector<float> least(values, values + piece.count), most = least;
        engine.mesh().tp().all_reduce(least.data(), piece.count, DType::F32, ReduceOp::Min, "test").wait();
        engine.mesh().tp().all_reduce(most.data(), piece.count, DType::F32, ReduceOp::Max, "test").wait();
        EXPECT_TRUE(same_bits(least, most)) << engine.row_of(piece.param).name;
      }
    };
    const Trace cut = train_threads(c, 4, 6, 1, hooks);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(cut.losses[i], flat.losses[i], 1e-4);
    EXPECT_TRUE(std::isfinite(cut.losses.back()));  // signs of each rank's part have a scale of their own
  }
}

// A matrix that two stages share is averaged on both, by the same signs and scales. Sums of micro-batches are made by
// products or of rounded gradients.
TEST(OneBit, TiedMatricesMoveNoBitOnTwoStages) {
  ASSERT_TRUE(tiny_gpt2().tie_embeddings);
  struct Case {
    bool bf16;
    ReduceOrder order;
    int dp;
  };
  for (const OptimizerType type : {OptimizerType::OneBitAdam, OptimizerType::OneBitLamb, OptimizerType::ZeroOneAdam}) {
    const bool zero_one = type == OptimizerType::ZeroOneAdam;
    for (const Case& of : {Case{false, ReduceOrder::Boundary, 3}, Case{false, ReduceOrder::Micro, 2},
                           Case{true, ReduceOrder::Boundary, 2}, Case{true, ReduceOrder::Micro, 3}}) {
      const auto train = [&](const Layout& l) {
        Config c = one_bit(tiny_gpt2(), l);
        c.optimizer.type = type;
        c.optimizer.freeze_step = 3;
        c.optimizer.var_freeze_step = 4, c.optimizer.var_update_scaler = 1;
        c.optimizer.local_step_scaler = 1, c.optimizer.local_step_clipper = 2;
        c.bf16.enabled = of.bf16;
        c.communication_data_type = wire_type_of(c.work_dtype());
        c.reduce_order = of.order;
        return train_threads(c, l.ranks(), 8);
      };
      const Trace flat = train({.dp = of.dp});
      EXPECT_TRUE(std::isfinite(flat.losses.back()));
      for (const Layout& l : {Layout{.dp = of.dp, .pp = 2},
                              {.dp = of.dp, .pp = 2, .stage = zero_one ? 0 : 1},
                              {.dp = of.dp, .pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                              {.dp = of.dp, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}})
        expect_same_training(train(l), flat,
                             fmt::format("type {} bf16 {} {}", static_cast<int>(type), of.bf16, l.name()));
    }
  }
}

// A step that overflows leaves momentum, errors and weights as they were.
TEST(OneBitAdam, AnOverflowChangesNothing) {
  for (const auto& [type, stage, freeze] : {std::tuple{OptimizerType::OneBitAdam, 0, 2},
                                            {OptimizerType::OneBitAdam, 1, 2},
                                            {OptimizerType::OneBitLamb, 0, 2},
                                            {OptimizerType::OneBitLamb, 1, 20}}) {  // in its warm-up
    Config c = one_bit(tiny_gpt2(), {.dp = 2, .stage = stage});
    c.optimizer.type = type;
    c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 8};
    c.communication_data_type = WireType::F16;
    c.optimizer.freeze_step = freeze;
    std::vector<std::vector<float>> before(2);
    const auto all_of = [](engine::Engine& engine) {
      std::vector<float> values;
      for (const auto& [name, view] : engine.rank_local())
        values.insert(values.end(), view.as<float>(), view.as<float>() + view.numel());
      for (zero::SavedState* const state : engine.saved_states()) {
        for (const std::span<double> numbers : state->numbers())
          values.insert(values.end(), numbers.begin(), numbers.end());
      }
      for (const zero::Piece& piece : engine.held_pieces()) {
        const zero::StateLease lease = engine.lease(piece, zero::LeaseTo::Read);
        for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq, State::ExpAvgSqFresh})
          if (lease[s] != nullptr) values.insert(values.end(), lease.values(s), lease.values(s) + piece.count);
      }
      return values;
    };
    Hooks hooks;
    i64 skipped = 0;
    hooks.before_step = [&](engine::Engine& engine, i64 step) {
      if (step == 5) engine.scaler().restore({0x1p40, 5, -1, 1});
      before[static_cast<size_t>(engine.mesh().rank())] = all_of(engine);
    };
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      if (step != 5) return;
      EXPECT_TRUE(same_bits(all_of(engine), before[static_cast<size_t>(engine.mesh().rank())]));
      engine.scaler().restore({0x1p8, 6, -1, 1});
      if (engine.mesh().rank() == 0) ++skipped;
    };
    const Trace t = train_threads(c, 2, 8, 1, hooks);
    EXPECT_EQ(skipped, 1);
    EXPECT_TRUE(t.skipped[5] && !t.skipped[6]);
    EXPECT_TRUE(std::isfinite(t.losses.back()));
  }
}

// Two bits for each element, one there and one back, and a scale for each parameter; nothing else of gradients.
TEST(OneBitAdam, SendsSigns) {
  for (const int P : {2, 4}) {
    for (const i64 stage : {0, 1}) {
      Config c = one_bit(tiny_gpt2(), {.dp = P, .stage = stage});
      c.steps = 30;
      c.optimizer.freeze_step = 10;
      const Trace t = train_threads(c, P, c.steps);
      const model::Model model = model::make_model(c.model, c.data.seq_length);
      const i64 sent = t.sent.at("dp.one_bit").bytes, calls = t.sent.at("dp.one_bit").calls;
      EXPECT_EQ(sent, 20 * t.planned.at("dp.one_bit").bytes);
      EXPECT_EQ(calls, 20 * 2);
      const double payload = 20.0 * 2 * (P - 1) / P * static_cast<double>(model.num_params()) / 8;
      const double scales = 20.0 * 2 * (P - 1) * 4 * static_cast<double>(model.params().size());
      EXPECT_GT(static_cast<double>(sent), payload + scales);
      EXPECT_LT(static_cast<double>(sent), 1.1 * payload + scales + 20.0 * 2 * (P - 1) * 64);
      // Only the warm-up sends these.
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").calls % 10, 0);
      Config exact = c;
      exact.optimizer.type = OptimizerType::AdamW;
      const Trace whole = train_threads(exact, P, 10);
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, whole.sent.at("dp.reduce_scatter").bytes);
      EXPECT_EQ(t.planned.at("dp.reduce_scatter").bytes, 0);
    }
  }
}

// Compression errors are kept in the checkpoint's arrays of each rank. Another layout resets them.
TEST(OneBitAdam, WhatIsRankLocalGoesOnWhereItWas) {
  for (const i64 stage : {0, 1}) {
    Config c = one_bit(tiny_gpt2(), {.dp = 2, .stage = stage});
    c.optimizer.freeze_step = 10;
    const TempDirectory dir;
    std::vector<std::vector<std::vector<float>>> own(2);
    Hooks saving;
    saving.at_end = {};
    saving.after_step = [&](engine::Engine& engine, i64 step) {
      if (step != 14) return;
      auto& mine = own[static_cast<size_t>(engine.mesh().rank())];
      for (const auto& [name, view] : engine.rank_local())
        mine.emplace_back(view.as<float>(), view.as<float>() + view.numel());
      save_step(engine, dir.path());
    };
    const Trace whole = train_threads(c, 2, 20, 1, saving);
    const auto go_on = [&](bool with_errors) {
      Hooks hooks;
      hooks.start = [&](engine::Engine& engine) {
        load_step(engine, dir.path() + "/step-00000015");
        const auto arrays = engine.rank_local();
        EXPECT_EQ(arrays.size(), 2u);
        for (size_t i = 0; i < arrays.size() && with_errors; ++i) {
          const std::vector<float>& from = own[static_cast<size_t>(engine.mesh().rank())][i];
          engine.device().upload(arrays[i].values.data, from.data(), arrays[i].values.bytes());
        }
      };
      return train_threads(c, 2, 5, 1, hooks);
    };
    const Trace same = go_on(true), reset = go_on(false);
    EXPECT_TRUE(same_bits(same.weights, whole.weights));
    EXPECT_TRUE(same_bits(same.states[State::ExpAvg], whole.states[State::ExpAvg]));
    EXPECT_FALSE(same_bits(reset.weights, whole.weights));
  }
}

}  // namespace one_bit_test
}  // namespace ds::testing
