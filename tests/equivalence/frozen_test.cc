// SPDX-License-Identifier: Apache-2.0
// Parameters that are not trained cost their weights and nothing else: a run with them takes the steps of one that
// trains them at a rate of zero, however it is cut, and its memory, messages and checkpoints have no more of them.

#include <list>

#include "checkpoint/reader.h"
#include "checkpoint/shard.h"
#include "equivalence/serving.h"
#include "equivalence/tiers.h"
#include "pipeline/simulate.h"

namespace ds::testing {
namespace frozen_test {

constexpr i64 kSteps = 3;

// All but the parameters that match are in a group that is frozen; or has a rate of zero.
Config training_only(Config c, const std::vector<std::string>& patterns, bool frozen = true) {
  ParamGroupConfig others;
  static_cast<UpdateConfig&>(others) = c.optimizer;
  others.params = {"*"};
  others.frozen = frozen;
  if (!frozen) others.lr = others.weight_decay = 0;
  c.optimizer.groups = {others};
  if (patterns.empty()) return c;
  ParamGroupConfig trained;
  static_cast<UpdateConfig&>(trained) = c.optimizer;
  trained.params = patterns;
  c.optimizer.groups.insert(c.optimizer.groups.begin(), trained);
  return c;
}

Config in(DType work, Config c) {
  c.bf16.enabled = work == DType::BF16;
  c.fp16 = {.enabled = work == DType::F16, .loss_scale = 256};
  c.communication_data_type = wire_type_of(work);
  return c;
}

model::Model model_of(const Config& c) {
  model::Model model = model::make_model(c);
  optim::freeze_groups(model, c);
  return model;
}

// Norms differ: those of a rate of zero count. A frozen parameter is its own master.
void expect_as_at_rate_zero(const Trace& got, const Trace& want, const Config& c, const std::string& what) {
  EXPECT_TRUE(same_bits(got.losses, want.losses)) << what << ": losses";
  EXPECT_TRUE(same_bits(got.logits, want.logits)) << what << ": logits";
  EXPECT_EQ(std::bit_cast<u64>(got.eval_loss), std::bit_cast<u64>(want.eval_loss)) << what << ": evaluation";
  const model::Model model = model_of(c);
  size_t at = 0;
  for (const model::ParamRow* row : model.params()) {
    const size_t n = static_cast<size_t>(row->whole_numel());
    std::vector<float> weights(want.weights.begin() + static_cast<std::ptrdiff_t>(at),
                               want.weights.begin() + static_cast<std::ptrdiff_t>(at + n));
    for (float& w : weights) {
      if (row->trained || c.work_dtype() == DType::F32) continue;
      w = c.work_dtype() == DType::BF16 ? to_float(to_bf16(w)) : to_float(to_f16(w));
    }
    EXPECT_TRUE(std::equal(weights.begin(), weights.end(), got.weights.begin() + static_cast<std::ptrdiff_t>(at)))
        << what << ": " << row->name;
    at += n;
  }
}

struct Case {
  ModelConfig model;
  std::vector<std::vector<std::string>> trained;
};
std::vector<Case> cases() {
  return {{of_four_heads(tiny_gpt2()),
           {{"*h.2.*"},
            {"*h.1.mlp.c_fc.bias"},
            {"*wpe*"},
            {"*wte*"},
            {"*ln_f*"},
            {"*h.0.attn*", "*h.2.mlp*weight"},
            {"*ln_1*"},
            {}}},
          {of_four_heads(tiny_llama()),
           {{"*layers.1.*"}, {"*lm_head*"}, {"*embed_tokens*"}, {"*q_norm*"}, {"*layers.0.mlp*", "model.norm*"}}},
          {of_four_heads(tiny_bert()),
           {{"*layer.1.*"}, {"cls.predictions.transform*"}, {"*position*"}, {"*word_embeddings*"}, {"*LayerNorm*"}}}};
}

void expect_steps_of_rate_zero(
    const std::vector<Layout>& layouts, FunctionRef<void(Config&)> change = [](Config&) {}) {
  constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};
  size_t n = 0;
  for (const Case& k : cases()) {
    for (const std::vector<std::string>& trained : k.trained) {
      for (const Layout& l : layouts) {
        Config c = in(kTypes[n++ % 3], config_of(k.model, l, 4));
        c.gradient_clipping = 0;  // norms differ
        change(c);
        const std::string what = fmt::format("{} [{}] {} {}", family_name(k.model.family), fmt::join(trained, " "),
                                             l.name(), dtype_name(c.work_dtype()));
        const Config frozen = training_only(c, trained);
        const Trace got = train_threads(frozen, l.ranks(), kSteps);
        Config whole = training_only(c, trained, false);
        if (whole.zero.tile_size == 0) whole.zero.stage = 0;
        expect_as_at_rate_zero(got, train_threads(whole, l.ranks(), kSteps), frozen, what);
        expect_planned(got, kSteps, what);
        if (trained.empty()) {
          EXPECT_EQ(got.norms, std::vector<double>(kSteps, 0.0)) << what;
        }
      }
    }
  }
}

TEST(Frozen, TakesTheStepsOfARateOfZeroAtEveryStage) {
  expect_steps_of_rate_zero(
      {{}, {.dp = 2, .stage = 0}, {.dp = 2, .stage = 1}, {.dp = 2, .stage = 2}, {.dp = 4, .stage = 3}});
}

TEST(Frozen, TakesTheStepsOfARateOfZeroInEveryPipeline) {
  expect_steps_of_rate_zero({{.pp = 2, .stage = 1},
                             {.dp = 2, .pp = 2, .stage = 3},
                             {.pp = 4, .schedule = Kind::GPipe},
                             {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                             {.pp = 4, .schedule = Kind::ZeroBubbleH1, .stage = 1},
                             {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                             {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                             {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 3},
                             {.schedule = Kind::BreadthFirst, .chunks = 2, .stage = 3},
                             {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 4, .stage = 3}});
}

TEST(Frozen, TakesTheStepsOfARateOfZeroInTensorAndSequenceParallelRuns) {
  expect_steps_of_rate_zero({{.tp = 2},
                             {.dp = 2, .tp = 2, .sequence = true, .stage = 2},
                             {.sp = 2, .stage = 3},
                             {.pp = 2, .sp = 2, .mode = SequenceParallelMode::Ring, .stage = 1}});
}

TEST(Frozen, TakesTheStepsOfARateOfZeroWithCheckpointedActivations) {
  expect_steps_of_rate_zero({{.checkpoints = Granularity::Layer, .interval = 2},
                             {.dp = 2, .checkpoints = Granularity::Selective, .stage = 3},
                             {.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .partition = true},
                             {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Layer}});
}

TEST(Frozen, TakesTheStepsOfARateOfZeroWithInputsInFiles) {
  const TempDirectory dir;
  expect_steps_of_rate_zero({{.checkpoints = Granularity::Layer},
                             {.pp = 2, .checkpoints = Granularity::Layer, .interval = 2},
                             {.tp = 2, .checkpoints = Granularity::Layer, .partition = true}},
                            [&](Config& c) {
                              c.activation_checkpointing.nvme_path = dir.path();
                              c.activation_checkpointing.buffer_count = 1;
                            });
}

TEST(Frozen, TakesTheStepsOfARateOfZeroWithDropoutAndDroppedTokens) {
  expect_steps_of_rate_zero({{}, {.dp = 2, .pp = 2, .stage = 3}, {.pp = 2, .checkpoints = Granularity::Layer}},
                            [](Config& c) {
                              c.model.resid_dropout = c.model.embd_dropout = c.model.attn_dropout = 0.1f;
                              RandomLtdConfig& ltd = c.random_ltd;
                              ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
                              ltd.layers = {0, 1};
                              ltd.min_value = 9, ltd.max_value = 16, ltd.require_steps = 2, ltd.seq_per_step = 1;
                            });
}

TEST(Frozen, TakesTheStepsOfARateOfZeroInTiles) {
  for (const i64 persistent : {0, 100})
    expect_steps_of_rate_zero({{.stage = 3}, {.dp = 2, .stage = 3}, {.pp = 2, .stage = 3}}, [&](Config& c) {
      c.zero.tile_size = 1000;
      c.zero.param_persistence_threshold = persistent;
    });
}

i64 bytes(const Trace& t, Tag tag) { return t.counted[static_cast<size_t>(tag)]; }

// One rank of P trains the last of three blocks in bf16, of whose 2 micro-batches one is in memory at a time. With R
// rows of C = 48, F = 64, H = 4 heads:
//   kept    the input of the block (C), its norms, queries, keys, values, sum, MLP (7 C + 2 F), its output (C) and the
//           head's norm (C) in bf16; mean and deviation of three norms and the logarithms of H sums in fp32
//   passing the outputs of the layers before take turns in two buffers, in which gradients of inputs take turns later
TEST(Frozen, CostsItsWeightsAlone) {
  for (const int P : {1, 2, 4}) {
    for (const i64 stage : {0, 1, 2, 3}) {
      const Layout l{.dp = P, .stage = stage};
      const Config all = in(DType::BF16, config_of(of_four_heads(tiny_gpt2()), l, 2 * P)),
                   c = training_only(all, {"*h.2.*"});
      const Trace t = train_threads(c, P, 2), whole = train_threads(all, P, 2);
      const std::string what = fmt::format("{} ranks stage {}", P, stage);
      expect_planned(t, 2, what);
      const auto padded = [&](i64 n) { return align_up(n, 128 * P); };
      constexpr i64 kBlock = 4 * 48 + 48 * 144 + 144 + 48 * 48 + 48 + 2 * 48 * 64 + 64 + 48;
      const i64 trained = padded(kBlock),
                weights = 3 * padded(kBlock) + padded(67 * 48) + padded(24 * 48) + padded(2 * 48),
                shard = stage == 0 ? trained : trained / P;
      EXPECT_EQ(bytes(t, Tag::Params), 2 * (stage == 3 ? weights / P : weights)) << what;
      EXPECT_EQ(bytes(t, Tag::Master), 4 * shard) << what;
      EXPECT_EQ(bytes(t, Tag::Optimizer), 8 * shard) << what;
      EXPECT_EQ(bytes(t, Tag::Grads), stage <= 1 ? 2 * trained : 0) << what;
      EXPECT_EQ(bytes(t, Tag::Buckets), stage <= 1 ? 0 : 2 * trained) << what;
      EXPECT_EQ(bytes(t, Tag::GradAccum), 4 * (stage == 0 ? trained : trained / P)) << what;
      constexpr i64 R = 2 * 16, C = 48, F = 64, H = 4;
      EXPECT_EQ(bytes(t, Tag::Activations), 2 * R * (10 * C + 2 * F) + 4 * R * (6 + H)) << what;
      // No gradient of the output projection, and no more than that is saved.
      EXPECT_EQ(bytes(whole, Tag::Workspace) - bytes(t, Tag::Workspace), 4 * 67 * 48) << what;
      EXPECT_EQ(bytes(whole, Tag::Logits), bytes(t, Tag::Logits)) << what;
      // The trained block's gradients, and its parameters after the update; nothing of the others, but for gathers.
      const auto sent = [&](i64 elems) { return elems / P * (P - 1); };
      EXPECT_EQ(t.sent.at("dp.reduce_scatter").bytes, 2 * 2 * sent(trained) * 2) << what;
      if (stage > 0 && stage < 3) {
        EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * sent(trained) * 2) << what;
      }
      if (stage == 3) {  // once each; the trained block and the matrix of the head again for the backward pass
        const i64 gathered = weights + padded(67 * 48) + trained + padded(67 * 48) + padded(2 * 48);
        EXPECT_EQ(t.sent.at("dp.all_gather").bytes, 2 * 2 * sent(gathered) * 2) << what;
      }
    }
  }
}

// A stage without a backward pass sends activations and gets no gradients; the next one sends it none.
TEST(Frozen, StagesBelowTheTrainedOnesOnlyRunForward) {
  for (const Kind kind : {Kind::GPipe, Kind::OneFOneB, Kind::ZeroBubbleH1}) {
    const Layout l{.pp = 2, .schedule = kind};
    const Config all = config_of(of_four_heads(tiny_gpt2()), l, 4), c = training_only(all, {"*h.2.*"});
    const Trace t = train_threads(c, 2, kSteps), whole = train_threads(all, 2, kSteps);
    const std::string what = std::string(schedule_name(kind));
    EXPECT_EQ(t.sent.at("pp.send").calls, 4 * kSteps) << what;
    EXPECT_FALSE(t.sent.contains("pp.recv")) << what;
    EXPECT_TRUE(whole.sent.contains("pp.recv")) << what;
    // Activations are the message alone, which the next micro-batch waits for.
    EXPECT_EQ(bytes(t, Tag::Activations), 4 * 2 * 16 * 48) << what;
    for (const Tag tag : {Tag::Grads, Tag::GradAccum, Tag::Optimizer}) EXPECT_EQ(bytes(t, tag), 0) << what;
  }
}

// Elements of a run with groups of all kinds, of which some are frozen.
Config frozen_half(Config c) {
  ParamGroupConfig frozen;
  static_cast<UpdateConfig&>(frozen) = c.optimizer;
  frozen.params = {"*h.0.*", "*wpe*", "*h.2.attn.c_proj*", "*h.2.ln_1.bias"};
  frozen.frozen = true;
  c.optimizer.groups.insert(c.optimizer.groups.begin(), frozen);
  return c;
}

TEST(Frozen, IsTheSameInEveryArrangementWithEveryOptimizer) {
  for (const OptimizerCase& optimizer : kOptimizers) {
    const auto train = [&](const Layout& l) {
      const Trace t = train_threads(frozen_half(tier_config(l, optimizer, DType::BF16)), l.ranks(), kTierSteps);
      if (l.dp == 1) return t;
      EXPECT_EQ(t.counted, t.predicted) << optimizer.name << " " << l.name();
      return t;
    };
    const Trace one = train({});
    for (const Layout& l :
         {Layout{.dp = 2, .stage = 1}, {.dp = 2, .pp = 2, .stage = 2}, {.dp = 2, .pp = 2, .stage = 3}})
      expect_same_training(train(l), one, fmt::format("{} {}", optimizer.name, l.name()));
  }
}

TEST(Frozen, IsTheSameInEveryTier) {
  const TempDirectory dir;
  std::list<Serving> servers;
  for (const char* which : {"AdamW", "Lamb", "GroupsOfKinds"}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const Layout& l : {Layout{.dp = 2, .stage = 1}, {.dp = 2, .pp = 2, .stage = 3}}) {
        // At two stages the first may have nothing that is trained.
        Config c = frozen_half(tier_config(l, optimizer_named(which), work));
        if (l.pp == 2) c = training_only(c, {"*h.2.*", "*ln_f*"});
        c.zero.sub_group_size = 4 * kStateBlock;
        const Trace memory = train_threads(c, l.ranks(), kTierSteps);
        const auto expect = [&](const std::string& what, FunctionRef<void(Config&)> change, const Hooks& hooks = {}) {
          Config other = c;
          change(other);
          const std::string name = fmt::format("{} {} {} {}", which, dtype_name(work), l.name(), what);
          expect_same_training(train_threads(other, l.ranks(), kTierSteps, 1, hooks), memory, name);
        };
        expect(
            "nvme",
            [&](Config& o) {
              o.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
              o.zero.offload_optimizer.pipeline_read = o.zero.offload_optimizer.pipeline_write = false;
              if (l.stage == 3) o.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
            },
            with_predicted_traffic(kTierSteps, "nvme"));
        expect("gradients", [&](Config& o) {
          o.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path(), .gradients = true};
        });
        expect("a server", [&](Config& o) { o = served(o, servers.emplace_back()); });
        if (std::string_view(which) == "Lamb") continue;  // several passes
        Hooks finish;
        finish.after_step = [](engine::Engine& engine, i64) { engine.finish_updates(); };
        expect(
            "delayed",
            [&](Config& o) {
              o.zero.offload_optimizer = {
                  .device = OffloadDevice::Cpu, .delayed_update = true, .delayed_update_start = 1};
            },
            finish);
      }
    }
  }
}

// A run goes on with what a server has of it, the weights that were never trained too.
TEST(Frozen, WeightsOutliveTheRunWithAServer) {
  for (const DType work : {DType::F32, DType::BF16}) {
    Serving server;
    const Layout l{.dp = 2, .stage = 2};
    const Config c = training_only(tier_config(l, optimizer_named("AdamW"), work), {"*h.2.*"});
    const Trace want = train_threads(c, 2, 4);
    (void)train_threads(served(c, server), 2, 2);
    Hooks going_on;
    going_on.start = [](engine::Engine& engine) { engine.resume_from(engine.server()->found().record); };
    const Trace t = train_threads(served(c, server), 2, 2, 1, going_on);
    EXPECT_TRUE(same_bits(t.weights, want.weights)) << dtype_name(work);
    EXPECT_EQ(t.losses.back(), want.losses.back()) << dtype_name(work);
  }
}

// Ways to reduce and gather that compress keep what they are made of in step with the trained segments alone.
TEST(Frozen, TrainsWithCompressedMessages) {
  struct Way {
    std::string name;
    Layout layout;
    std::function<void(Config&)> choose;
  };
  const std::vector<Way> ways = {
      {"qgZ", {.dp = 4, .stage = 2}, [](Config& c) { c.zero.quantized_gradients = true; }},
      {"LoCo",
       {.dp = 2, .pp = 2, .stage = 3},
       [](Config& c) {
         c.zero.quantized_gradients = true;
         c.zero.loco = {.enabled = true, .err_beta = 0.8, .reset_period = 2};
       }},
      {"qwZ", {.dp = 2, .pp = 2, .stage = 3}, [](Config& c) { c.zero.quantized_weights = true; }},
      {"hpZ", {.dp = 4, .stage = 3}, [](Config& c) { c.zero.hpz_partition_size = 2; }},
      {"hpZ of frozen codes",
       {.dp = 4, .stage = 3},
       [](Config& c) {
         c.zero.hpz_partition_size = 2;
         c.zero.quantized_nontrainable_weights = true;
       }},
      {"sparse", {.dp = 2, .pp = 2, .stage = 1}, [](Config& c) { c.sparse_gradients = true; }}};
  for (const Way& way : ways) {
    for (const bool whole_layers : {false, true}) {
      Config c = in(DType::BF16, config_of(of_four_heads(tiny_gpt2()), way.layout, 8));
      const Trace exact = train_threads(whole_layers ? training_only(c, {"*h.2.*"}) : frozen_half(c), 4, 4);
      way.choose(c);
      if (whole_layers && c.sparse_gradients) continue;
      c = whole_layers ? training_only(c, {"*h.2.*"}) : frozen_half(c);
      const Trace t = train_threads(c, 4, 4);
      EXPECT_EQ(t.counted, t.predicted) << way.name;
      if (!c.sparse_gradients) expect_planned_traffic(t.sent, t.planned, 4, way.name);
      if (way.name == "hpZ" || way.name == "sparse") expect_same_training(t, exact, way.name);
      for (size_t s = 0; s < t.losses.size(); ++s)
        EXPECT_NEAR(t.losses[s], exact.losses[s], 0.02 * exact.losses[s]) << way.name << " step " << s;
    }
  }
}

TEST(Frozen, TrainsWithWorkers) {
  for (const i64 overlap : {0, 1}) {
    const auto train = [&](const Layout& l) {
      Config c = frozen_half(in(DType::BF16, config_of(of_four_heads(tiny_gpt2()), l, 4)));
      c.optimizer.diloco = {.enabled = true, .workers = 2, .sync_every = 2};
      c.optimizer.diloco.overlap_steps = overlap;
      c.batch.train *= 2;
      Hooks hooks;
      hooks.same_logits = false;
      const Trace t = traces_of_threads(c, 2 * l.ranks(), 5, 1, hooks).front();
      EXPECT_EQ(t.counted, t.predicted) << l.name();
      return t;
    };
    const Trace one = train({}), cut = train({.dp = 2, .pp = 2, .stage = 2});
    EXPECT_TRUE(same_bits(cut.losses, one.losses)) << overlap;
    EXPECT_TRUE(same_bits(cut.weights, one.weights)) << overlap;
  }
}

// Steps hold weights alone of what is not trained, and are those of any layout; and of a run in which something else
// is trained, as long as no state would be missing.
TEST(Frozen, IsResumed) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const TempDirectory dir;
    const auto config = [&](const Layout& l) { return frozen_half(tier_config(l, optimizer_named("AdamW"), work)); };
    const Layout first{.dp = 2, .stage = 1};
    const Trace whole = train_threads(config(first), 2, 5);
    const Saved saved = train_and_save(config(first), first, 3, dir / "run");
    const CheckpointReader reader(saved.step);
    const model::Model model = model_of(config(first));
    i64 param = 0;
    for (const model::ParamRow* row : model.params()) {
      const ParamEntry& entry = reader.params()[static_cast<size_t>(param)];
      EXPECT_EQ(entry.name, row->name);
      EXPECT_EQ(entry.frozen, !row->trained) << row->name;
      EXPECT_EQ(reader.stores(State::Master, param), row->trained && work != DType::F32) << row->name;
      EXPECT_EQ(reader.stores(State::ExpAvg, param), row->trained) << row->name;
      ++param;
    }
    for (const Layout& l :
         {first, Layout{.dp = 4, .stage = 3}, {.dp = 2, .pp = 2, .stage = 2}, {.tp = 2, .stage = 1}}) {
      const Trace t = resume(config(l), l, 2, saved.step);
      if (l.tp > 1) {
        EXPECT_NEAR(t.losses.back(), whole.losses.back(), 1e-3) << l.name();
      } else {
        EXPECT_TRUE(same_bits(t.weights, whole.weights)) << l.name();
        EXPECT_EQ(t.losses.back(), whole.losses.back()) << l.name();
      }
    }
    // A parameter that becomes frozen leaves its state behind.
    const Config more = training_only(tier_config(first, optimizer_named("AdamW"), work), {"*h.1.*"});
    const Trace less = resume(more, first, 1, saved.step);
    EXPECT_EQ(less.losses.front(), whole.losses[3]);
    // A parameter that becomes trained has none. One rank: of several, any may be the one whose error is thrown.
    try {
      const Layout alone{.stage = 1};
      (void)resume(tier_config(alone, optimizer_named("AdamW"), work), alone, 1, saved.step);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Mismatch);
      EXPECT_NE(
          std::string(e.what()).find("'transformer.wpe.weight' has no state there (it was frozen, or AdamW kept none)"),
          std::string::npos)
          << e.what();
    }
    // Before the first update nothing has.
    const Saved new_born = train_and_save(config(first), first, 0, dir / "new");
    const Trace all = resume(tier_config(first, optimizer_named("AdamW"), work), first, 2, new_born.step);
    EXPECT_EQ(all.losses.front(), whole.losses.front());
    EXPECT_FALSE(same_bits(all.weights, whole.weights));

    // Merged, cut anew, and merged again.
    MergeOptions options;
    options.optimizer = true;
    (void)merge_checkpoint(saved.step, dir / "a.safetensors", options);
    (void)shard_checkpoint(saved.step, dir / "sharded", {.mesh = {.dp = 3}, .stage = 3});
    (void)merge_checkpoint(dir / "sharded", dir / "b.safetensors", options);
    EXPECT_EQ(bytes_of(dir / "a.safetensors"), bytes_of(dir / "b.safetensors"));
    (void)shard_checkpoint(dir / "a.safetensors", dir / "again", {.mesh = {.dp = 2}, .stage = 2});
    const std::string again = find_checkpoint(dir / "again");
    EXPECT_TRUE(same_bits(resume(config(first), first, 2, again).weights, whole.weights));
  }
}

}  // namespace frozen_test
}  // namespace ds::testing
