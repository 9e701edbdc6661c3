// SPDX-License-Identifier: Apache-2.0
#pragma once
// Common parts of the tests of tiers: runs that a tier must not change.

#include <algorithm>
#include <cstring>
#include <functional>

#include "checkpoint/step_writer.h"
#include "equivalence/checkpoints.h"
#include "equivalence/optimizers.h"
#include "slow_set.h"

namespace ds::testing {

inline constexpr i64 kTierSteps = 4;

inline const OptimizerCase& optimizer_named(std::string_view name) {
  return *std::ranges::find(kOptimizers, name, [](const OptimizerCase& o) { return std::string_view(o.name); });
}

inline Config tier_config(const Layout& l, const OptimizerCase& optimizer, DType work) {
  Config c = config_of(of_four_heads(tiny_gpt2()), l, l.dp == 3 ? 6 : 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.fp16.initial_scale_power = 8;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  optimizer.choose(c.optimizer);
  return c;
}

// A weight is infinite in the third step of a run of one rank in fp16, which is skipped.
inline Hooks with_a_skipped_step(f16& healthy) {
  return {.before_step = [&healthy](engine::Engine& engine, i64 step) {
    zero::Piece one = engine.held_pieces().front();
    one.count = std::min<i64>(one.count, zero::StateStore::kLeaseElems);
    const zero::StateLease lease = engine.lease(one);
    f16& weight = *static_cast<f16*>(lease[State::Param]);
    if (step == 3) weight = healthy;
    if (step == 2) healthy = std::exchange(weight, to_f16(INFINITY));
  }};
}
inline const std::vector<bool> kTheThirdIsSkipped = {false, false, true, false};

// A run in a tier: its configuration, made of one in memory, and its parts.
struct TierRun {
  std::string name;
  std::function<Config(Config)> config = [](Config c) { return c; };
  Hooks hooks = {};
};

// Layouts at every stage that has tiers.
inline const std::vector<Layout> kTierLayouts = {
    {.stage = 1}, {.dp = 2, .stage = 2}, {.dp = 2, .pp = 2, .stage = 3}, {.dp = 3, .stage = 3}, {.tp = 2, .stage = 1}};

// Checks that the last of so many steps has the predicted traffic of files.
inline Hooks with_predicted_traffic(i64 steps, const std::string& what) {
  return {.after_step = [steps, what](engine::Engine& engine, i64 step) {
    thread_local offload::FileCounts before;
    const offload::FileCounts now = engine.offload().moved();
    const plan::RunPlan& plan = engine.plan();
    if (step == steps - 1) {
      EXPECT_EQ(now.read_bytes - before.read_bytes,
                plan.traffic.state_files.read_bytes + plan.traffic.array_files.read_bytes)
          << what;
      EXPECT_EQ(now.written_bytes - before.written_bytes,
                plan.traffic.state_files.written_bytes + plan.traffic.array_files.written_bytes)
          << what;
    }
    before = now;
  }};
}

// Runs in the tiers have the bits of runs in memory.
inline void expect_the_bits_of_memory(const OptimizerCase& optimizer, const std::vector<TierRun>& tiers) {
  test::EveryNth tried(3, std::strlen(optimizer.name));
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : kTierLayouts) {
      if (!tried()) continue;
      const Config c = tier_config(l, optimizer, work);
      const Trace want = train_threads(c, l.ranks(), kTierSteps);
      for (const TierRun& t : tiers)
        expect_same_training(train_threads(t.config(c), l.ranks(), kTierSteps, 1, t.hooks), want,
                             fmt::format("{} {} {}", l.name(), dtype_name(work), t.name));
    }
  }
}

// A step that is skipped leaves no trace in a tier.
inline void expect_a_skipped_step_is_forgotten(const OptimizerCase& optimizer, const std::vector<TierRun>& tiers) {
  const Config c = tier_config({.stage = 2}, optimizer, DType::F16);
  f16 healthy{};
  const Hooks overflow = with_a_skipped_step(healthy);
  const Trace want = train_threads(c, 1, kTierSteps, 1, overflow);
  EXPECT_EQ(want.skipped, kTheThirdIsSkipped);
  for (const TierRun& t : tiers) {
    Hooks hooks = t.hooks;
    hooks.before_step = overflow.before_step;
    expect_same_training(train_threads(t.config(c), 1, kTierSteps, 1, hooks), want, t.name);
  }
}

// The last of the tiers saves the same as memory does. A run resumes in one from the other's checkpoint, at another
// layout too, and both merge to the same files.
inline void expect_the_checkpoints_of_memory(const std::vector<TierRun>& tiers) {
  for (const char* which : {"AdamW", "Lamb", "AdamW8bit"}) {  // one pass, several passes, codes
    const OptimizerCase& optimizer = optimizer_named(which);
    for (const DType work : {DType::F32, DType::BF16}) {
      if (!test::in_slow_set() && (work == DType::BF16) != (optimizer.name == std::string_view("Lamb"))) continue;
      const std::string what = fmt::format("{} {}", optimizer.name, dtype_name(work));
      const Layout two = {.dp = 2, .stage = 2}, other = {.dp = 4, .stage = 3};
      const TempDirectory dir;
      const auto in = [&](const TierRun& t, const Layout& l) { return t.config(tier_config(l, optimizer, work)); };
      const TierRun memory{.name = "memory"};
      const Saved here = train_and_save(in(memory, two), two, kTierSteps, dir / "memory");
      const Saved away = train_and_save(in(tiers.back(), two), two, kTierSteps, dir / "away", tiers.back().hooks);
      const auto merged = [&](const Saved& s, const std::string& name) {
        MergeOptions options;
        options.optimizer = true;
        (void)merge_checkpoint(s.step, dir / name, options);
        return bytes_of(dir / name);
      };
      EXPECT_EQ(merged(away, "away.h5"), merged(here, "here.h5")) << what;
      EXPECT_EQ(merged(away, "away.safetensors"), merged(here, "here.safetensors")) << what;

      const auto resumed = [&](const TierRun& t, const Layout& l, const Saved& from) {
        return resume(in(t, l), l, kTierSteps, from.step, t.hooks);
      };
      const Trace want = resumed(memory, two, here);
      expect_same_training(resumed(memory, two, away), want, what + ": in memory");
      for (const TierRun& t : tiers) {
        for (const Layout& l : {two, other})
          expect_same_training(resumed(t, l, here), want, fmt::format("{}: in {}, {}", what, t.name, l.name()));
      }
    }
  }
}

}  // namespace ds::testing
