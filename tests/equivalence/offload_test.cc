// SPDX-License-Identifier: Apache-2.0
// States that are offloaded to a file train with the bits of states in memory, whatever method reads the file and
// however many of its tiles are in memory at a time. They are saved, loaded and merged alike, and take the memory and
// disk traffic that were predicted.

#include <gmock/gmock.h>

#include "equivalence/tiers.h"
#include "slow_set.h"

namespace ds::testing {
namespace offload_test {

constexpr i64 kSteps = kTierSteps;

// With tiles so small that a model of a test has many of them.
Config offloaded(Config c, const std::string& dir) {
  c.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir, .buffer_count = 2};
  c.zero.sub_group_size = 2 * kStateBlock;
  return c;
}

// Looks that a file is at work, of the size that is planned.
Hooks with_file(Hooks hooks = {}) {
  hooks.after_step = [](engine::Engine& engine, i64) {
    const offload::FileCounts moved = engine.offload().moved();
    i64 bytes = 0;
    for (const Tag tag : {Tag::Master, Tag::Optimizer}) {
      const i64 planned = engine.plan().memory.files[static_cast<size_t>(tag)];
      EXPECT_EQ(engine.offload().files().current(tag), planned) << tag_name(tag);
      EXPECT_EQ(engine.ledger().current(Tag::Master), 0);
      bytes += planned;
    }
    if (bytes > 0) {
      EXPECT_GT(moved.written_bytes, 0);
      // Not where all tiles can be in memory.
      if (bytes > engine.plan().memory.by_tag[static_cast<size_t>(Tag::Offload)]) {
        EXPECT_GT(moved.read_bytes, 0);
      }
    }
  };
  return hooks;
}

class Offload : public ::testing::TestWithParam<OptimizerCase> {};

TEST_P(Offload, ChangesNoBit) {
  const TempDirectory dir;
  expect_the_bits_of_memory(
      GetParam(),
      {{.name = "a file", .config = [&](const Config& c) { return offloaded(c, dir.path()); }, .hooks = with_file()}});
}

TEST_P(Offload, ASkippedStepIsForgotten) {
  const TempDirectory dir;
  expect_a_skipped_step_is_forgotten(
      GetParam(), {{.name = "a file", .config = [&](const Config& c) { return offloaded(c, dir.path()); }}});
}

INSTANTIATE_TEST_SUITE_P(All, Offload, ::testing::ValuesIn(kOptimizers),
                         [](const auto& test) { return std::string(test.param.name); });

// Gradients and slices of parameters, with the states or without them.
TEST(OffloadArrays, ChangeNoBit) {
  const TempDirectory dir;
  test::EveryNth tried(9);
  for (const OptimizerCase& optimizer : kOptimizers) {
    const bool whole = any_optimizer(optimizer, &OptimizerRow::needs_matrices);
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const Layout& l : {Layout{.stage = 3},
                              {.dp = 2, .stage = 3},
                              {.dp = 2, .pp = 2, .stage = 3},
                              {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3},
                              {.dp = 2, .tp = 2, .stage = 3}}) {
        if (!tried()) continue;
        const Config c = tier_config(l, optimizer, work);
        const Trace want = train_threads(c, l.ranks(), kSteps);
        for (const bool states : {false, true}) {
          Config o = c;
          if (states) o = offloaded(c, dir.path());
          o.zero.offload_optimizer.gradients = states && !whole;
          o.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
          const Trace got = train_threads(o, l.ranks(), kSteps, 1, states ? with_file() : Hooks{});
          expect_same_training(
              got, want, fmt::format("{} {} {}{}", optimizer.name, l.name(), dtype_name(work), states ? " all" : ""));
        }
      }
    }
  }
}

// Sums of coded gradients are added to after the backward pass of the next layer; those of the last layer in the next
// micro-batch, when the existing sums may have been requested again.
TEST(OffloadArrays, TakeCodedGradients) {
  const TempDirectory dir;
  for (const Layout& l : {Layout{.dp = 2, .stage = 1}, {.dp = 2, .stage = 3}, {.dp = 2, .pp = 2, .stage = 2}}) {
    Config c = tier_config(l, optimizer_named("AdamW"), DType::F32);
    c.reduce_order = ReduceOrder::Micro;
    c.communication_data_type = WireType::Int4;
    c.zero.loco.enabled = true;
    c.zero.reduce_bucket_size = 1'000'000;
    c.zero.overlap_comm = true;
    const Trace want = train_threads(c, l.ranks(), kSteps);
    for (const i64 bucket : {i64{1}, i64{1'000'000}}) {
      for (const bool overlap : {true, false}) {
        Config o = offloaded(c, dir.path());
        o.zero.offload_optimizer.gradients = true;
        o.zero.reduce_bucket_size = bucket;
        o.zero.overlap_comm = overlap;
        expect_same_training(train_threads(o, l.ranks(), kSteps), want,
                             fmt::format("{} buckets of {}{}", l.name(), bucket, overlap ? " overlap" : ""));
      }
    }
  }
}

// The way in which the file is read and written does not matter.
TEST(OffloadWays, AllGiveTheSameBits) {
  const TempDirectory dir;
  for (const char* optimizer : {"AdamW", "Lamb"}) {
    const Layout l{.dp = 2, .stage = 2};
    const Config c = tier_config(l, optimizer_named(optimizer), DType::BF16);
    const Trace want = train_threads(c, l.ranks(), kSteps);
    const auto expect_same = [&](const std::string& what, auto&& change) {
      Config o = offloaded(c, dir.path());
      change(o);
      expect_same_training(train_threads(o, l.ranks(), kSteps), want, fmt::format("{}: {}", optimizer, what));
    };
    for (const i64 buffers : {1, 2, 3, 1000})
      expect_same(fmt::format("{} buffers", buffers),
                  [&](Config& o) { o.zero.offload_optimizer.buffer_count = buffers; });
    expect_same("one tile", [](Config& o) { o.zero.sub_group_size = 1'000'000'000; });
    expect_same("threads", [](Config& o) {
      o.aio = {.method = AioMethod::Threads, .block_size = 4096, .intra_op_parallelism = 3};
    });
    expect_same("small blocks", [](Config& o) { o.aio = {.block_size = 4096, .queue_depth = 1, .checksum = true}; });
    expect_same("nothing beside", [](Config& o) {
      o.zero.offload_optimizer.pipeline_read = o.zero.offload_optimizer.pipeline_write = false;
    });
    for (const double ratio : {0.0, 0.3, 0.99})
      expect_same(fmt::format("ratio {}", ratio), [&](Config& o) { o.zero.offload_optimizer.ratio = ratio; });
  }
}

// Without overlap the data in memory still does not depend on the disk's speed: bytes are those predicted.
TEST(OffloadWays, TrafficIsAsPredicted) {
  const TempDirectory dir;
  test::EveryNth tried(2);
  for (const char* optimizer : {"AdamW", "Lamb", "Groups"}) {
    for (const Layout& l : {Layout{.stage = 2},
                            {.stage = 3},
                            {.schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3},
                            {.dp = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .stage = 3}}) {
      for (const bool arrays : {false, true}) {
        if ((arrays && l.stage < 3) || !tried()) continue;
        Config c = offloaded(tier_config(l, optimizer_named(optimizer), DType::BF16), dir.path());
        c.zero.offload_optimizer.pipeline_read = c.zero.offload_optimizer.pipeline_write = false;
        c.zero.offload_optimizer.gradients = arrays;
        if (arrays) c.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
        const std::string what = fmt::format("{} {} {}", optimizer, l.name(), arrays ? "arrays" : "states");
        train_threads(c, l.ranks(), kSteps, 1, with_predicted_traffic(kSteps, what));
      }
    }
  }
}

// Inputs of layers that are computed again.
Config with_inputs_in_a_file(Config c, const std::string& dir, i64 buffers) {
  c.activation_checkpointing.granularity = Granularity::Layer;
  c.activation_checkpointing.nvme_path = dir;
  c.activation_checkpointing.buffer_count = buffers;
  return c;
}

// Any ranks may share layers, sequences and inputs; memory and traffic are as predicted.
TEST(OffloadInputs, ChangeNoBit) {
  const TempDirectory dir;
  test::EveryNth tried(5);
  for (ModelConfig model : {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama())}) {
    model.layers = 6;
    model.attn_dropout = 0.2f;
    if (!model.rotary()) model.resid_dropout = model.embd_dropout = 0.2f;
    for (const Layout& l : {Layout{},
                            {.dp = 2, .interval = 2, .stage = 1},
                            {.dp = 2, .stage = 3},
                            {.pp = 2, .stage = 2},
                            {.pp = 2, .schedule = Kind::GPipe, .interval = 2},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.tp = 2},
                            {.tp = 2, .interval = 3, .partition = true},
                            {.tp = 2, .sequence = true, .stage = 1},
                            {.pp = 2, .tp = 2, .partition = true},
                            {.sp = 2, .stage = 3}}) {
      if (!tried()) continue;
      Config c = config_of(model, l);
      c.bf16.enabled = l.stage == 2;
      c.communication_data_type = wire_type_of(c.work_dtype());
      Config all = c;
      all.activation_checkpointing = {};
      const Trace want = train_threads(all, l.ranks(), kSteps);
      for (const i64 buffers : {1, 3}) {
        const std::string what = fmt::format("{} {} {} buffers", family_name(model.family), l.name(), buffers);
        Hooks hooks = with_predicted_traffic(kSteps, what);
        hooks.at_end = [&](engine::Engine& engine) {
          const plan::RunPlan& plan = engine.plan();
          const i64 bytes = plan.memory.files[static_cast<size_t>(Tag::Activations)];
          EXPECT_EQ(engine.offload().files().current(Tag::Activations), bytes) << what;
          EXPECT_EQ(bytes, plan.activations.inputs.bytes) << what;
          EXPECT_GE(bytes, plan.activations.inputs.part_bytes) << what;
          if (buffers == 1 && l.interval < 3) {
            EXPECT_GT(plan.traffic.array_files.read_bytes, 0) << what;
          }
        };
        const Trace got = train_threads(with_inputs_in_a_file(c, dir.path(), buffers), l.ranks(), kSteps, 1, hooks);
        expect_same_training(got, want, what);
        expect_planned(got, kSteps, what);
        EXPECT_LT(got.counted[static_cast<size_t>(Tag::Activations)],
                  want.counted[static_cast<size_t>(Tag::Activations)]);
      }
    }
  }
}

// With all else that can be.
TEST(OffloadInputs, GoBesideOthers) {
  const TempDirectory dir;
  for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.dp = 2, .pp = 2, .stage = 3}}) {
    const Config c = tier_config(l, optimizer_named("AdamW"), DType::BF16);
    Config o = with_inputs_in_a_file(offloaded(c, dir.path()), dir.path(), 1);
    o.zero.offload_optimizer.gradients = true;
    o.zero.offload_optimizer.pipeline_read = o.zero.offload_optimizer.pipeline_write = false;
    o.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
    o.aio.checksum = true;
    const Trace got = train_threads(o, l.ranks(), kSteps, 1, with_predicted_traffic(kSteps, l.name()));
    expect_same_training(got, train_threads(c, l.ranks(), kSteps), l.name());
    expect_planned(got, kSteps, l.name());
  }
}

TEST(OffloadInputs, BreadthFirstIsRefused) {
  const Layout l{.schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3};
  const Config c = tier_config(l, optimizer_named("AdamW"), DType::BF16);
  try {
    train_threads(with_inputs_in_a_file(c, "/tmp", 4), 1, 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("activation_checkpointing.nvme_path: with pipeline.schedule"));
  }
}

// The states of a part are brought together, and once more for the rounded parameter.
TEST(OffloadCheckpoints, AreReadTwiceAtMost) {
  const TempDirectory dir;
  const Layout l{.dp = 2, .stage = 2};
  Config c = offloaded(tier_config(l, optimizer_named("AdamW"), DType::BF16), dir.path());
  c.zero.offload_optimizer.buffer_count = 1;
  const Hooks save = {.at_end = [&](engine::Engine& engine) {
    const i64 before = engine.offload().moved().read_bytes;
    save_step(engine, dir / "saved");
    const i64 in_files =
        engine.offload().files().current(Tag::Master) + engine.offload().files().current(Tag::Optimizer);
    const i64 read = engine.offload().moved().read_bytes - before;
    EXPECT_GE(read, in_files / 2);
    EXPECT_LE(read, 2 * in_files);
  }};
  train_threads(c, l.ranks(), 1, 1, save);
}

TEST(OffloadCheckpoints, AreThoseOfMemory) {
  const TempDirectory dir;
  expect_the_checkpoints_of_memory(
      {{.name = "a file", .config = [&](const Config& c) { return offloaded(c, dir.path()); }}});
}

// A disk that is missing or full is reported before the first step.
TEST(OffloadWays, WhatCannotBeHadIsSaid) {
  Config c = offloaded(tier_config({.stage = 1}, kOptimizers[0], DType::BF16), "/nowhere/at/all");
  try {
    train_threads(c, 1, 1);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("/nowhere/at/all"));
  }
}

}  // namespace offload_test
}  // namespace ds::testing
