// SPDX-License-Identifier: Apache-2.0
// A model of a program's own (examples/own_model.h) trains as those of the zoo do: with the same bits at every layout
// that promises them, in the memory and with the messages of its plan; predictions and the sharding of checkpoints
// build it, too.

#include "examples/own_model.h"
#include "ds/memreport.h"
#include "equivalence/checkpoints.h"

namespace ds::testing {
namespace own_model_test {

constexpr i64 kSteps = 4;

ModelConfig own_mlp() {
  return {.vocab_size = 61,
          .hidden = 16,
          .layers = 3,
          .heads = 2,
          .kv_heads = 2,
          .head_dim = 8,
          .intermediate = 40,
          .max_positions = 16,
          .source = std::make_shared<own::MlpModel>("own-mlp")};
}

TEST(OwnModel, TrainsWithTheSameBitsAtEveryLayout) {
  const Trace one = train_threads(config_of(own_mlp(), {}), 1, kSteps);
  EXPECT_LT(one.losses.back(), one.losses.front());
  ASSERT_EQ(std::ssize(one.weights), 61 * 16 + 3 * 2 * 16 * 40 + 16 + 61 * 16);
  for (const Layout& l : {Layout{.dp = 2, .stage = 1},
                          {.dp = 2, .stage = 2},
                          {.dp = 4, .stage = 3},
                          {.pp = 2},
                          {.dp = 2, .pp = 2, .stage = 3},
                          {.dp = 2, .checkpoints = Granularity::Layer, .interval = 2, .stage = 3}}) {
    const Trace t = train_threads(config_of(own_mlp(), l), l.ranks(), kSteps);
    expect_same_training(t, one, l.name());
    expect_planned(t, kSteps, l.name());
  }
}

TEST(OwnModel, IsSharedByTensorAndSequenceParallelRanks) {
  const Trace one = train_threads(config_of(own_mlp(), {}), 1, kSteps);
  for (const Layout& l : {Layout{.tp = 2}, {.tp = 2, .sequence = true}, {.dp = 2, .tp = 2, .stage = 3}, {.sp = 2}}) {
    const Trace t = train_threads(config_of(own_mlp(), l), l.ranks(), kSteps);
    expect_close(t, one, l.name());
    expect_planned(t, kSteps, l.name());
  }
}

TEST(OwnModel, IsGatheredInTiles) {
  const Layout l{.dp = 2, .stage = 3};
  Config c = config_of(own_mlp(), l);
  const Trace whole = train_threads(c, l.ranks(), kSteps);
  c.zero.tile_size = 16 * 8;
  const Trace tiles = train_threads(c, l.ranks(), kSteps);
  expect_close(tiles, whole, "tiles");
  expect_planned(tiles, kSteps, "tiles");
  EXPECT_GT(tiles.sent.at("dp.all_gather").calls, whole.sent.at("dp.all_gather").calls);
}

// Shorter passes are planned with the same source.
TEST(OwnModel, TakesStepsOfOtherLengths) {
  Hooks hooks;
  hooks.length = [](i64 step) { return step < 2 ? 8 : 16; };
  const Trace one = train_threads(config_of(own_mlp(), {}), 1, kSteps, 1, hooks);
  const Layout l{.dp = 2, .stage = 3};
  expect_same_training(train_threads(config_of(own_mlp(), l), l.ranks(), kSteps, 1, hooks), one, l.name());
}

TEST(OwnModel, IsPredicted) {
  const Layout l{.dp = 2, .stage = 3};
  const Config c = config_of(own_mlp(), l);
  const Trace t = train_threads(c, l.ranks(), 1);
  const memreport::Prediction p = memreport::predict(c, {.ranks = 2}, DeviceKind::Cpu);
  EXPECT_EQ(p.num_params, std::ssize(t.weights));
  int compared = 0;
  for (const memreport::TagBytes& row : p.worst_group().memory) {
    for (const Tag tag : {Tag::Params, Tag::Master, Tag::Optimizer, Tag::Gathered, Tag::Activations, Tag::Logits}) {
      if (row.tag != tag_name(tag)) continue;
      EXPECT_EQ(row.bytes, t.counted[static_cast<size_t>(tag)]) << row.tag;
      ++compared;
    }
  }
  EXPECT_GE(compared, 5);
}

// Searches read the configuration again for each arrangement, and build deeper models.
TEST(OwnModel, IsSearchedForArrangements) {
  memreport::Source source;
  source.ranks = 2;
  source.name = "cfg";
  source.parts.model = own_mlp();
  source.text = R"({"train_batch_size": 8, "data": {"seq_length": 16}})";
  source.config = parse_config(source.text, "cfg", {}, 2, ConfigUse::Inspect, source.parts);
  ASSERT_TRUE(source.config.ok()) << source.config.message();
  constexpr i64 kWorkspace = i64{64} << 20;  // of matrix products on a GPU
  const memreport::FitOptions options{.world = {.ranks = 2}, .memory = kWorkspace + (i64{1} << 20), .most = 3};
  const memreport::FitResult r =
      memreport::fit(source, options, memreport::Hardware::of_peaks({1e14, 1e12, 1e11, 1e10}, 2, ""));
  EXPECT_GT(r.num_fitting, 0);
  ASSERT_GT(r.largest.layers, 3);
  EXPECT_EQ(r.largest.params, 2 * 61 * 16 + 16 + r.largest.layers * 2 * 16 * 40);
  EXPECT_EQ(memreport::arranged(source, r.fitting.front()).model.source, source.parts.model->source);
}

TEST(OwnModel, IsShardedByTheProgram) {
  const TempDirectory dir;
  const Layout one{}, two{.pp = 2, .tp = 2};
  const Saved saved = train_and_save(config_of(own_mlp(), one), one, kSteps, dir / "run");
  ShardOptions options{.mesh = {.pp = 2, .tp = 2}};
  try {
    (void)shard_checkpoint(saved.step, dir / "no", options);
    FAIL();
  } catch (const Error& e) {  // nothing here knows the model
    EXPECT_NE(e.code(), Errc::Internal) << e.what();
  }
  options.model = own_mlp();
  const ShardResult sharded = shard_checkpoint(saved.step, dir / "sharded", options);
  EXPECT_EQ(sharded.num_parameters, std::ssize(saved.trace.weights));
  const Trace from_one = resume(config_of(own_mlp(), two), two, kSteps, saved.step);
  expect_same_training(resume(config_of(own_mlp(), two), two, kSteps, sharded.step_dir), from_one, "sharded");
}

}  // namespace own_model_test
}  // namespace ds::testing
