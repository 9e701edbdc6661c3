// SPDX-License-Identifier: Apache-2.0
// Matrices in tiles, of which a rank never holds one as a whole: results depend on the tiles alone, by the order of
// sums, and neither on ranks, stages and schedules nor on when tiles are gathered.

#include <mutex>

#include "equivalence/tiers.h"
#include "slow_set.h"

namespace ds::testing {
namespace tiling_test {

constexpr i64 kSteps = kTierSteps;

ModelConfig gpt2() { return of_four_heads(tiny_gpt2()); }
ModelConfig llama() { return of_four_heads(tiny_llama()); }
ModelConfig bert() { return of_four_heads(tiny_bert()); }

// Some matrices of these models are whole, some have two tiles, some more, the last of them smaller.
Config in_tiles(Config c) {
  c.zero.tile_size = 1200;
  return c;
}
Config config_for(const ModelConfig& model, const Layout& l, DType work = DType::F32) {
  Config c = config_of(model, l, l.dp == 3 ? 6 : 4);
  c.bf16.enabled = work == DType::BF16;
  c.fp16.enabled = work == DType::F16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  return c;
}

constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};

TEST(Tiling, NeitherRanksNorStagesNorSchedulesChangeABit) {
  for (const ModelConfig& model : {gpt2(), llama(), bert()}) {
    for (const DType work : kTypes) {
      const Layout one{.stage = 3};
      const Config c = in_tiles(config_for(model, one, work));
      const Trace base = train_threads(c, 1, kSteps);
      expect_planned(base, kSteps, "one rank");
      for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                              {.dp = 4, .stage = 3},
                              {.pp = 2, .stage = 3},
                              {.dp = 2, .pp = 2, .stage = 3},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                              {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2, .stage = 3},
                              {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3},
                              {.checkpoints = Granularity::Layer, .stage = 3},
                              {.dp = 2, .checkpoints = Granularity::Layer, .interval = 2, .stage = 3},
                              {.dp = 2, .checkpoints = Granularity::Selective, .stage = 3}}) {
        const std::string what = fmt::format("{} {} {}", family_name(model.family), dtype_name(work), l.name());
        const Trace t = train_threads(in_tiles(config_for(model, l, work)), l.ranks(), kSteps);
        expect_same_training(t, base, what);
        expect_planned(t, kSteps, what);
      }
    }
  }
}

TEST(Tiling, KnobsOfGathersAndBucketsChangeNoBit) {
  const Layout two{.dp = 2, .stage = 3};
  const Config c = in_tiles(config_for(gpt2(), two));
  const Trace base = train_threads(c, 2, kSteps);
  for (const i64 prefetch : {0, 700, 50'000'000}) {
    for (const i64 reuse : {0, 3000, 1'000'000'000}) {
      for (const i64 bucket : {1, 2000, 500'000'000}) {
        for (const bool overlap : {false, true}) {
          Config other = c;
          other.zero.prefetch_bucket_size = prefetch;
          other.zero.max_reuse_distance = reuse;
          other.zero.reduce_bucket_size = bucket;
          other.zero.overlap_comm = overlap;
          other.zero.param_persistence_threshold = reuse == 0 ? 100 : 0;
          const std::string what = fmt::format("{} {} {} {}", prefetch, reuse, bucket, overlap);
          const Trace t = train_threads(other, 2, kSteps);
          expect_same_training(t, base, what);
          expect_planned(t, kSteps, what);
        }
      }
    }
  }
}

// Sums over tiles are rounded once, like those of whole matrices, in another order.
TEST(Tiling, IsTheTrainingOfWholeMatricesToTheRounding) {
  for (const ModelConfig& model : {gpt2(), llama(), bert()}) {
    for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                            {.tp = 2, .stage = 3},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3},
                            {.sp = 2, .stage = 3}}) {
      const std::string what = fmt::format("{} {}", family_name(model.family), l.name());
      const Config c = config_for(model, l);
      const Trace whole = train_threads(c, l.ranks(), kSteps), tiles = train_threads(in_tiles(c), l.ranks(), kSteps);
      expect_close(tiles, whole, what);
      EXPECT_FALSE(same_bits(tiles.weights, whole.weights)) << what;  // else there were no tiles
      expect_planned(tiles, kSteps, what);
    }
  }
}

TEST(Tiling, WithDropoutAndEveryOptimizer) {
  for (const OptimizerCase& optimizer : kOptimizers) {
    if (any_optimizer(optimizer, &OptimizerRow::needs_matrices)) continue;
    for (const DType work : {DType::F32, DType::BF16}) {
      const auto config = [&](const Layout& l) {
        Config c = in_tiles(config_for(gpt2(), l, work));
        c.model.resid_dropout = c.model.embd_dropout = c.model.attn_dropout = 0.1f;
        optimizer.choose(c.optimizer);
        c.gradient_clipping = 0.5;
        return c;
      };
      const Layout one{.stage = 3}, more{.dp = 3, .stage = 3};
      Config c = config(one);
      c.batch = config_for(gpt2(), more).batch;
      c.batch.accumulation *= 3;
      const std::string what = fmt::format("{} {}", optimizer.name, dtype_name(work));
      const Trace t = train_threads(config(more), 3, kSteps);
      expect_same_training(t, train_threads(c, 1, kSteps), what);
      expect_planned(t, kSteps, what);
    }
  }
}

// In a file, with a server's or a late update's way of looking at pieces, too.
TEST(Tiling, WithWhatIsOffloaded) {
  const TempDirectory dir;
  test::EveryNth tried(3);
  for (const char* which : {"AdamW", "Lamb", "AdamW8bit", "GroupsOfKinds"}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.dp = 2, .pp = 2, .stage = 3}}) {
        if (!tried()) continue;
        Config c = in_tiles(config_for(gpt2(), l, work));
        optimizer_named(which).choose(c.optimizer);
        const Trace want = train_threads(c, l.ranks(), kSteps);
        c.zero.sub_group_size = 2 * kStateBlock;
        c.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path(), .buffer_count = 2};
        const std::string what = fmt::format("{} {} {}", which, dtype_name(work), l.name());
        const auto expect_same = [&](const std::string& name) {
          const Trace t = train_threads(c, l.ranks(), kSteps, 1, with_predicted_traffic(kSteps, what + name));
          expect_same_training(t, want, what + name);
          expect_planned(t, kSteps, what + name);
        };
        expect_same(" states");
        c.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path(), .buffer_count = 2};
        expect_same(" states and parameters");
        c.zero.offload_optimizer.gradients = true;
        expect_same(" all");
      }
    }
  }
}

// Tiles, not layers, bound the parameters and fresh gradients that a step holds.
TEST(Tiling, MemoryIsThatOfTiles) {
  ModelConfig model = gpt2();
  model.hidden = 192, model.head_dim = 48, model.intermediate = 768;
  model.vocab_size = 16, model.max_positions = 16;  // embeddings are whole
  const auto bytes = [&](i64 tile, Tag tag) {
    Config c = config_for(model, {.dp = 2, .stage = 3});
    c.zero.prefetch_bucket_size = 0;
    c.zero.max_live_parameters = 0;
    c.zero.reduce_bucket_size = 1;
    c.zero.overlap_comm = false;
    c.zero.tile_size = tile;
    const model::Model m = model::make_model(c.model, c.data.seq_length);
    return plan::make_run_plan(c, m, {.dp = 2}, {}).memory.by_tag[static_cast<size_t>(tag)];
  };
  const i64 layer = 12 * 192 * 192;
  for (const Tag tag : {Tag::Gathered, Tag::Buckets}) {
    EXPECT_GT(bytes(0, tag), layer * 4) << tag_name(tag);
    for (const i64 tile : {36'864, 18'432, 1536}) {
      EXPECT_GE(bytes(tile, tag), tile * 4) << tag_name(tag);
      EXPECT_LT(bytes(tile, tag), (tile + 8 * 1024) * 4) << tag_name(tag) << ": beside it, biases and norms";
    }
  }
}

TEST(Tiling, CheckpointsLoadWithTilesAndWithout) {
  test::EveryNth tried(3);
  for (const char* which : {"AdamW", "AdamW8bit"}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      if (!tried()) continue;
      const std::string what = fmt::format("{} {}", which, dtype_name(work));
      const TempDirectory dir;
      const Layout two{.dp = 2, .stage = 3}, other{.dp = 4, .stage = 3}, less{.dp = 2, .stage = 1};
      const auto config = [&](const Layout& l, i64 tile) {
        Config c = config_for(gpt2(), l, work);
        optimizer_named(which).choose(c.optimizer);
        c.zero.tile_size = tile;
        return c;
      };
      const Saved tiles = train_and_save(config(two, 1200), two, kSteps, dir / "tiles");
      const Saved whole = train_and_save(config(two, 0), two, kSteps, dir / "whole");
      // Every configuration resumes alike each time from one state. Other ranks, and stage 1 without tiles, change
      // nothing.
      for (const auto& [layout, tile] : {std::pair{two, i64{1200}}, {other, 1200}, {two, 500}, {two, 0}, {less, 0}}) {
        const Trace a = resume(config(layout, tile), layout, kSteps, tiles.step);
        const Trace b = resume(config(layout, tile), layout, kSteps, tiles.step);
        expect_same_training(a, b, what);
        if (tile == 1200 && layout.dp == 4)
          expect_same_training(a, resume(config(two, 1200), two, kSteps, tiles.step), what + ": other ranks");
        if (tile == 0 && layout.stage == 1)
          expect_same_training(a, resume(config(two, 0), two, kSteps, tiles.step), what + ": without tiles");
      }
      expect_same_training(resume(config(two, 1200), two, kSteps, whole.step),
                           resume(config(other, 1200), other, kSteps, whole.step), what + ": of whole matrices");
    }
  }
}

struct Seen {
  double loss = 0;
  std::vector<i32> text;
};
Seen look(Config c, int ranks, ConfigUse use) {
  c.use = use;
  Seen seen;
  std::mutex mutex;
  with_engines(c, ranks, [&](engine::Engine& engine) {
    double loss = 0;
    if (use != ConfigUse::Generate) {
      const size_t T = static_cast<size_t>(c.data.seq_length);
      loss = *engine.evaluate(2, [&](i64, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
        for (size_t at = 0; at < ids.size(); at += T)
          fill_sample(narrow<i64>(at), c.model.vocab_size, ids.subspan(at, T), targets.subspan(at, T));
        return true;
      });
    }
    const std::vector<i32> text = text_of(engine, {3, 5, 7}, {.max_tokens = 4});
    const std::lock_guard lock(mutex);
    if (engine.mesh().rank() == 0) seen = {loss, text};
  });
  return seen;
}

TEST(Tiling, WhoReadsWeightsHasThemInTiles) {
  for (const ModelConfig& model : {gpt2(), llama()}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      const Seen one = look(in_tiles(config_for(model, {.stage = 3}, work)), 1, ConfigUse::Train);
      for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.pp = 2, .stage = 3}}) {
        const Config c = in_tiles(config_for(model, l, work));
        const std::string what = fmt::format("{} {} {}", family_name(model.family), dtype_name(work), l.name());
        for (const ConfigUse use : {ConfigUse::Train, ConfigUse::Evaluate, ConfigUse::Generate}) {
          const Seen seen = look(c, l.ranks(), use);
          EXPECT_EQ(seen.text, one.text) << what;
          if (use == ConfigUse::Generate) continue;
          EXPECT_EQ(std::bit_cast<u64>(seen.loss), std::bit_cast<u64>(one.loss)) << what;
        }
      }
    }
  }
}

TEST(Tiling, AStepHasNoMoreTilesThanAPlanHasRoomFor) {
  Config c = config_for(gpt2(), {.stage = 3});
  c.zero.tile_size = 1;
  c.batch.accumulation = 1 << 20;
  const model::Model m = model::make_model(c.model, c.data.seq_length);
  try {
    (void)plan::make_run_plan(c, m, {}, {});
    FAIL() << "it has a plan";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_NE(std::string(e.what()).find("at most 500000"), std::string::npos) << e.what();
  }
}

TEST(Tiling, MuonHasItsMatricesWhole) {
  Config c = in_tiles(config_for(gpt2(), {.stage = 3}));
  optimizer_named("Muon").choose(c.optimizer);
  const model::Model m = model::make_model(c.model, c.data.seq_length);
  try {
    (void)plan::make_run_plan(c, m, {}, {});
    FAIL() << "it has a plan";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_NE(std::string(e.what()).find("zero_optimization.stage3_tile_size"), std::string::npos) << e.what();
  }
}

}  // namespace tiling_test
}  // namespace ds::testing
