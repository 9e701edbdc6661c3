// SPDX-License-Identifier: Apache-2.0
// Updates that are delayed by one step, and run beside the next one, give the bits of their recurrence computed in turn
// by a tier of the tests: on the device's own states, without a thread.

#include <cstring>

#include <gmock/gmock.h>

#include "equivalence/tiers.h"
#include "slow_set.h"

namespace ds::testing {
namespace delayed_test {

constexpr i64 kSteps = 5, kStart = 2;

// update(θ_k, g_{k-1}) in step k, by the store of the device.
class InTurn final : public zero::StateStore {
 public:
  InTurn(Parts parts, i64 start)
      : StateStore(std::move(parts)),
        start_(start),
        states_({.layout = parts_.layout,
                 .params = parts_.params,
                 .gradients = gradients_,
                 .work = parts_.work,
                 .device = parts_.device,
                 .ledger = parts_.ledger,
                 .held = parts_.held}) {}

  void update(zero::Tile tile, const UpdateSpec& spec, zero::VerdictHandle& verdict) override {
    Put& put = now_.emplace_back(Put{tile, spec, verdict.resolve(), {}});
    for (const zero::TilePiece& p : tile) {
      const zero::TierLease g = parts_.gradients.lease(p.piece, zero::LeaseTo::Read);
      put.gradients[p.piece.shard_offset].assign(g.values(), g.values() + p.piece.count);
    }
  }
  void settle(zero::VerdictHandle&, i64 number) override {
    if (number >= start_) std::swap(now_, before_);  // what the last step left is done now
    apply(now_);
  }
  bool is_delayed() const noexcept override { return true; }
  void finish() override { apply(before_); }
  void for_each_master(zero::Tile tile, Visit visit) override { states_.for_each_master(tile, visit); }
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access) override {
    EXPECT_TRUE(before_.empty());
    return states_.lease(piece, access);
  }
  bool in_place() const noexcept override { return states_.in_place(); }

 private:
  struct Put {
    zero::Tile tile;
    UpdateSpec spec;
    GradVerdict verdict;
    std::map<i64, std::vector<float>> gradients;  // by place in the shard
  };
  struct Verdict final : zero::VerdictHandle {
    GradVerdict v;
    const GradVerdict* on_device() const noexcept override { return &v; }
    const GradVerdict& resolve() override { return v; }
  };
  class Gradients final : public zero::PieceMemory {
   public:
    zero::TierLease lease(const zero::Piece& p, zero::LeaseTo access) const override {
      return {nullptr, on_host(p), 0, 0, access};
    }
    bool in_place() const noexcept override { return true; }
    void* on_host(const zero::Piece& p) const noexcept override { return of->at(p.shard_offset).data(); }
    std::map<i64, std::vector<float>>* of = nullptr;
  };
  void apply(std::vector<Put>& puts) {
    for (Put& put : puts) {
      Verdict verdict;
      verdict.v = put.verdict;
      gradients_.of = &put.gradients;
      states_.update(put.tile, put.spec, verdict);
    }
    puts.clear();
  }
  void end_lease(const zero::Piece&, zero::LeaseTo, const zero::PieceState&) noexcept override {}

  const i64 start_;
  Gradients gradients_;
  zero::DeviceStates states_;
  std::vector<Put> now_, before_;  // of this step, and of the one before
};

Hooks in_turn(Hooks hooks = {}) {
  hooks.parts.tiers.states = [](zero::StateStore::Parts parts) {
    return std::make_unique<InTurn>(std::move(parts), kStart);
  };
  return hooks;
}

Config delayed(Config c, OffloadDevice device, const std::string& dir) {
  c.zero.offload_optimizer = {
      .device = device, .nvme_path = dir, .buffer_count = 2, .delayed_update = true, .delayed_update_start = kStart};
  c.zero.sub_group_size = 2 * kStateBlock;
  return c;
}

bool by_elements(const OptimizerCase& o) { return !any_optimizer(o, &OptimizerRow::sums_over_ranks); }

std::vector<OptimizerCase> optimizers() {
  std::vector<OptimizerCase> all;
  std::ranges::copy_if(kOptimizers, std::back_inserter(all), by_elements);
  return all;
}

class Delayed : public ::testing::TestWithParam<OptimizerCase> {};

TEST_P(Delayed, IsItsRecurrence) {
  const TempDirectory dir;
  test::EveryNth tried(3, std::strlen(GetParam().name));
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : kTierLayouts) {
      if (!tried()) continue;
      const Config c = tier_config(l, GetParam(), work), file = delayed(c, OffloadDevice::Nvme, dir.path());
      const Trace want = train_threads(c, l.ranks(), kSteps, 1, in_turn());
      const std::string what = fmt::format("{} {}", l.name(), dtype_name(work));
      EXPECT_EQ(want.losses[1], train_threads(c, l.ranks(), 2).losses[1]) << what << ": not delayed yet";
      EXPECT_NE(want.losses[3], train_threads(c, l.ranks(), 4).losses[3]) << what << ": delayed";
      for (const bool memory : {false, true}) {
        const Trace got = train_threads(memory ? delayed(c, OffloadDevice::Cpu, "") : file, l.ranks(), kSteps);
        expect_same_training(got, want, what + (memory ? " memory" : " file"));
      }
    }
  }
}

// A step that is skipped has no update; the update of the step before it is done.
TEST_P(Delayed, ASkippedStepIsForgotten) {
  const TempDirectory dir;
  const Config c = tier_config({.stage = 2}, GetParam(), DType::F16);
  LossScaler::State before;
  const Hooks overflow = {.before_step = [&before](engine::Engine& engine, i64 step) {
    if (step == 4) engine.scaler().restore(before);
    if (step != 3) return;
    before = engine.scaler().state();
    LossScaler::State large = before;
    large.scale = 0x1p60;
    engine.scaler().restore(large);
  }};
  const Trace want = train_threads(c, 1, kSteps + 1, 1, in_turn(overflow));
  EXPECT_EQ(want.skipped, std::vector<bool>({false, false, false, true, false, false}));
  const Config file = delayed(c, OffloadDevice::Nvme, dir.path());
  expect_same_training(train_threads(file, 1, kSteps + 1, 1, overflow), want, "skipped");
}

INSTANTIATE_TEST_SUITE_P(All, Delayed, ::testing::ValuesIn(optimizers()),
                         [](const auto& test) { return std::string(test.param.name); });

// When each step is waited for, nothing is late.
TEST(DelayedUpdates, ThatAreFinishedAreThoseOfMemory) {
  const TempDirectory dir;
  const Hooks finish = {.after_step = [](engine::Engine& engine, i64) { engine.finish_updates(); }};
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, {.dp = 2, .stage = 2}, {.dp = 2, .stage = 3}}) {
      const Config c = tier_config(l, optimizer_named("AdamW"), work);
      const Config o = delayed(c, l.stage > 0 ? OffloadDevice::Nvme : OffloadDevice::Cpu, dir.path());
      expect_same_training(train_threads(o, l.ranks(), kSteps, 1, finish), train_threads(c, l.ranks(), kSteps),
                           fmt::format("{} {}", l.name(), dtype_name(work)));
    }
  }
  // The errors of coded gradients are kept.
  const Layout l{.dp = 2, .stage = 3};
  Config c = tier_config(l, optimizer_named("AdamW"), DType::F32);
  c.zero.quantized_gradients = c.zero.loco.enabled = true;
  expect_same_training(train_threads(delayed(c, OffloadDevice::Nvme, dir.path()), l.ranks(), kSteps, 1, finish),
                       train_threads(c, l.ranks(), kSteps), "LoCo");
}

// A run that saves finishes its updates first. A run that resumes from there, at another layout too, does the same.
TEST(DelayedUpdates, GoOnFromCheckpoints) {
  for (const char* name : {"AdamW", "AdamW8bit"}) {
    const OptimizerCase& optimizer = optimizer_named(name);
    const TempDirectory dir;
    const Layout two{.dp = 2, .stage = 2}, four{.dp = 4, .stage = 3};
    const auto config = [&](const Layout& l) {
      return delayed(tier_config(l, optimizer, DType::BF16), OffloadDevice::Nvme, dir.path());
    };
    const Hooks finish = {.after_step = [](engine::Engine& engine, i64 step) {
      if (step == kSteps - 1) engine.finish_updates();
    }};
    const Trace whole = train_threads(config(two), 2, 2 * kSteps, 1, finish);
    const Saved half = train_and_save(config(two), two, kSteps, dir / "half");
    for (const Layout& l : {two, four}) {
      const Trace rest = resume(config(l), l, kSteps, half.step);
      EXPECT_TRUE(same_bits(rest.losses, std::vector(whole.losses.begin() + kSteps, whole.losses.end()))) << l.name();
      EXPECT_TRUE(same_bits(rest.weights, whole.weights)) << l.name();
    }
  }
}

// An update that is under way when a run ends by an error is waited for: its memory exists until then.
TEST(DelayedUpdates, AreWaitedForWhenARunFails) {
  const TempDirectory dir;
  const Hooks fail = {.after_step = [](engine::Engine&, i64 step) {
    if (step == 3) throw Error(Errc::Io, "no line can be written");
  }};
  for (int i = 0; i < 20; ++i) {
    Config c =
        delayed(tier_config({.stage = 1}, optimizer_named("AdamW"), DType::BF16), OffloadDevice::Nvme, dir.path());
    c.zero.sub_group_size = 1024;
    c.aio = {.method = AioMethod::Threads, .block_size = 4096, .queue_depth = 1};
    try {
      train_threads(c, 1, kSteps, 1, fail);
      FAIL();
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "no line can be written");
    }
  }
}

// With gradients and slices of parameters in files as well; the traffic of an update is counted when it has ended.
TEST(DelayedUpdates, MoveWhatIsPredicted) {
  const TempDirectory dir;
  for (const bool arrays : {false, true}) {
    const Layout l{.dp = 2, .stage = 3};
    const Config memory = tier_config(l, optimizer_named("AdamW"), DType::BF16);
    Config c = delayed(memory, OffloadDevice::Nvme, dir.path());
    c.zero.offload_optimizer.pipeline_read = c.zero.offload_optimizer.pipeline_write = false;
    c.zero.offload_optimizer.gradients = arrays;
    if (arrays) c.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
    const std::string what = arrays ? "arrays" : "states";
    expect_same_training(train_threads(c, l.ranks(), kSteps, 1, with_predicted_traffic(kSteps, what)),
                         train_threads(memory, l.ranks(), kSteps, 1, in_turn()), what);
  }
}

}  // namespace delayed_test
}  // namespace ds::testing
