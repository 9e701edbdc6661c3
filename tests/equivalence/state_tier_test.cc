// SPDX-License-Identifier: Apache-2.0
// The place of masters and optimizer states changes nothing. A run whose states are kept elsewhere and come to the
// device piece by piece, in one version or in two, trains with the bits of a run that keeps them on the device. It
// saves the same, resumes from the other's checkpoints, at another layout too, and merges to the same file.

#include <cstring>

#include <gmock/gmock.h>

#include "equivalence/moved_states.h"
#include "equivalence/tiers.h"
#include "slow_set.h"

namespace ds::testing {
namespace state_tier_test {

constexpr i64 kSteps = kTierSteps;

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

// Trains, and checks that the tier is used instead of device memory.
Trace train_moved(const Config& c, const Layout& l, int versions, const Hooks& hooks = {}) {
  const i64 before = used, arrays_before = used_arrays;
  Trace t = train_threads(c, l.ranks(), kSteps, 1, moved(versions, hooks));
  EXPECT_GE(used - before, kSteps);
  if (versions == 2 && l.stage > 0) {
    EXPECT_GE(used_arrays - arrays_before, kSteps);
  }
  return t;
}

class Tier : public ::testing::TestWithParam<OptimizerCase> {};

TEST_P(Tier, ChangesNoBit) {
  test::EveryNth tried(3, std::strlen(GetParam().name));
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, {.dp = 2, .stage = 0}, {.dp = 2, .pp = 2, .stage = 3}, {.tp = 2, .stage = 1}}) {
      if (!tried()) continue;
      const Config c = tier_config(l, GetParam(), work);
      const Trace device = train_threads(c, l.ranks(), kSteps);
      for (const int versions : {1, 2}) {
        const Trace t = train_moved(c, l, versions);
        expect_same_training(t, device, fmt::format("{} {} versions {}", l.name(), dtype_name(work), versions));
      }
    }
  }
}

// The same for parameters that are their own masters in 16 bits: no tier then holds a master.
TEST_P(Tier, ChangesNoBitWithoutMasters) {
  if (any_optimizer(GetParam(), &OptimizerRow::needs_matrices)) return;  // the configuration refuses it
  for (const Layout& l : {Layout{}, {.dp = 2, .stage = 0}, {.dp = 2, .pp = 2, .stage = 3}}) {
    Config c = tier_config(l, GetParam(), DType::BF16);
    c.bf16.bf16_master_weights_and_grads = c.bf16.stochastic_rounding = true;
    c.grad_accum_dtype = DType::BF16;
    const Trace device = train_threads(c, l.ranks(), kSteps);
    for (const int versions : {1, 2})
      expect_same_training(train_moved(c, l, versions), device, fmt::format("{} versions {}", l.name(), versions));
  }
}

// A step that is skipped leaves no trace in any tier: the values that its passes wrote are never seen.
TEST_P(Tier, ASkippedStepIsForgotten) {
  const Config c = tier_config({}, GetParam(), DType::F16);
  f16 healthy{};
  const Hooks overflow = with_a_skipped_step(healthy);
  const Trace device = train_threads(c, 1, kSteps, 1, overflow);
  EXPECT_EQ(device.skipped, kTheThirdIsSkipped);
  for (const int versions : {1, 2}) {
    const Trace t = train_moved(c, {}, versions, overflow);
    expect_same_training(t, device, fmt::format("versions {}", versions));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Tier, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(TierCheckpoints, AreThoseOfTheDevice) {
  expect_the_checkpoints_of_memory(
      {{.name = "a tier of one version", .hooks = moved(1)}, {.name = "a tier of two versions", .hooks = moved(2)}});
}

// A NaN is found, wherever the state is kept.
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
  train_threads(tier_config({}, kOptimizers[0], DType::BF16), 1, 1, 1, moved(2, look));
}

}  // namespace state_tier_test
}  // namespace ds::testing
