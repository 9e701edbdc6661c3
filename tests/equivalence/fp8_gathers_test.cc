// SPDX-License-Identifier: Apache-2.0
// Matrices of FP8 products that ZeRO stage 3 gathers as their codes: no bit of a run changes, whatever else is chosen;
// about half of the bytes are sent; memory, messages and files are as predicted.

#include <gmock/gmock.h>

#include <limits>

#include "ds/linear.h"
#include "equivalence/checkpoints.h"
#include "equivalence/fp8_configs.h"
#include "equivalence/tiers.h"
#include "model/models.h"
#include "slow_set.h"

namespace ds::testing {
namespace fp8_gathers_test {

constexpr i64 kSteps = 3, kVectors = 1000;  // kVectors: no matrix of a block is as small

Config stage3(const ModelConfig& model, const Layout& l, Fp8Gradients gradients = Fp8Gradients::E4M3) {
  Config c = fp8_config(model, l, gradients);
  c.zero.param_persistence_threshold = kVectors;
  return c;
}
Config with_gathers(Config c) {
  c.fp8.gathers = true;
  return c;
}
i64 sent(const Trace& t, const std::string& name) {
  const auto found = t.sent.find(name);
  return found == t.sent.end() ? 0 : found->second.bytes;
}

// Trains with gathers in bf16 and as codes, which must be the same training with fewer bytes.
void expect_same(const Config& c, const Layout& l, const std::string& what, const Hooks& hooks = {}) {
  const Trace want = train_threads(c, l.ranks(), kSteps, 1, hooks),
              got = train_threads(with_gathers(c), l.ranks(), kSteps, 1, hooks);
  expect_same_training(got, want, what);
  expect_planned(got, kSteps, what);
  EXPECT_LT(sent(got, "dp.all_gather"), sent(want, "dp.all_gather")) << what;
  EXPECT_GT(sent(got, "dp.all_reduce"), 0) << what;
}
std::string named(const ModelConfig& model, const Layout& l) {
  return fmt::format("{} {}", family_name(model.family), l.name());
}

// None of three ranks has whole rows of blocks. With a threshold of 0 vectors are gathered beside the matrices.
TEST(Fp8Gathers, ChangeNoBit) {
  test::EveryNth chosen(5);
  for (const ModelConfig& model : fp8_models()) {
    for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                            {.dp = 4, .stage = 3},
                            {.dp = 2, .pp = 2, .stage = 3},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3},
                            {.dp = 2, .sp = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3},
                            {.dp = 2, .checkpoints = Granularity::Selective, .stage = 3},
                            {.dp = 4, .checkpoints = Granularity::Layer, .stage = 3}}) {
      for (const i64 threshold : {i64{0}, kVectors}) {
        for (const Fp8Gradients gradients : {Fp8Gradients::E4M3, Fp8Gradients::E5M2}) {
          if (!chosen()) continue;
          Config c = stage3(model, l, gradients);
          c.zero.param_persistence_threshold = threshold;
          expect_same(c, l, fmt::format("{} threshold {}", named(model, l), threshold));
        }
      }
    }
    const Layout three{.dp = 3, .stage = 3};
    expect_same(stage3(model, three), three, named(model, three));
  }
}

// A byte less for each element of a matrix, and eight bytes twice for each block.
TEST(Fp8Gathers, SendAByteForEachElement) {
  for (const ModelConfig& model : fp8_models()) {
    const Layout l{.dp = 2, .stage = 3};
    const Config c = stage3(model, l);
    const Trace want = train_threads(c, 2, kSteps), got = train_threads(with_gathers(c), 2, kSteps);
    i64 elems = 0;
    const model::Model m = model::make_model(c);
    for (const model::ParamRow* row : m.params()) {
      if (row->fp8) elems += row->numel();
    }
    const i64 less = sent(want, "dp.all_gather") - sent(got, "dp.all_gather"), each = elems / 2;
    EXPECT_GT(less, 0);
    EXPECT_EQ(less % (kSteps * each), 0) << family_name(model.family);  // each is gathered as often
    EXPECT_EQ(sent(got, "dp.all_reduce"), kSteps * elems / (kFp8Block * kFp8Block) * 8);
    EXPECT_EQ(got.sent.at("dp.all_gather").calls, want.sent.at("dp.all_gather").calls);
  }
}

TEST(Fp8Gathers, FollowAnyPlanOfGathers) {
  const Layout l{.dp = 2, .stage = 3};
  for (const ModelConfig& model : fp8_models()) {
    const Config c = stage3(model, l);
    const Trace want = train_threads(c, 2, kSteps);
    Config other = with_gathers(c);
    other.zero.prefetch_bucket_size = other.zero.max_live_parameters = other.zero.max_reuse_distance = 0;
    const Trace got = train_threads(other, 2, kSteps);
    expect_same_training(got, want, "nothing ahead");
    expect_planned(got, kSteps, "nothing ahead");
    other.zero.overlap_comm = false;
    expect_same_training(train_threads(other, 2, kSteps), want, "in the call");
  }
}

TEST(Fp8Gathers, LeaveSecondShards) {
  for (const ModelConfig& model : fp8_models()) {
    const Layout l{.dp = 4, .stage = 3};
    Config c = stage3(model, l);
    c.zero.hpz_partition_size = 2;
    c.zero.max_reuse_distance = 0;
    expect_same(c, l, named(model, l));
  }
}

// Frozen rows have segments, and block maxima, of their own, which an update leaves as they are.
TEST(Fp8Gathers, TakeFrozenMatrices) {
  const Layout l{.dp = 2, .stage = 3};
  for (const auto& [model, pattern] : {std::pair<ModelConfig, const char*>{fp8_gpt2(), "*c_fc.weight"},
                                       {fp8_gpt2(), "*.h.0.*"},
                                       {fp8_llama(), "*_proj.weight"}}) {
    Config c = stage3(model, l);
    ParamGroupConfig frozen;
    static_cast<UpdateConfig&>(frozen) = c.optimizer;
    frozen.params = {pattern};
    frozen.frozen = true;
    c.optimizer.groups = {frozen};
    const Trace want = train_threads(c, 2, kSteps), got = train_threads(with_gathers(c), 2, kSteps);
    expect_same_training(got, want, pattern);
    expect_planned(got, kSteps, pattern);
    EXPECT_LT(sent(got, "dp.all_gather"), sent(want, "dp.all_gather")) << pattern;
  }
}

TEST(Fp8Gathers, GoWithBranchesAndOtherUpdates) {
  const Layout l{.dp = 2, .stage = 3};
  Hooks branches;
  branches.parts.model = [](const Config& of, const MeshShape& mesh, const MeshCoord& coord) {
    model::Model m = model::make_model(of, model::shard_of(of, mesh, coord));
    for (auto& layer : m.layers) layer->attach([](const model::Linear&) { return model::LowRank{4, 1}; });
    return m;
  };
  for (const ModelConfig& model : fp8_models()) {
    const Config c = stage3(model, l);
    expect_same(c, l, "branches", branches);
    Config other = c;
    other.optimizer.type = OptimizerType::AdamW8bit;
    expect_same(other, l, "states in 8 bits");
    other = c;
    other.optimizer.type = OptimizerType::Muon;
    other.optimizer.muon_lr = other.optimizer.adam_lr = other.optimizer.lr;
    expect_same(other, l, "Muon");
    other = c;
    other.bf16.bf16_master_weights_and_grads = other.bf16.stochastic_rounding = true;
    other.grad_accum_dtype = DType::BF16;
    expect_same(other, l, "without masters");
    other = c;
    other.pipeline.post_validate = true;
    other.gradient_clipping = 0;  // nothing is undone
    expect_same(other, l, "post-validated");
  }
}

// Slices outside device memory are read once more in a step, for block maxima.
TEST(Fp8Gathers, TakeSlicesFromTheHostAndFromFiles) {
  const Layout l{.dp = 2, .stage = 3};
  const TempDirectory dir;
  for (const ModelConfig& model : fp8_models()) {
    for (const OffloadDevice device : {OffloadDevice::Cpu, OffloadDevice::Nvme}) {
      for (const bool delayed : {false, true}) {
        Config c = stage3(model, l);
        if (delayed) {
          c.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir.path()};
          c.zero.offload_optimizer.pipeline_read = c.zero.offload_optimizer.pipeline_write = false;
          c.zero.offload_optimizer.delayed_update = true;
          c.zero.offload_optimizer.delayed_update_start = 1;
        }
        const std::string what = fmt::format("{} {} {}", family_name(model.family), static_cast<int>(device), delayed);
        const Trace want = train_threads(c, 2, kSteps);
        Config o = with_gathers(c);
        o.zero.offload_param = {.device = device, .nvme_path = dir.path()};
        expect_same_training(train_threads(o, 2, kSteps, 1, with_predicted_traffic(kSteps, what)), want, what);
      }
    }
  }
}

// Other gathers, other layouts: a checkpoint of one is resumed with the other.
TEST(Fp8Gathers, ResumeWithEveryBit) {
  for (const ModelConfig& model : fp8_models()) {
    const TempDirectory dir;
    const Layout from{.dp = 2, .stage = 3}, to{.dp = 4, .stage = 3};
    const Trace whole = train_threads(stage3(model, from), 2, 2 * kSteps);
    const Saved saved = train_and_save(with_gathers(stage3(model, from)), from, kSteps, dir.path());
    for (const bool gathers : {false, true}) {
      const Config c = gathers ? with_gathers(stage3(model, to)) : stage3(model, to);
      const Trace t = resume(c, to, kSteps, saved.step);
      EXPECT_TRUE(same_bits(t.weights, whole.weights)) << family_name(model.family) << " " << gathers;
      EXPECT_TRUE(same_bits(t.logits, whole.logits)) << family_name(model.family) << " " << gathers;
    }
  }
}

TEST(Fp8Gathers, InfinitiesSkipTheStep) {
  const Layout l{.dp = 2, .stage = 3};
  for (const ModelConfig& model : fp8_models()) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Hooks hooks;
      hooks.start = [=](engine::Engine& engine) {
        engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
          engine.init_values(param, begin, count, out);
          const std::string& name = engine.row_of(param).name;
          const bool chosen = name.ends_with("c_fc.weight") || name.ends_with("up_proj.weight");
          if (chosen && begin <= 77 && 77 < begin + count) out[77 - begin] = bad;
        });
      };
      const Trace t = train_threads(with_gathers(stage3(model, l)), 2, 2, 1, hooks);
      EXPECT_EQ(t.skipped, (std::vector<bool>{true, true})) << family_name(model.family) << " " << bad;
    }
  }
}

// One rank sends nothing, and below stage 3 nothing is gathered.
TEST(Fp8Gathers, NothingIsEncodedWhereNothingTravels) {
  for (const ModelConfig& model : fp8_models()) {
    for (const Layout& l : {Layout{.stage = 3}, Layout{.dp = 2, .stage = 2}}) {
      const Config c = stage3(model, l);
      const Trace want = train_threads(c, l.ranks(), kSteps), got = train_threads(with_gathers(c), l.ranks(), kSteps);
      expect_same_training(got, want, named(model, l));
      EXPECT_EQ(got.counted, want.counted) << named(model, l);
      EXPECT_EQ(sent(got, "dp.all_reduce"), 0);
    }
  }
}

}  // namespace fp8_gathers_test
}  // namespace ds::testing
