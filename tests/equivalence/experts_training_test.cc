// SPDX-License-Identifier: Apache-2.0
// Models with experts train with the same bits in every layout that divides neither matrices nor sums: ZeRO stages,
// pipelines, recomputation, and experts over ranks (ep) if each micro-batch is reduced for itself. Other layouts agree
// to rounding.

#include <mutex>

#include "equivalence/checkpoints.h"
#include "equivalence/layouts.h"
#include "equivalence/training.h"
#include "model/models.h"
#include "slow_set.h"

namespace ds::testing {
namespace experts_test {

using Kind = PipelineSchedule;
using Granularity = CheckpointGranularity;

constexpr i64 kSteps = 4;

struct Kinds {
  i64 experts = 8, chosen = 2, shared = 0;
  bool gated = false, one_dense = false;
  RouterParams router{.normalise = true};
  float balance = 0.02f, z = 1e-3f;
  bool bias = false;
  BalanceOver over = BalanceOver::MicroBatch;
};

ModelConfig tiny_experts(const Kinds& k = {}) {
  ModelConfig m = of_four_heads(tiny_llama());
  m.layers = 4;
  m.experts = {.count = k.experts,
               .per_token = k.chosen,
               .intermediate = 24,
               .router = k.router,
               .balancing_bias = k.bias,
               .shared = k.shared,
               .shared_gate = k.gated,
               .balance_loss = k.balance,
               .z_loss = k.z,
               .layers = std::vector<bool>(4, true)};
  m.experts.balance_over = k.over;
  if (k.one_dense) m.experts.layers[1] = false;
  return m;
}

struct Experts {
  int ep = 1;
  bool data_first = false;
  double room = 2;
};

Config experts_config(const ModelConfig& model, const Layout& l, const Experts& x = {}, DType work = DType::F32) {
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  c.expert_parallel = {.enabled = x.ep > 1, .size = x.ep, .data_first = x.data_first, .room = x.room};
  return c;
}

Trace train(const Config& c, const Layout& l, Hooks hooks = {}, i64 steps = kSteps) {
  hooks.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {}));
  hooks.same_logits &= c.expert_parallel.size == 1;
  return train_threads(c, l.ranks(), steps, 1, hooks);
}

TEST(Experts, TrainWithTheSameBitsInEveryLayout) {
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Kinds& kinds : {Kinds{.one_dense = true}, Kinds{.shared = 32, .gated = true},
                               Kinds{.chosen = 3, .shared = 32, .router = {.sigmoid = true, .scale = 1.5f}}}) {
      const ModelConfig model = tiny_experts(kinds);
      const auto run = [&](const Layout& l) {
        const Trace t = train(experts_config(model, l, {}, work), l);
        expect_planned(t, kSteps, l.name());
        return t;
      };
      const Trace want = run({});
      EXPECT_LT(want.losses.back(), want.losses.front());
      EXPECT_EQ(std::ssize(want.aux_losses), kSteps);
      for (const Layout& l : {Layout{.dp = 2, .stage = 1},
                              {.dp = 4, .stage = 3},
                              {.pp = 2},
                              {.dp = 2, .pp = 3, .stage = 2},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                              {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                              {.dp = 2, .checkpoints = Granularity::Layer, .stage = 3},
                              {.dp = 2, .checkpoints = Granularity::Selective, .stage = 2}})
        expect_same_training(run(l), want, fmt::format("{} {}", dtype_name(work), l.name()));
    }
  }
}

// Losses over sequences and over layers, too, do not depend on the layout; that over sequences is the one of
// micro-batches of one sequence.
TEST(Experts, LossesOverSequencesAndLayers) {
  for (const BalanceOver over : {BalanceOver::Sequence, BalanceOver::Layers}) {
    const ModelConfig model = tiny_experts({.one_dense = true, .balance = 0.3f, .over = over});
    const auto run = [&](const Layout& l, const Experts& x = {}) {
      const Trace t = train(experts_config(model, l, x), l);
      if (x.ep == 1) expect_planned(t, kSteps, l.name());
      return t;
    };
    const Trace want = run({});
    for (const Layout& l : {Layout{.dp = 4, .stage = 3}, {.dp = 2, .checkpoints = Granularity::Layer, .stage = 2}})
      expect_same_training(run(l), want, l.name());
    expect_same_training(run({.dp = 2, .stage = 1}, {.ep = 2}), want, "ep");
    if (over == BalanceOver::Sequence) expect_same_training(run({.pp = 2}), want, "pp");
    for (const Layout& l : {Layout{.tp = 2}, {.sp = 2}}) expect_close(run(l), want, l.name(), {});
  }
  const Layout l;
  const auto of = [&](BalanceOver over, i64 micro) {
    Config c = experts_config(tiny_experts({.balance = 0.3f, .z = 0, .over = over}), l);
    c.batch = {.train = 4, .micro = micro, .accumulation = 4 / micro};
    c.loss.norm = LossNorm::Token;  // the head's loss does not depend on micro-batches
    return train(c, l);
  };
  const Trace one = of(BalanceOver::MicroBatch, 1), together = of(BalanceOver::Sequence, 4);
  expect_close(together, one, "sequences", {});
  for (size_t i = 0; i < one.aux_losses.size(); ++i)
    EXPECT_NEAR(together.aux_losses[i], one.aux_losses[i], 1e-5 * one.aux_losses[i]);
  EXPECT_GT(std::abs(of(BalanceOver::MicroBatch, 4).aux_losses[0] - one.aux_losses[0]), 1e-4 * one.aux_losses[0]);
}

// Every expert is used, and not equally.
TEST(Experts, OverRanksTrainWithTheBitsOfOneRank) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const ModelConfig model = tiny_experts({.shared = 32, .one_dense = true});
    const auto run = [&](const Layout& l, const Experts& x) { return train(experts_config(model, l, x, work), l); };
    const Trace want = run({}, {});
    const auto check = [&](const Layout& l, const Experts& x) {
      expect_same_training(
          run(l, x), want,
          fmt::format("{} {} ep {}{}", dtype_name(work), l.name(), x.ep, x.data_first ? " data first" : ""));
    };
    for (const i64 stage : {0, 1, 2, 3}) check({.dp = 2, .stage = stage}, {.ep = 2});
    check({.dp = 4, .stage = 3}, {.ep = 4});
    for (const i64 stage : {0, 2, 3}) check({.dp = 4, .stage = stage}, {.ep = 2, .data_first = true});
    check({.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 1}, {.ep = 2});
    check({.dp = 2, .checkpoints = Granularity::Layer, .stage = 3}, {.ep = 2});
    check({.dp = 8, .stage = 1}, {.ep = 8, .room = 8});
  }
}

// With less memory than rows a layer goes in rounds. No bit changes if gradients of micro-batches are reduced for
// themselves; else they are sums over the rows of a round, and no loss is another one in the first step.
TEST(Experts, MoreRowsThanThereIsMemoryForGoInRounds) {
  const ModelConfig model = tiny_experts();
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const ReduceOrder order : {ReduceOrder::Micro, ReduceOrder::Boundary}) {
      for (const Layout& l : {Layout{.dp = 8, .stage = 1},
                              {.dp = 8, .checkpoints = Granularity::Layer, .stage = 1},
                              {.dp = 4, .tp = 2, .sequence = true, .stage = 1},
                              {.dp = 4, .sp = 2, .stage = 1},
                              {.dp = 4, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 2}}) {
        if (order == ReduceOrder::Micro && l.tp > 1) continue;
        const auto run = [&](double room) {
          Config c = experts_config(model, l, {.ep = l.dp, .room = room}, work);
          c.reduce_order = order;
          c.gradient_accumulation_fusion = order == ReduceOrder::Boundary;
          return train(c, l);
        };
        const Trace all = run(8), some = run(1);
        const size_t kept = static_cast<size_t>(Tag::Activations);
        if (l.checkpoints == Granularity::None) {
          EXPECT_LT(some.counted[kept], all.counted[kept]);
        }
        EXPECT_GT(some.sent.at("ep.all_to_allv").calls, all.sent.at("ep.all_to_allv").calls)
            << l.name();  // some layer did
        if (order == ReduceOrder::Micro) {
          expect_same_training(some, all, fmt::format("{} {}", dtype_name(work), l.name()));
          continue;
        }
        EXPECT_EQ(some.losses[0], all.losses[0]) << l.name();
        expect_close(some, all, l.name(),
                     work == DType::F32 ? Tolerance{} : Tolerance{.loss = 1e-3, .first_norm = 1e-3, .norm = 3e-2});
      }
    }
  }
}

// A step that is begun again, because its update was undone, counts each token once.
TEST(Experts, TokensOfStepsThatAreBegunAgainAreCountedOnce) {
  const Layout l{.pp = 2};
  const auto counts = [&](bool post_validate) {
    Config c = experts_config(tiny_experts(), l);
    c.pipeline.post_validate = post_validate;
    c.gradient_clipping = 1e-3;  // every update is made again
    std::vector<std::vector<i64>> all;
    std::mutex mutex;
    with_engines(c, l.ranks(), [&](engine::Engine& engine) {
      const auto note = [&](const StepRecord& r) {
        const std::lock_guard lock(mutex);
        if (engine.plan().coord.pp > 0) return;
        for (const ExpertTokens& layer : r.experts) all.push_back(layer.tokens);
      };
      const auto n = static_cast<size_t>(c.batch.accumulation * c.batch.micro * c.data.seq_length);
      std::vector<i32> ids(n), targets(n);
      for (i64 step = 0; step < 3; ++step) {
        fill_sample(step, c.model.vocab_size, ids, targets);
        engine.take_step({ids, targets, {}}, note);
      }
      engine.finish_step(note);
    });
    return all;
  };
  const auto want = counts(false);
  EXPECT_EQ(want.size(), 3u * 4);
  EXPECT_EQ(counts(true), want);
}

// Neighbours with different experts add up the gradients of an expert in another order.
TEST(Experts, OverNeighboursAgreeToRounding) {
  const ModelConfig model = tiny_experts();
  const Trace want = train(experts_config(model, {}), {});
  const Layout l{.dp = 4, .stage = 1};
  const Trace got = train(experts_config(model, l, {.ep = 2}), l);
  EXPECT_EQ(got.losses[0], want.losses[0]);
  expect_close(got, want, l.name());
}

TEST(Experts, OverTensorAndSequenceParallelRanksAgreeToRounding) {
  const ModelConfig model = tiny_experts({.shared = 32, .gated = true});
  const Trace want = train(experts_config(model, {}), {});
  for (const Layout& l : {Layout{.tp = 2},
                          {.tp = 2, .sequence = true},
                          {.sp = 2},
                          {.dp = 2, .tp = 2, .stage = 3},
                          {.sp = 2, .mode = SequenceParallelMode::Ring}}) {
    SCOPED_TRACE(l.name());
    const Trace got = train(experts_config(model, l), l);
    expect_planned(got, kSteps, l.name());
    expect_close(got, want, l.name());
  }
  for (const Layout& l :
       {Layout{.dp = 2, .tp = 2, .stage = 2}, {.dp = 2, .tp = 2, .sequence = true}, {.dp = 2, .sp = 2, .stage = 1}})
    expect_close(train(experts_config(model, l, {.ep = 2}), l), want, "ep 2 " + l.name());
}

// ---- the balancing bias of routers

Kinds with_bias() {
  return {
      .shared = 32,
      .one_dense = true,
      .router =
          {.sigmoid = true, .normalise = true, .scale = 1.5f, .groups = 4, .chosen_groups = 2, .group_by_two = true},
      .balance = 0,
      .z = 0,
      .bias = true};
}

// Those of this rank's layers, one after the other.
std::vector<float> biases_of(engine::Engine& engine) {
  std::vector<float> all;
  engine::HostState held(engine, engine.held_pieces());
  held.download();
  for (const StatePiece& p : held.pieces()) {
    if (engine.row_of(p.param).balances < 0) continue;
    const float* const values = static_cast<const float*>(p.data[State::Param]);
    all.insert(all.end(), values, values + p.count);
  }
  return all;
}

// Each step adds the rate times the sign of the mean minus the tokens that the expert got, rounded once, whatever the
// work dtype is; no step of an evaluation does.
TEST(Experts, BiasesMoveByTheTokensOfAStep) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const Layout l{.dp = 2, .checkpoints = Granularity::Layer, .stage = 3};
    Config c = experts_config(tiny_experts(with_bias()), l, {}, work);
    c.optimizer.router_bias_update_rate = 0.01f;
    with_engines(c, l.ranks(), [&](engine::Engine& engine) {
      const auto n = static_cast<size_t>(c.batch.accumulation * c.batch.micro * c.data.seq_length);
      std::vector<i32> ids(n), targets(n);
      std::vector<float> want(3 * 8, 0.0f);
      bool moved_both_ways[2] = {false, false};
      for (i64 step = 0; step < 3; ++step) {
        fill_sample(2 * step + engine.mesh().coord().dp, c.model.vocab_size, ids, targets);
        const StepRecord r = engine.train_step({ids, targets, {}});
        ASSERT_EQ(r.experts.size(), 3u);
        size_t at = 0;
        for (const ExpertTokens& layer : r.experts) {
          i64 all = 0;
          for (const i64 tokens : layer.tokens) all += tokens;
          for (const i64 tokens : layer.tokens) {
            const i64 above = 8 * tokens - all;
            want[at++] += above > 0 ? -0.01f : above < 0 ? 0.01f : 0.0f;
            if (above != 0) moved_both_ways[above > 0 ? 1 : 0] = true;
          }
        }
        EXPECT_EQ(biases_of(engine), want) << dtype_name(work) << " " << step;
      }
      EXPECT_TRUE(moved_both_ways[0] && moved_both_ways[1]);
    });
  }
}

// Rows that travel depend on values, and so do steps that begin again.
void expect_planned_memory(const Trace& t, const std::string& what) {
  for (size_t tag = 0; tag < t.counted.size(); ++tag)
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << what << ": " << tag_name(static_cast<Tag>(tag));
}

TEST(Experts, BiasesOfRoutersTrainWithTheSameBitsInEveryLayout) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const ModelConfig model = tiny_experts(with_bias());
    const auto run = [&](const Layout& l, const Experts& x = {}) {
      const Trace t = train(experts_config(model, l, x, work), l);
      x.ep == 1 ? expect_planned(t, kSteps, l.name()) : expect_planned_memory(t, l.name());
      return t;
    };
    const Trace want = run({});
    for (const Layout& l : {Layout{.dp = 2},
                            {.dp = 2, .stage = 1},
                            {.dp = 4, .stage = 3},
                            {.pp = 2},
                            {.dp = 2, .pp = 3, .stage = 2},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.dp = 2, .checkpoints = Granularity::Layer, .stage = 3},
                            {.dp = 2, .checkpoints = Granularity::Selective, .stage = 2}})
      expect_same_training(run(l), want, fmt::format("{} {}", dtype_name(work), l.name()));
    for (const i64 stage : {0, 1, 3}) expect_same_training(run({.dp = 2, .stage = stage}, {.ep = 2}), want, "ep 2");
    expect_same_training(run({.dp = 4, .stage = 2}, {.ep = 4}), want, "ep 4");
    expect_same_training(run({.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 1}, {.ep = 2}), want, "pp");
  }
}

// Where sums differ in their last bits the first step still routes alike, and biases move alike.
TEST(Experts, BiasesOfRoutersAreEqualOverTensorAndSequenceParallelRanks) {
  const ModelConfig model = tiny_experts(with_bias());
  const auto biases = [&](const Layout& l, i64 micro_batches, const Experts& x = {}) {
    Config c = experts_config(model, l, x);
    if (micro_batches != 8) c.batch = {.train = 16, .micro = 16 / micro_batches, .accumulation = micro_batches / l.dp};
    std::vector<std::vector<float>> all;
    std::mutex mutex;
    Hooks hooks{.at_end = [&](engine::Engine& engine) {
      std::vector<float> mine = biases_of(engine);
      const std::lock_guard lock(mutex);
      all.push_back(std::move(mine));
    }};
    (void)train(c, l, hooks, 1);
    for (const std::vector<float>& of_rank : all) EXPECT_EQ(of_rank, all.front()) << l.name();
    return all.front();
  };
  const std::vector<float> want = biases({}, 8);
  EXPECT_TRUE(std::ranges::any_of(want, [](float x) { return x > 0; }));
  for (const Layout& l : {Layout{.tp = 2},
                          {.tp = 4, .sequence = true},
                          {.sp = 2},
                          {.sp = 2, .mode = SequenceParallelMode::Ring},
                          {.dp = 2, .tp = 2, .stage = 3},
                          {.dp = 2, .sp = 2, .stage = 1}})
    EXPECT_EQ(biases(l, 8), want) << l.name();
  EXPECT_EQ(biases({.dp = 2, .tp = 2, .sequence = true}, 8, {.ep = 2}), want);
  for (const i64 micro_batches : {1, 2, 16}) EXPECT_EQ(biases({}, micro_batches), want) << micro_batches;
  EXPECT_EQ(biases({.dp = 2}, 2), want);
}

// An overflow skips a step, which moves nothing.
TEST(Experts, BiasesStayInSkippedSteps) {
  const Layout l{.dp = 2, .stage = 2};
  Config c = experts_config(tiny_experts(with_bias()), l);
  c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 28, .hysteresis = 1};
  c.communication_data_type = wire_type_of(DType::F16);
  std::vector<float> before;
  i64 stayed = 0, moved = 0;
  std::mutex mutex;
  Hooks hooks{.after_step = [&](engine::Engine& engine, i64) {
    const std::vector<float> now = biases_of(engine);
    const std::lock_guard lock(mutex);
    if (engine.mesh().rank() > 0) return;
    if (before.empty()) before.assign(now.size(), 0.0f);
    ++(now == before ? stayed : moved);
    before = now;
  }};
  const Trace t = train(c, l, hooks, 16);
  const i64 skipped = std::ranges::count(t.skipped, true);
  EXPECT_GT(skipped, 0);
  EXPECT_GT(moved, 0);
  EXPECT_EQ(stayed, skipped);
}

// An update that is undone is one of biases, too: a step that it skips, or that is clipped.
TEST(Experts, BiasesOfUndoneStepsAreThoseOfStepsThatWait) {
  for (const bool fp16 : {false, true}) {
    const Layout l{.dp = 2, .pp = 2, .stage = 1};
    const auto run = [&](bool post_validate) {
      Config c = experts_config(tiny_experts(with_bias()), l, {.ep = 2});
      c.pipeline.post_validate = post_validate;
      c.gradient_clipping = 1.05;
      if (fp16) {
        c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 19, .loss_scale_window = 2};
        c.communication_data_type = wire_type_of(DType::F16);
      }
      const Trace t = train(c, l, {}, 8);
      expect_planned_memory(t, post_validate ? "post-validated" : "waits");
      return t;
    };
    const Trace want = run(false);
    EXPECT_EQ(std::ranges::count(want.skipped, true) > 0, fp16);
    expect_same_training(run(true), want, fp16 ? "fp16" : "fp32");
  }
}

// A step holds them in fp32, and any other layout resumes from it.
TEST(Experts, BiasesAreResumedAtAnotherLayout) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const ModelConfig model = tiny_experts(with_bias());
    const auto config = [&](const Layout& l, int ep) { return experts_config(model, l, {.ep = ep}, work); };
    const auto hooks = [&](const Config& c, const Layout& l) {
      return Hooks{.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {})),
                   .same_logits = c.expert_parallel.size == 1};
    };
    const TempDirectory dir;
    const Layout before{.dp = 2, .stage = 3};
    const Config first = config(before, 2);
    const Saved saved = train_and_save(first, before, 3, dir.path(), hooks(first, before));
    const Trace want = train(config({}, 1), {}, {}, 5);
    for (const auto& [l, ep] : {std::pair{Layout{}, 1},
                                {Layout{.dp = 4, .stage = 1}, 4},
                                {Layout{.dp = 2, .pp = 2, .stage = 2}, 2},
                                {Layout{.dp = 4, .stage = 3}, 1}}) {
      const Config c = config(l, ep);
      const Trace t = resume(c, l, 2, saved.step, hooks(c, l));
      EXPECT_TRUE(same_bits(t.weights, want.weights)) << dtype_name(work) << " " << l.name() << " ep " << ep;
      EXPECT_EQ(t.losses.back(), want.losses.back());
    }
  }
}

// They stay at the rate 0, and where their router is frozen.
TEST(Experts, BiasesStayWhereNothingMovesThem) {
  Config c = experts_config(tiny_experts(with_bias()), {});
  c.optimizer.router_bias_update_rate = 0;
  const auto expect_zeros = [&](const Config& config, i64 moved) {
    i64 nonzero = 0;
    Hooks hooks{.at_end = [&](engine::Engine& engine) {
      nonzero = std::ranges::count_if(biases_of(engine), [](float x) { return x != 0; });
    }};
    (void)train(config, {}, hooks, 1);
    EXPECT_EQ(nonzero > 0, moved > 0);
    EXPECT_LE(nonzero, moved);
  };
  expect_zeros(c, 0);
  c.optimizer.router_bias_update_rate = 0.001f;
  expect_zeros(c, 3 * 8);
  ParamGroupConfig frozen;
  frozen.params = {"model.layers.0.mlp.gate.*", "model.layers.2.*"};
  frozen.frozen = true;
  c.optimizer.groups = {frozen};
  expect_zeros(c, 8);
}

}  // namespace experts_test
}  // namespace ds::testing
