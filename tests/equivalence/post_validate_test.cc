// SPDX-License-Identifier: Apache-2.0
// Steps that update before their verdict is known (pipeline.post_validate) train to the bit like steps that wait for
// it: where nothing is undone, where clipping bites, and where gradients overflow.

#include <algorithm>
#include <atomic>
#include <thread>

#include "comm/make_communicator.h"
#include "ds/error.h"
#include "equivalence/layouts.h"
#include "slow_set.h"
#include "update/update.h"

namespace ds::testing {
namespace post_validate_test {

constexpr i64 kSteps = 8;

ModelConfig gpt2_model() {
  ModelConfig c = tiny_gpt2();
  c.hidden = 32;
  c.layers = 4;
  c.heads = c.kv_heads = 4;
  c.head_dim = 8;
  c.intermediate = 64;
  return c;
}
ModelConfig llama_model() {
  ModelConfig c = tiny_llama();
  c.layers = 4;
  c.intermediate = 48;
  return c;
}

// Overflows in the first steps, and again whenever the scale has grown; clipping bites in some of the others.
void in_fp16(Config& c) {
  c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 19, .loss_scale_window = 2};
  c.gradient_clipping = 1.05;
}
void in_bf16(Config& c) {
  c.bf16.enabled = true;
  c.gradient_clipping = 1.05;
}
void in_fp32(Config& c) { c.gradient_clipping = 1.05; }

Config post_validated(Config c) {
  c.pipeline.post_validate = true;
  return c;
}

struct Undone {
  i64 clipped = 0, skipped = 0, kept = 0;
};
Undone count_of(const Trace& t, double clip) {
  Undone n;
  for (size_t s = 0; s < t.norms.size(); ++s) ++(t.skipped[s] ? n.skipped : t.norms[s] > clip ? n.clipped : n.kept);
  return n;
}

Undone expect_same(const Config& c, int ranks, const std::string& what, const Hooks& hooks = {}) {
  Config waits = c;
  if (waits.pipeline.schedule == Kind::ZeroBubbleH2) waits.pipeline.schedule = Kind::ZeroBubbleH1;
  const Trace want = train_threads(waits, ranks, kSteps, 1, hooks),
              got = train_threads(post_validated(c), ranks, kSteps, 1, hooks);
  expect_same_training(got, want, what);
  EXPECT_EQ(got.scales, want.scales) << what;
  EXPECT_EQ(got.lrs, want.lrs) << what;
  return count_of(got, c.gradient_clipping);
}

TEST(PostValidate, LayoutsAndSchedulesChangeNoBit) {
  test::EveryNth tried(3);
  Undone fp16, fp32;
  for (const ModelConfig& model : {gpt2_model(), llama_model()}) {
    for (const Layout& l : {Layout{},
                            {.pp = 2},
                            {.pp = 4},
                            {.pp = 2, .schedule = Kind::Naive},
                            {.pp = 4, .schedule = Kind::GPipe},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                            {.pp = 4, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH2},
                            {.pp = 4, .schedule = Kind::ZeroBubbleH2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleH2, .checkpoints = Granularity::Layer},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .memory_limit = 0.67},
                            {.schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3},
                            {.dp = 2},
                            {.dp = 2, .stage = 1},
                            {.dp = 2, .stage = 2},
                            {.dp = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .stage = 1},
                            {.dp = 2, .pp = 2, .stage = 2},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH2, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::Interleaved, .chunks = 2, .stage = 2},
                            {.tp = 2},
                            {.tp = 2, .sequence = true, .stage = 1},
                            {.pp = 2, .tp = 2, .schedule = Kind::ZeroBubbleH2},
                            {.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .partition = true},
                            {.sp = 2, .stage = 3},
                            {.pp = 2, .checkpoints = Granularity::Selective},
                            {.pp = 4, .checkpoints = Granularity::Layer, .interval = 2}}) {
      if (!tried()) continue;
      const auto add = [](Undone& sum, const Undone& n) {
        sum.clipped += n.clipped, sum.skipped += n.skipped, sum.kept += n.kept;
      };
      Config c = config_of(model, l);
      in_fp32(c);
      add(fp32, expect_same(c, l.ranks(), "fp32 " + l.name()));
      c = config_of(model, l);
      in_fp16(c);
      add(fp16, expect_same(c, l.ranks(), "fp16 " + l.name()));
    }
  }
  // Undone steps and kept ones both occur.
  EXPECT_GT(fp32.clipped, 0);
  EXPECT_GT(fp32.kept, 0);
  EXPECT_GT(fp16.skipped, 0);
  EXPECT_GT(fp16.clipped, 0);
  EXPECT_GT(fp16.kept, 0);
}

// An update that stays sends what it sends without: the verdict comes later, and nothing comes twice.
TEST(PostValidate, SendsAndAllocatesWhatIsPlanned) {
  for (const Layout& l :
       {Layout{.dp = 2, .stage = 3}, {.pp = 4, .schedule = Kind::ZeroBubbleH2}, {.dp = 2, .pp = 2, .stage = 1}}) {
    Config c = config_of(gpt2_model(), l);
    c.gradient_clipping = 0;
    const Trace t = train_threads(post_validated(c), l.ranks(), 4);
    expect_planned(t, 4, l.name());
  }
}

// The version before doubles masters, states and the slices of parameters that are trained.
TEST(PostValidate, KeepsTheVersionBefore) {
  Config c = config_of(gpt2_model(), {});
  in_bf16(c);
  const Config post = post_validated(c);
  const plan::Planned without(c, MeshShape{}, 0, DeviceKind::Cpu), with(post, MeshShape{}, 0, DeviceKind::Cpu);
  const auto bytes = [](const plan::Planned& p, Tag tag) { return p.plan.memory.by_tag[static_cast<size_t>(tag)]; };
  for (const Tag tag : {Tag::Master, Tag::Optimizer}) {
    EXPECT_GT(bytes(without, tag), 0);
    EXPECT_EQ(bytes(with, tag), 2 * bytes(without, tag)) << tag_name(tag);
  }
  EXPECT_EQ(bytes(with, Tag::Params) - bytes(without, Tag::Params), 2 * with.model.num_params());  // without padding
  EXPECT_EQ(bytes(with, Tag::Activations), bytes(without, Tag::Activations));
}

TEST(PostValidate, OptimizersAndFormsOfStates) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> changes = {
      {"SGD",
       [](Config& c) {
         c.optimizer.type = OptimizerType::Sgd, c.optimizer.momentum = 0.9;
         c.gradient_clipping = 0.86;
       }},
      {"Lion", [](Config& c) { c.optimizer.type = OptimizerType::Lion, c.optimizer.lr = 1e-3; }},
      {"Adagrad", [](Config& c) { c.optimizer.type = OptimizerType::Adagrad; }},
      {"AdamW8bit", [](Config& c) { c.optimizer.type = OptimizerType::AdamW8bit; }},
      {"bf16", in_bf16},
      {"boundary", [](Config& c) { c.reduce_order = ReduceOrder::Boundary; }},
      {"token", [](Config& c) { c.loss.norm = LossNorm::Token; }},
      {"kept embedding", [](Config& c) { c.zero.max_reuse_distance = 1'000'000'000; }},
  };
  for (const auto& [name, change] : changes) {
    for (const Layout& l : {Layout{.dp = 2, .stage = 1}, Layout{.pp = 2, .schedule = Kind::ZeroBubbleH2}}) {
      Config c = config_of(gpt2_model(), l);
      in_fp32(c);
      change(c);
      const Undone n = expect_same(c, l.ranks(), name + " " + l.name());
      EXPECT_GT(n.clipped + n.skipped, 0) << name;
      EXPECT_GT(n.kept, 0) << name;
    }
  }
}

// Dropout, shorter sequences and the tokens that layers drop follow the number of the step, also in one that is run
// again.
TEST(PostValidate, RandomNumbersAndLengthsAreThoseOfTheStep) {
  ModelConfig model = gpt2_model();
  model.resid_dropout = model.embd_dropout = model.attn_dropout = 0.2f;
  for (const Layout& l : {Layout{.dp = 2, .stage = 2}, Layout{.pp = 2}}) {
    Config c = config_of(model, l);
    in_fp16(c);
    const Undone n = expect_same(c, l.ranks(), "dropout " + l.name());
    EXPECT_GT(n.skipped, 0);
    const Hooks growing = {.length = [](i64 step) { return step < 3 ? 8 : step < 5 ? 12 : 16; }};
    EXPECT_GT(expect_same(c, l.ranks(), "lengths " + l.name(), growing).skipped, 0);
  }
}

// An evaluation, or anything else that looks at the state between two steps, asks for the verdict first.
TEST(PostValidate, AFinishedStepIsLikeAnyOther) {
  const Layout l{.pp = 2, .schedule = Kind::ZeroBubbleH2};
  Config c = config_of(gpt2_model(), l);
  in_fp16(c);
  Config waits = c;
  waits.pipeline.schedule = Kind::ZeroBubbleH1;
  // Only some steps are finished before the next one.
  const auto finite_after = [](i64 at) {
    return Hooks{.before_step = [at](engine::Engine& engine, i64 step) {
      if (step != at) return;
      engine.finish_step([](const StepRecord&) {});
      EXPECT_TRUE(engine.is_finite());
    }};
  };
  const Trace want = train_threads(waits, 2, kSteps);
  for (const i64 at : {1, 4}) {
    const Trace got = train_threads(post_validated(c), 2, kSteps, 1, finite_after(at));
    EXPECT_TRUE(same_bits(got.weights, want.weights)) << at;
    EXPECT_EQ(got.losses.size(), want.losses.size() - 1) << at;
  }
}

// The last stage's use of a tied matrix is sent when it is complete: the first stage ends its step before the last one
// does, and both have the same sum.
TEST(PostValidate, TheFirstStageDoesNotWaitForTheLastOnesEnd) {
  Config c = config_of(gpt2_model(), {.pp = 2});
  c.pipeline.schedule = Kind::ZeroBubbleH2;
  c = post_validated(c);
  std::atomic<bool> first_has_ended = false;
  run_threads(2, {.timeout_s = 30}, [&](Communicator& pp) {
    const plan::Planned planned(c, MeshShape{.pp = 2}, pp.rank(), DeviceKind::Cpu);
    const plan::RunPlan& plan = planned.plan;
    ASSERT_TRUE(plan.sends_use_ahead);
    const auto device = make_cpu_device(*cpu_ops(), 1);
    const auto self = make_self_communicator({});
    MemoryLedger ledger;
    zero::AllShards shards;
    shards.push_back(std::make_unique<zero::Shards>(plan.dp(), plan.rows, plan.grad_rows, true, zero::GroupRanks{*self},
                                                    *device, ledger, zero::Tiers{}));
    update::Update update(plan, shards, {*self, *self, pp, *self}, *device, ledger,
                          [&](int) { return std::vector<model::ParamSlice>(plan.params.size()); });
    zero::GradStore& grads = shards.front()->grads();
    update.begin(1, 1);
    for (i64 micro = 0; micro < plan.micro_batches; ++micro) {
      for (const std::vector<i64>& pass : plan.dp().grads.passes) {
        for (const i64 unit : pass) {
          for (const TensorView& row : grads.acquire(unit))
            std::fill_n(row.as<float>(), row.numel(), static_cast<float>(pp.rank() + 1));
          grads.commit(unit, micro);
        }
      }
    }
    if (plan.projects) {
      update.send_use();
      while (!first_has_ended) {
        pp.look_for_failures();
        std::this_thread::yield();
      }
    }
    update.finish_gradients();
    if (plan.embeds) first_has_ended = true;
    const zero::Piece tied = plan.dp().layout.whole_pieces().front();
    ASSERT_EQ(tied.param, 0);
    const zero::TierLease sum = shards.front()->gradient(tied, zero::LeaseTo::Read);
    for (i64 i = 0; i < tied.count; ++i)
      ASSERT_EQ(sum.values()[i], static_cast<float>(3 * plan.micro_batches)) << pp.rank();
    pp.barrier("test");
  });
}

// A rank that fails where all meet fails all of them.
TEST(PostValidate, ARankThatFailsAtTheVerdictEndsAll) {
  const Layout l{.dp = 2, .pp = 2};
  Config c = config_of(gpt2_model(), l);
  in_fp32(c);
  const Hooks fails = {.before_step = [](engine::Engine& engine, i64 step) {
    if (step == 2 && engine.mesh().rank() == 1) engine.before_verdict([] { throw Error(Errc::Io, "a disk is full"); });
  }};
  EXPECT_THROW(train_threads(post_validated(c), l.ranks(), 4, 1, fails), Error);
}

}  // namespace post_validate_test
}  // namespace ds::testing
