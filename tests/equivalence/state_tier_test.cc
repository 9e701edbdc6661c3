// SPDX-License-Identifier: Apache-2.0
// Where masters and optimizer states are kept changes nothing: a run whose states stand elsewhere and come to the
// device piece by piece, in one version or in two, trains with the bits of one that has them there, saves the same,
// goes on from the other's checkpoints, at another layout too, and merges to the same file.

#include <gmock/gmock.h>

#include "checkpoint/step_writer.h"
#include "equivalence/checkpoints.h"
#include "equivalence/moved_states.h"
#include "equivalence/optimizers.h"

namespace ds::testing {
namespace state_tier_test {

constexpr i64 kSteps = 4;

std::atomic<i64> used = 0, used_arrays = 0;

// With two versions gradients and slices of parameters are away, too.
Hooks moved(int versions, Hooks hooks = {}) {
  hooks.parts.tiers.states = [versions](zero::StateStore::Parts parts) {
    return std::make_unique<MovedStates>(std::move(parts), versions, used);
  };
  if (versions == 1) return hooks;
  hooks.parts.tiers.grads =
      hooks.parts.tiers.params = [](Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, i64 most) {
        EXPECT_LE(most, bytes);
        return std::make_unique<MovedArray>(device, ledger, tag, bytes, used_arrays);
      };
  return hooks;
}

// That a tier is at work, and not the device's.
Trace train_moved(const Config& c, const Layout& l, int versions, const Hooks& hooks = {}) {
  const i64 before = used, arrays_before = used_arrays;
  Trace t = train_threads(c, l.ranks(), kSteps, 1, moved(versions, hooks));
  EXPECT_GE(used - before, kSteps);
  if (versions == 2 && l.stage > 0) {
    EXPECT_GE(used_arrays - arrays_before, kSteps);
  }
  return t;
}

const OptimizerCase& optimizer_named(std::string_view name) {
  return *std::ranges::find(kOptimizers, name, [](const OptimizerCase& o) { return std::string_view(o.name); });
}

Config config(const Layout& l, const OptimizerCase& optimizer, DType work, i64 micro_batches = 4) {
  Config c = config_of(of_four_heads(tiny_gpt2()), l, micro_batches);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.fp16.initial_scale_power = 8;
  c.communication_data_type = c.work_dtype();
  c.gradient_clipping = 0.5;
  optimizer.choose(c.optimizer);
  return c;
}

class Tier : public ::testing::TestWithParam<OptimizerCase> {};

TEST_P(Tier, ChangesNoBit) {
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, {.dp = 2, .stage = 0}, {.dp = 2, .pp = 2, .stage = 3}, {.tp = 2, .stage = 1}}) {
      const Config c = config(l, GetParam(), work);
      const Trace device = train_threads(c, l.ranks(), kSteps);
      for (const int versions : {1, 2}) {
        const Trace t = train_moved(c, l, versions);
        expect_same_training(t, device, fmt::format("{} {} versions {}", l.name(), dtype_name(work), versions));
      }
    }
  }
}

// A step that is skipped leaves no trace in any tier: what its passes wrote is never seen.
TEST_P(Tier, ASkippedStepIsForgotten) {
  const Config c = config({}, GetParam(), DType::F16);
  f16 healthy{};
  const Hooks overflow = {.before_step = [&](engine::Engine& engine, i64 step) {
    const zero::Piece first = engine.held_pieces().front();
    zero::Piece one = first;
    one.count = std::min<i64>(first.count, zero::StateStore::kLeaseElems);
    const zero::StateLease lease = engine.lease(one);
    f16& weight = *static_cast<f16*>(lease[State::Param]);
    if (step == 3) weight = healthy;
    if (step == 2) healthy = std::exchange(weight, to_f16(INFINITY));
  }};
  const Trace device = train_threads(c, 1, kSteps, 1, overflow);
  EXPECT_EQ(device.skipped, (std::vector<bool>{false, false, true, false}));
  for (const int versions : {1, 2}) {
    const Trace t = train_moved(c, {}, versions, overflow);
    expect_same_training(t, device, fmt::format("versions {}", versions));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Tier, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(TierCheckpoints, AreThoseOfTheDevice) {
  for (const char* which : {"AdamW", "Lamb", "AdamW8bit"}) {  // one pass, several passes, codes
    const OptimizerCase& optimizer = optimizer_named(which);
    for (const DType work : {DType::F32, DType::BF16}) {
      const std::string what = fmt::format("{} {}", optimizer.name, dtype_name(work));
      const Layout two = {.dp = 2, .stage = 2}, other = {.dp = 4, .stage = 3};
      const TempDirectory dir;
      const Saved device = train_and_save(config(two, optimizer, work), two, kSteps, dir / "device");
      const Saved away = train_and_save(config(two, optimizer, work), two, kSteps, dir / "away", moved(2));
      const auto merged = [&](const Saved& s, const std::string& name) {
        MergeOptions options;
        options.optimizer = true;
        (void)merge_checkpoint(s.step, dir / name, options);
        return bytes_of(dir / name);
      };
      EXPECT_EQ(merged(away, "away.h5"), merged(device, "device.h5")) << what;
      EXPECT_EQ(merged(away, "away.safetensors"), merged(device, "device.safetensors")) << what;

      // On from the tier's checkpoint on the device, and from the device's in the tier, at another layout.
      const auto resumed = [&](const Layout& l, const Saved& from, const Hooks& hooks) {
        return resume(config(l, optimizer, work), l, kSteps, from.step, hooks);
      };
      const Trace want = resumed(two, device, {});
      expect_same_training(resumed(two, away, {}), want, what + ": on the device");
      for (const int versions : {1, 2}) {
        expect_same_training(resumed(two, device, moved(versions)), want, what + ": in the tier");
        expect_same_training(resumed(other, device, moved(versions)), want, what + ": in the tier, elsewhere");
      }
    }
  }
}

// What is not a number shows, wherever it is kept.
TEST(TierCheckpoints, StatesThatAreNoNumbersAreFound) {
  const Hooks look = {.at_end = [](engine::Engine& engine) {
    EXPECT_TRUE(engine.is_finite());
    for (const zero::Piece& piece : engine.held_pieces()) {
      const auto set = [&](float value) {
        const zero::StateLease lease = engine.lease(piece);
        return std::exchange(lease.values(State::ExpAvg)[piece.count - 1], value);
      };
      const float was = set(std::numeric_limits<float>::quiet_NaN());
      EXPECT_FALSE(engine.is_finite());
      set(was);
      EXPECT_TRUE(engine.is_finite());
    }
  }};
  train_threads(config({}, kOptimizers[0], DType::BF16), 1, 1, 1, moved(2, look));
}

}  // namespace state_tier_test
}  // namespace ds::testing
