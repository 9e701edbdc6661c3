// SPDX-License-Identifier: Apache-2.0
// Where masters and optimizer states are kept changes nothing: a run whose states stand elsewhere and come to the
// device piece by piece, in one version or in two, trains with the bits of one that has them there, saves the same,
// goes on from the other's checkpoints, at another layout too, and merges to the same file.

#include <gmock/gmock.h>

#include <fstream>

#include "checkpoint/step_writer.h"
#include "ds/checkpoint.h"
#include "engine/param_table.h"
#include "equivalence/moved_states.h"
#include "equivalence/optimizers.h"
#include "temp_directory.h"

namespace ds::testing {
namespace state_tier_test {

constexpr i64 kSteps = 4;

Hooks moved(int versions, Hooks hooks = {}) {
  hooks.states = [versions](zero::StateStore::Parts parts) {
    return std::make_unique<MovedStates>(std::move(parts), versions);
  };
  return hooks;
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
        const Trace t = train_threads(c, l.ranks(), kSteps, 1, moved(versions));
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
    const Trace t = train_threads(c, 1, kSteps, 1, moved(versions, overflow));
    expect_same_training(t, device, fmt::format("versions {}", versions));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Tier, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Saves what the engine holds as a step of the directory.
std::string save(engine::Engine& engine, const std::string& dir) {
  const engine::ParamTable table = engine::make_param_table(engine.config(), engine.model(), engine.plan());
  engine::HostState state(engine, engine.saved_pieces());
  state.download();
  const engine::Progress& progress = engine.progress();
  CheckpointMeta meta;
  meta.step = progress.step;
  meta.optimizer_step = progress.optimizer_step;
  meta.consumed_samples = progress.consumed_samples;
  meta.work_dtype = engine.plan().work;
  meta.layout_id = engine.plan().layout.id();
  meta.mesh = engine.mesh().shape();
  meta.zero_stage = narrow<int>(engine.config().zero.stage);
  meta.optimizer = table.optimizer;
  return save_checkpoint(dir, meta, table.params, state.pieces(), engine.mesh().world());
}

void load(engine::Engine& engine, const std::string& step) {
  const engine::ParamTable table = engine::make_param_table(engine.config(), engine.model(), engine.plan());
  engine::HostState state(engine, engine.held_pieces());
  const CheckpointMeta meta =
      load_checkpoint(step, engine.plan().work, table.params, state.pieces(), engine.mesh().world(), table.optimizers);
  state.upload();
  engine.publish_params();
  engine.progress() = {meta.step, meta.optimizer_step, meta.skipped_steps, meta.consumed_samples};
}

struct Saved {
  std::string step;
  Trace trace;
};

Saved train_and_save(const Config& c, const Layout& l, const std::string& dir, Hooks hooks) {
  Saved saved;
  hooks.at_end = [&](engine::Engine& engine) {
    const std::string step = save(engine, dir);
    if (engine.mesh().rank() == 0) saved.step = step;
  };
  saved.trace = train_threads(c, l.ranks(), kSteps, 1, hooks);
  return saved;
}

TEST(TierCheckpoints, AreThoseOfTheDevice) {
  for (const size_t which : {0, 6, 10}) {  // one pass, several passes, codes
    const OptimizerCase& optimizer = kOptimizers[which];
    for (const DType work : {DType::F32, DType::BF16}) {
      const std::string what = fmt::format("{} {}", optimizer.name, dtype_name(work));
      const Layout two = {.dp = 2, .stage = 2}, other = {.dp = 4, .stage = 3};
      const TempDirectory dir;
      const Saved device = train_and_save(config(two, optimizer, work), two, dir / "device", {});
      const Saved away = train_and_save(config(two, optimizer, work), two, dir / "away", moved(2));
      const auto merged = [&](const Saved& s, const std::string& name) {
        MergeOptions options;
        options.optimizer = true;
        (void)merge_checkpoint(s.step, dir / name, options);
        return bytes_of(dir / name);
      };
      EXPECT_EQ(merged(away, "away.h5").size(), merged(device, "device.h5").size()) << what;
      EXPECT_EQ(merged(away, "away.safetensors"), merged(device, "device.safetensors")) << what;

      // On from the tier's checkpoint on the device, and from the device's in the tier, at another layout.
      const auto resumed = [&](const Layout& l, const Saved& from, Hooks hooks) {
        hooks.start = [&](engine::Engine& engine) { load(engine, from.step); };
        return train_threads(config(l, optimizer, work), l.ranks(), kSteps, 1, hooks);
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
