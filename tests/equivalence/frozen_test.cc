// SPDX-License-Identifier: Apache-2.0
// Parameters that are not trained cost their weights and nothing else: a run with them takes the steps of one that
// trains them at a rate of zero, however it is cut, and its memory, messages and checkpoints have no more of them.

#include <fstream>

#include "checkpoint/reader.h"
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

void expect_steps_of_rate_zero(const std::vector<Layout>& layouts, FunctionRef<void(Config&)> change = [](Config&) {}) {
  constexpr DType kTypes[] = {DType::F32, DType::BF16, DType::F16};
  size_t n = 0;
  for (const Case& k : cases()) {
    for (const std::vector<std::string>& trained : k.trained) {
      for (const Layout& l : layouts) {
        Config c = in(kTypes[n++ % 3], config_of(k.model, l, 4));
        c.gradient_clipping = 0;  // norms differ
        change(c);
        const std::string what =
            fmt::format("{} [{}] {} {}", family_name(k.model.family), fmt::join(trained, " "), l.name(),
                        dtype_name(c.work_dtype()));
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
  expect_steps_of_rate_zero({{}, {.dp = 2, .stage = 0}, {.dp = 2, .stage = 1}, {.dp = 2, .stage = 2}, {.dp = 4, .stage = 3}});
}

TEST(Frozen, TakesTheStepsOfARateOfZeroInEveryPipeline) {
  expect_steps_of_rate_zero({{.pp = 2, .stage = 1},
                             {.dp = 2, .pp = 2, .stage = 3},
                             {.pp = 4, .schedule = Kind::GPipe},
                             {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                             {.pp = 4, .schedule = Kind::ZeroBubbleH1, .stage = 1},
                             {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
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

}  // namespace frozen_test
}  // namespace ds::testing
