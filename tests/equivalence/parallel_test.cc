// SPDX-License-Identifier: Apache-2.0
// Pipeline, tensor and sequence parallelism and activation checkpointing, alone and together with ZeRO, train like one
// rank: to the bit if only the place of layers or the kept activations change, to the rounding if sums are cut.

#include <algorithm>
#include <cstdlib>

#include "equivalence/copies.h"
#include "equivalence/layouts.h"
#include "slow_set.h"

namespace ds::testing {
namespace parallel_test {

// DS_SLOW=1: long runs.
const i64 kSteps = std::getenv("DS_SLOW") != nullptr ? 20 : 6;

// Two of everything that tp cuts, four layers for stages.
ModelConfig gpt2_model() {
  ModelConfig c = tiny_gpt2();
  c.vocab_size = 67;  // not even
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
ModelConfig bert_model() {
  ModelConfig c = gpt2_model();
  c.family = Family::Bert;
  c.token_types = 2;
  c.activation = Activation::GeluErf;
  return c;
}

Trace train(const ModelConfig& model, const Layout& l, i64 steps = kSteps) {
  return train_threads(config_of(model, l), l.ranks(), steps);
}

void expect_one_ranks(const Trace& got, const Trace& want, const std::string& what) {
  expect_close(got, want, what);
  expect_planned(got, narrow<i64>(got.losses.size()), what);
}

TEST(Pipeline, StagesAndSchedulesChangeNoBit) {
  test::EveryNth tried(2);
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    const Trace base = train(model, {}, 6);
    ASSERT_LT(base.losses.back(), base.losses.front());
    for (const Layout& l : {Layout{.pp = 2},
                            {.pp = 3},
                            {.pp = 4},
                            {.pp = 6},
                            {.pp = 2, .schedule = Kind::Naive},
                            {.pp = 2, .schedule = Kind::GPipe},
                            {.pp = 4, .schedule = Kind::GPipe},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 3},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 4, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .memory_limit = 0.67},
                            {.schedule = Kind::BreadthFirst, .chunks = 2},
                            {.schedule = Kind::BreadthFirst, .chunks = 3, .stage = 3},
                            {.schedule = Kind::BreadthFirst, .chunks = 6, .stage = 3},
                            {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 3, .stage = 1},
                            {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 6, .stage = 3},
                            {.pp = 2, .stage = 1},
                            {.pp = 2, .stage = 2},
                            {.pp = 2, .stage = 3},
                            {.dp = 2, .pp = 2},
                            {.dp = 2, .pp = 2, .stage = 1},
                            {.dp = 2, .pp = 2, .stage = 2},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.dp = 2, .pp = 3, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 3},
                            {.dp = 2, .pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 2},
                            {.dp = 2, .pp = 2, .schedule = Kind::Interleaved, .chunks = 2, .stage = 2},
                            {.dp = 2, .pp = 2, .schedule = Kind::GPipe, .stage = 3}}) {
      if (!tried()) continue;
      const Trace t = train(model, l, 6);
      expect_same_training(t, base, std::string(family_name(model.family)) + " " + l.name());
      expect_planned(t, 6, l.name());
    }
  }
}

// Layers that are not kept between their uses are gathered once for each pass, and not for each micro-batch.
TEST(Pipeline, BreadthFirstGathersALayerOnceForAllMicroBatches) {
  const auto gathered = [](const Layout& l, i64 micro_batches, const std::function<void(Config&)>& change = {}) {
    Config c = config_of(gpt2_model(), l, micro_batches * l.dp);
    c.zero.param_persistence_threshold = 0;
    c.zero.max_reuse_distance = 40'000;  // two layers or so
    if (change) change(c);
    const MeshShape mesh{.dp = l.dp};
    const model::Model model = model::make_model(c.model, c.data.seq_length);
    return plan::make_run_plan(c, model, mesh, {}).shards.front().train_gathers.gathered_elems;
  };
  const Layout in_turn{.dp = 2, .stage = 3},
      breadth_first{.dp = 2, .schedule = Kind::BreadthFirst, .chunks = gpt2_model().layers + 2, .stage = 3};
  EXPECT_EQ(gathered(breadth_first, 32), gathered(breadth_first, 8));
  EXPECT_GT(gathered(in_turn, 32), 3 * gathered(in_turn, 8));
  EXPECT_GT(gathered(in_turn, 8), 3 * gathered(breadth_first, 8));
  // With a layer in each chunk, whatever the settings of live parameters and reuse are.
  for (const i64 live : {0, 30'000, 1'000'000'000}) {
    for (const i64 reuse : {0, 30'000, 1'000'000'000}) {
      const auto change = [&](Config& c) { c.zero.max_live_parameters = live, c.zero.max_reuse_distance = reuse; };
      EXPECT_LE(gathered(breadth_first, 32, change), 2 * gathered(breadth_first, 1, change)) << live << " " << reuse;
    }
  }
}

TEST(Checkpointing, ChangesNoBit) {
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    for (const float dropout : {0.0f, 0.2f}) {
      ModelConfig m = model;
      if (m.family != Family::Qwen3) m.resid_dropout = m.embd_dropout = dropout;
      m.attn_dropout = dropout;
      const Trace base = train(m, {}, 4);
      for (const Layout& l :
           {Layout{.checkpoints = Granularity::Layer},
            {.checkpoints = Granularity::Layer, .interval = 2},
            {.checkpoints = Granularity::Layer, .interval = 3},
            {.checkpoints = Granularity::Selective},
            {.checkpoints = Granularity::Layer, .stage = 3},
            {.checkpoints = Granularity::Layer, .interval = 4, .stage = 3},
            {.dp = 2, .pp = 2, .checkpoints = Granularity::Layer, .interval = 2, .stage = 3},
            {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer, .interval = 2},
            {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Selective},
            {.pp = 4, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer},
            {.pp = 4, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Selective},
            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .checkpoints = Granularity::Layer, .interval = 2},
            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .checkpoints = Granularity::Layer},
            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .checkpoints = Granularity::Selective},
            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2, .checkpoints = Granularity::Selective},
            {.schedule = Kind::BreadthFirst, .chunks = 3, .checkpoints = Granularity::Layer, .interval = 2},
            {.schedule = Kind::BreadthFirst, .chunks = 6, .checkpoints = Granularity::Layer, .stage = 3}}) {
        expect_same_training(train(m, l, 4), base,
                             fmt::format("{} {} dropout {}", family_name(model.family), l.name(), dropout));
      }
    }
  }
}

TEST(TensorParallel, TrainsAsOneRank) {
  test::EveryNth tried(5);
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    const Trace base = train(model, {});
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 4},
                            {.tp = 2, .sequence = true},
                            {.tp = 4, .sequence = true},
                            {.tp = 2, .stage = 3},
                            {.dp = 2, .tp = 2, .stage = 1},
                            {.dp = 2, .tp = 2, .stage = 2},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3},
                            {.pp = 2, .tp = 2},
                            {.dp = 2, .pp = 2, .tp = 2, .stage = 3},
                            {.pp = 2, .tp = 2, .sequence = true},
                            {.tp = 2, .checkpoints = Granularity::Layer}}) {
      if (!tried()) continue;
      expect_one_ranks(train(model, l), base, std::string(family_name(model.family)) + " " + l.name());
    }
  }
}

// Logits of more rows than are computed at once: the shares meet after every chunk, whatever their sizes.
TEST(TensorParallel, SharesALargeVocabulary) {
  ModelConfig model = gpt2_model();
  model.vocab_size = 52'347;
  model.hidden = 8;
  model.layers = 1;
  model.heads = model.kv_heads = 4;
  model.head_dim = 2;
  model.intermediate = 8;
  model.max_positions = 512;
  const auto run = [&](int tp) {
    Config c = config_of(model, {.tp = tp}, 1);
    c.data.seq_length = 512;
    return train_threads(c, tp, 2);
  };
  const Trace base = run(1);
  for (const int tp : {2, 4}) expect_close(run(tp), base, fmt::format("tp {}", tp));
}

// Sums over copies of key and value heads, and of a tied embedding over stages, of more elements than are exchanged at
// once: in parts, which take no more memory than one of them.
TEST(TensorParallel, SumsOfManyElementsGoInParts) {
  const auto check = [&](const ModelConfig& m, const Layout& l, i64 gathered) {
    const Config c = config_of(m, l);
    const Trace t = train_threads(c, l.ranks(), 1);
    expect_close(t, train_threads(config_of(m, {}), 1, 1), l.name());
    expect_planned(t, 1, l.name());
    const MeshShape mesh{.pp = l.pp, .tp = l.tp};
    const plan::RunPlan plan =
        plan::make_run_plan(c, model::make_model(m, c.data.seq_length, model::shard_of(c, mesh, {})), mesh, {});
    EXPECT_EQ(plan.exchange_elems, gathered * plan::RunPlan::kExchangeElems) << l.name();
  };
  ModelConfig heads = llama_model();
  heads.hidden = 512;
  heads.layers = 5;
  heads.heads = 4;
  heads.head_dim = 256;
  heads.kv_heads = 2;  // each on two ranks
  check(heads, {.tp = 4}, 4);
  heads.kv_heads = 1;  // on all ranks
  check(heads, {.tp = 2}, 1);
  ModelConfig tied = gpt2_model();
  tied.vocab_size = 3000;
  tied.hidden = 512;
  tied.head_dim = 128;
  tied.layers = 2;
  check(tied, {.pp = 2}, 1);
}

TEST(Checkpointing, CutOverTensorParallelRanksChangesNoBit) {
  test::EveryNth tried(4);
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 4, .stage = 2},
                            {.pp = 2, .tp = 2},
                            {.pp = 2, .tp = 2, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .tp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.tp = 2, .sequence = true}}) {
      if (!tried()) continue;
      const Trace whole = train(model, l, 4);
      for (const i64 interval : {1, 2, 3}) {
        Layout cut = l;
        cut.checkpoints = Granularity::Layer;
        cut.interval = interval;
        cut.partition = true;
        const Trace t = train(model, cut, 4);
        expect_same_training(t, whole, cut.name());
        expect_planned(t, 4, cut.name());
      }
    }
  }
}

// A CPU's memory is the host's: the key changes nothing there. Devices: device_training_test.
TEST(Checkpointing, KeptInHostMemoryChangesNoBit) {
  for (const ModelConfig& model : {gpt2_model(), llama_model()}) {
    for (const Layout& l : {Layout{}, {.tp = 2}, {.tp = 2, .partition = true}, {.pp = 2}}) {
      Layout computed_again = l;
      computed_again.checkpoints = Granularity::Layer;
      Config c = config_of(model, computed_again);
      c.activation_checkpointing.cpu_checkpointing = true;
      Layout kept = l;
      kept.partition = false;
      const Trace t = train_threads(c, l.ranks(), 4);
      expect_same_training(t, train(model, kept, 4), l.name());
      expect_planned(t, 4, l.name());
    }
  }
}

// Rows that the ranks cannot share evenly: the last one has fewer, or none.
TEST(Checkpointing, CutWhereTheLastRankHasNoRow) {
  for (const i64 rows : {5, 7}) {
    Config whole = config_of(gpt2_model(), {.tp = 4}), cut = config_of(gpt2_model(), {.tp = 4, .partition = true});
    for (Config* c : {&whole, &cut}) {
      c->batch.micro = 1;
      c->batch.train = c->batch.accumulation;
      c->data.seq_length = rows;
    }
    cut.activation_checkpointing.granularity = Granularity::Layer;
    expect_same_training(train_threads(cut, 4, 3), train_threads(whole, 4, 3), fmt::format("{} rows", rows));
  }
}

// Ranks that share layers or sequences have counted the same samples.
TEST(TokenNorm, CountsASampleOnceHoweverManyRanksShareIt) {
  const auto config = [](const Layout& l) {
    Config c = config_of(gpt2_model(), l);
    c.loss.norm = LossNorm::Token;
    return c;
  };
  const Trace one = train_threads(config({}), 1, kSteps);
  for (const Layout& l : {Layout{.tp = 2}, {.sp = 2}, {.pp = 2}, {.dp = 2, .tp = 2}, {.dp = 2, .pp = 2, .stage = 2}})
    expect_one_ranks(train_threads(config(l), l.ranks(), kSteps), one, l.name());
}

// Both sums after the data-parallel ones in one step: tied embeddings on one stage, and key and value heads that
// several ranks hold.
TEST(TensorParallel, CopiedHeadsBesideTiedEmbeddings) {
  ModelConfig model = llama_model();
  model.tie_embeddings = true;
  const Trace one = train(model, {});
  for (const Layout& l : {Layout{.tp = 4}, {.dp = 2, .tp = 4, .stage = 1}, {.tp = 4, .stage = 3}})
    expect_one_ranks(train(model, l), one, l.name());
}

TEST(SequenceParallel, TrainsAsOneRank) {
  test::EveryNth tried(5);
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    const Trace base = train(model, {});
    for (const SequenceParallelMode mode : {SequenceParallelMode::Ulysses, SequenceParallelMode::Ring}) {
      for (const Layout& l : {Layout{.sp = 2, .mode = mode},
                              {.sp = 4, .mode = mode},
                              {.sp = 2, .mode = mode, .stage = 3},
                              {.dp = 2, .sp = 2, .mode = mode, .stage = 2},
                              {.pp = 2, .sp = 2, .mode = mode},
                              {.tp = 2, .sp = 2, .mode = mode},
                              {.tp = 2, .sp = 2, .sequence = true, .mode = mode},
                              {.sp = 2, .mode = mode, .checkpoints = Granularity::Selective}}) {
        if (tried()) expect_one_ranks(train(model, l), base, std::string(family_name(model.family)) + " " + l.name());
      }
    }
  }
}

// Tied embeddings on the first and the last stage, and parameters that all ranks of tp hold: equal after every step.
TEST(Copies, StayEqualBitForBit) {
  test::EveryNth tried(5);
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    for (const i64 stage : {0, 1, 2, 3}) {
      for (const Layout& l : {Layout{.pp = 2, .stage = stage},
                              {.dp = 2, .pp = 3, .stage = stage},
                              {.pp = 2, .tp = 2, .schedule = Kind::ZeroBubbleH1, .stage = stage},
                              {.pp = 2, .tp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = stage},
                              {.tp = 4, .stage = stage},
                              {.dp = 2, .tp = 2, .sequence = true, .stage = stage},
                              {.pp = 2, .tp = 2, .sp = 2, .stage = stage}}) {
        if (!tried()) continue;
        Config config = config_of(model, l);
        config.bf16.enabled = (l.pp + stage) % 2 == 0;
        config.communication_data_type = wire_type_of(config.work_dtype());
        Copies copies;
        Hooks hooks;
        hooks.after_step = [&](engine::Engine& engine, i64 step) {
          copies.check(engine, fmt::format("{} step {}", l.name(), step));
        };
        train_threads(config, l.ranks(), 2, 1, hooks);
        const bool tied_over_stages = l.pp > 1 && l.schedule != Kind::ZeroBubbleV && model.tie_embeddings;
        if (l.tp > 1 || tied_over_stages) {
          EXPECT_GT(copies.most(), 1);
        }
      }
    }
  }
}

// Makes a rank's gradient infinite or NaN at one step, in the operation that computes the gradient of the bias of
// GPT-2's fused projection; no other rank has that bias.
thread_local bool plants = false;
thread_local i64 planted_elems = 0;
thread_local float planted_value = 0;

OpTable planting_ops() {
  OpTable ops = *cpu_ops();
  ops.column_sum = [](TensorView out, TensorView x, bool accumulate, Stream& stream) noexcept {
    cpu_ops()->column_sum(out, x, accumulate, stream);
    if (!plants || out.numel() != planted_elems) return;
    if (out.dtype == DType::F32) *out.as<float>() = planted_value;
    if (out.dtype == DType::F16) *out.as<f16>() = to_f16(planted_value);
    plants = false;
  };
  return ops;
}

// fp16 in which the rank at `where` finds `value` in its gradient of step 2.
Trace train_planted(const Layout& l, const MeshCoord& where, float value) {
  Config c = config_of(gpt2_model(), l);
  c.fp16.enabled = true;
  c.fp16.initial_scale_power = 8;
  c.fp16.hysteresis = 1;
  c.communication_data_type = WireType::F16;
  Hooks hooks;
  hooks.before_step = [&](engine::Engine& engine, i64 step) {
    plants = step == 2 && engine.mesh().coord() == where;
    planted_elems = 3 * c.model.hidden / l.tp;
    planted_value = value;
  };
  hooks.after_step = [&](engine::Engine&, i64) { EXPECT_FALSE(plants); };
  const OpTable ops = planting_ops();
  return train_threads(c, l.ranks(), 6, 1, hooks, {}, ops);
}

TEST(Overflow, OfOneRankSkipsTheStepOnAll) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  test::EveryNth tried(2);
  for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    const Trace base = train_planted({}, {}, value);
    ASSERT_EQ(base.skipped, (std::vector<bool>{false, false, true, false, false, false}));
    for (const auto& [l, where] : {std::pair{Layout{.pp = 3}, MeshCoord{.pp = 0}},
                                   {Layout{.pp = 3}, MeshCoord{.pp = 1}},
                                   {Layout{.pp = 3}, MeshCoord{.pp = 2}},
                                   {Layout{.pp = 2, .schedule = Kind::ZeroBubbleH1}, MeshCoord{.pp = 0}},
                                   {Layout{.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2}, MeshCoord{.pp = 1}},
                                   {Layout{.dp = 2, .pp = 2, .stage = 3}, MeshCoord{.dp = 1, .pp = 1}},
                                   {Layout{.dp = 2, .pp = 2, .stage = 2}, MeshCoord{.dp = 1, .pp = 0}},
                                   {Layout{.tp = 2}, MeshCoord{.tp = 1}},
                                   {Layout{.tp = 4, .sequence = true}, MeshCoord{.tp = 2}},
                                   {Layout{.pp = 2, .tp = 2, .stage = 1}, MeshCoord{.pp = 1, .tp = 1}},
                                   {Layout{.sp = 2, .stage = 3}, MeshCoord{.sp = 1}},
                                   {Layout{.pp = 2, .tp = 2, .sp = 2}, MeshCoord{.pp = 0, .tp = 1, .sp = 1}}}) {
      if (!tried()) continue;
      const Trace t = train_planted(l, where, value);
      EXPECT_EQ(t.skipped, base.skipped) << l.name();
      EXPECT_EQ(t.scales, base.scales) << l.name();
      EXPECT_EQ(t.lrs, base.lrs) << l.name();
      EXPECT_FALSE(std::isfinite(t.norms[2])) << l.name();
      if (l.tp * l.sp > 1) continue;
      Trace same = t;
      same.norms[2] = base.norms[2];  // which of the numbers that are none
      expect_same_training(same, base, l.name());
    }
  }
}

// Evaluations beside training, of more batches than go through the pipeline at once, and ones that end early: one
// rank's numbers, and no bit of the training moves.
TEST(Evaluation, EqualsOneRanksAndLeavesTrainingAlone) {
  for (const ModelConfig& model : {gpt2_model(), llama_model(), bert_model()}) {
    const auto run = [&](const Layout& l, bool evaluates, std::vector<double>& losses) {
      const Config config = config_of(model, l);
      const auto evaluate = [&](engine::Engine& engine, i64 step, i64 end) {
        const i64 T = config.data.seq_length, dp = engine.mesh().data_size();
        return engine.evaluate(12 / dp, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
          for (i64 b = 0; b < config.batch.micro; ++b) {
            const i64 sample = 1000 * step + (batch * dp + engine.mesh().data_rank()) * config.batch.micro + b;
            const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
            fill_sample(sample, model.vocab_size, ids.subspan(at, n), targets.subspan(at, n));
          }
          return batch < end;
        });
      };
      Hooks hooks;
      hooks.before_step = [&](engine::Engine& engine, i64 step) {
        if (!evaluates) return;
        const std::optional<double> loss = evaluate(engine, step, 100);
        ASSERT_TRUE(loss.has_value());
        if (engine.mesh().rank() == 0) losses.push_back(*loss);
        EXPECT_FALSE(evaluate(engine, step, 9 / engine.mesh().data_size()).has_value());
      };
      return train_threads(config, l.ranks(), 3, 1, hooks);
    };
    std::vector<double> want;
    const Trace base = run({}, true, want);
    for (const Layout& l : {Layout{.pp = 2},
                            {.pp = 3, .stage = 3},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.dp = 2, .pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 1},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.tp = 2},
                            {.tp = 4, .sequence = true},
                            {.sp = 2},
                            {.sp = 2, .mode = SequenceParallelMode::Ring},
                            {.pp = 2, .tp = 2, .sp = 2, .stage = 3}}) {
      std::vector<double> got, none;
      const Trace t = run(l, true, got);
      ASSERT_EQ(got.size(), want.size());
      for (size_t s = 0; s < want.size(); ++s) {
        if (l.tp * l.sp == 1) {
          EXPECT_EQ(got[s], want[s]) << l.name() << " step " << s;
        }
        EXPECT_NEAR(got[s], want[s], 1e-5 * want[s]) << l.name() << " step " << s;
      }
      expect_same_training(t, run(l, false, none), l.name());
    }
  }
}

TEST(Generation, WritesWhatOneRankWrites) {
  for (const ModelConfig& model : {gpt2_model(), llama_model()}) {
    const auto run = [&](const Layout& l) {
      std::vector<std::vector<i32>> texts(static_cast<size_t>(l.ranks()));
      Hooks hooks;
      hooks.at_end = [&](engine::Engine& engine) {
        std::vector<i32>& text = texts[engine.mesh().rank()];
        text = text_of(engine, {3, 5, 7, 9, 11}, {.max_tokens = 12});
        const Writing sampled{.max_tokens = 12, .sampling = {.temperature = 0.8, .top_k = 20, .seed = 3}};
        for (const i32 id : text_of(engine, {4}, sampled)) text.push_back(id);
      };
      train_threads(config_of(model, l), l.ranks(), 8, 1, hooks);
      for (const auto& text : texts) EXPECT_EQ(text, texts[0]) << l.name();
      return texts[0];
    };
    const std::vector<i32> want = run({});
    ASSERT_EQ(want.size(), 24u);
    for (const Layout& l : {Layout{.pp = 2},
                            {.pp = 3, .stage = 3},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 3},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.tp = 2},
                            {.tp = 4, .sequence = true},
                            {.sp = 2},
                            {.sp = 2, .mode = SequenceParallelMode::Ring},
                            {.pp = 2, .tp = 2, .sp = 2, .stage = 3}}) {
      EXPECT_EQ(run(l), want) << l.name();
    }
  }
}

}  // namespace parallel_test
}  // namespace ds::testing
