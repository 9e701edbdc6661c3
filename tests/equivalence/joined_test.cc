// SPDX-License-Identifier: Apache-2.0
// Linear maps of one input as one product: the training of maps apart but for the rounding of an input's gradient, with
// the same bits however a run is cut. Parameters, their initial values and states of optimizers are those of maps
// apart.

#include "ds/linear.h"
#include "equivalence/tiers.h"
#include "model/models.h"
#include "plan/op_tally.h"

namespace ds::testing {
namespace joined_test {

constexpr i64 kSteps = 4;

// Grouped heads, and no biases.
ModelConfig llama() {
  ModelConfig c = tiny_llama();
  c.family = Family::Llama;
  c.hidden = 32;
  c.head_dim = 16;
  c.intermediate = 64;
  c.qk_norm = false;
  return c;
}
// Its one group is q, k and v.
ModelConfig bert() {
  ModelConfig c = tiny_bert();
  c.hidden = 256;
  c.heads = c.kv_heads = 4;
  c.head_dim = 64;
  c.intermediate = 32;
  return c;
}
const ModelConfig kModels[] = {llama(), joinable_qwen2(), bert()};

ModelConfig apart(ModelConfig c) {
  c.joined_products = false;
  return c;
}

Config config_for(const ModelConfig& model, const Layout& l, DType work = DType::F32) {
  Config c = config_of(model, l, l.dp == 3 ? 6 : 4);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(work);
  return c;
}
Trace train(const Config& c, const Layout& l = {}, const Hooks& hooks = {}) {
  return train_threads(c, l.ranks(), kSteps, 1, hooks);
}
std::string named(const ModelConfig& model, DType work, const Layout& l) {
  return fmt::format("{} {} {}", family_name(model.family), dtype_name(work), l.name());
}

TEST(Joined, AreTheTrainingOfMapsApartToTheRounding) {
  for (const ModelConfig& model : kModels) {
    for (const DType work : {DType::F32, DType::BF16}) {
      const Trace joined = train(config_for(model, {}, work)), want = train(config_for(apart(model), {}, work));
      const std::string what = named(model, work, {});
      // A forward pass has the same bits, and so have gradients of matrices, given the same gradients of outputs.
      EXPECT_EQ(std::bit_cast<u64>(joined.losses[0]), std::bit_cast<u64>(want.losses[0])) << what;
      EXPECT_FALSE(same_bits(joined.weights, want.weights)) << what << ": nothing is joined";
      expect_close(joined, want, what,
                   work == DType::F32 ? Tolerance() : Tolerance{.loss = 5e-3, .first_norm = 1e-2, .norm = 5e-2});
      expect_planned(joined, kSteps, what);
      expect_planned(want, kSteps, what + " apart");
    }
  }
}

TEST(Joined, NeitherRanksNorStagesNorSchedulesChangeABit) {
  for (const ModelConfig& model : kModels) {
    for (const DType work : {DType::F32, DType::BF16}) {
      const Trace base = train(config_for(model, {}, work));
      for (const Layout& l : {Layout{.stage = 3},
                              {.dp = 2, .stage = 0},
                              {.dp = 2, .stage = 1},
                              {.dp = 2, .stage = 2},
                              {.dp = 2, .stage = 3},
                              {.dp = 4, .stage = 3},
                              {.pp = 2, .stage = 1},
                              {.dp = 2, .pp = 2, .stage = 3},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                              {.checkpoints = Granularity::Layer, .stage = 2},
                              {.dp = 2, .checkpoints = Granularity::Selective, .stage = 3}}) {
        // At stage 3 a smaller matrix of a group would stay whole without the others.
        for (const i64 threshold : {0, 3000, 100'000}) {
          if (threshold > 0 && (l.stage < 3 || l.pp > 1)) continue;
          Config c = config_for(model, l, work);
          c.zero.param_persistence_threshold = threshold;
          const std::string what = fmt::format("{} threshold {}", named(model, work, l), threshold);
          const Trace t = train(c, l);
          expect_same_training(t, base, what);
          expect_planned(t, kSteps, what);
        }
      }
    }
  }
}

TEST(Joined, GroupsOfRanksThatShareMatricesAndTokensGiveTheSameTraining) {
  for (const ModelConfig& model : {llama(), bert()}) {
    const Trace base = train(config_for(model, {}));
    for (const Layout& l : {Layout{.tp = 2},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3},
                            {.sp = 2, .stage = 1},
                            {.sp = 2, .mode = SequenceParallelMode::Ring, .checkpoints = Granularity::Layer}}) {
      if (model.family == Family::Bert && l.mode == SequenceParallelMode::Ring) continue;
      const Trace t = train(config_for(model, l), l);
      expect_close(t, base, named(model, DType::F32, l));
      expect_planned(t, kSteps, named(model, DType::F32, l));
    }
  }
}

// Codes are of blocks that no two rows share.
TEST(Joined, StatesInCodesHaveTheSameBitsOnAnyRanks) {
  for (const ModelConfig& model : kModels) {
    const auto coded = [&](const Layout& l) {
      Config c = config_for(model, l);
      c.optimizer.type = OptimizerType::AdamW8bit;
      return c;
    };
    const Trace base = train(coded({}));
    for (const Layout& l : {Layout{.dp = 4, .stage = 1}, {.dp = 2, .stage = 3}}) {
      const Trace t = train(coded(l), l);
      expect_same_training(t, base, named(model, DType::F32, l));
      expect_planned(t, kSteps, named(model, DType::F32, l));
    }
  }
}

plan::OpTally pass_of(const Config& c, plan::Pass pass) {
  const model::Model model = model::make_model(c.model, c.data.seq_length);
  return plan::tally_step(model, plan::make_run_plan(c, model, {}, {})).total(pass);
}
i64 products(const Config& c, plan::Pass pass) { return pass_of(c, pass).by_op().at("matmul").calls; }

// By block and micro-batch: q, k, v, o, gate, up and down are seven products, or four.
TEST(Joined, HaveOneProductInEachDirection) {
  using plan::Pass;
  for (const ModelConfig& model : kModels) {
    const Config one = config_for(model, {}), seven = config_for(apart(model), {});
    const i64 fewer = (model.family == Family::Bert ? 2 : 3) * model.layers * one.batch.accumulation;
    for (const Pass pass : {Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight}) {
      EXPECT_EQ(products(seven, pass) - products(one, pass), fewer) << family_name(model.family);
      EXPECT_EQ(pass_of(seven, pass).total().flops, pass_of(one, pass).total().flops) << family_name(model.family);
      EXPECT_GT(pass_of(seven, pass).total().bytes, pass_of(one, pass).total().bytes) << family_name(model.family);
    }
  }
}

TEST(Joined, AreDecidedByShapes) {
  const auto joins = [](const ModelConfig& model) {
    const model::Model m = model::make_model(model, 16);
    size_t rows = 0;
    for (const model::ParamRow& row : m.layers[1]->rows()) rows += row.lies_after(m.layers[1]->rows()) ? 1 : 0;
    return rows;
  };
  EXPECT_EQ(joins(llama()), 3u);  // k, v, up
  EXPECT_EQ(joins(joinable_qwen2()), 5u);
  EXPECT_EQ(joins(bert()), 4u);
  EXPECT_EQ(joins(apart(bert())), 0u);
  ModelConfig c = llama();
  c.qk_norm = true;
  EXPECT_EQ(joins(c), 1u);  // norms of heads
  c = llama();
  c.intermediate = 60;  // the second of two matrices must begin at a block, and outputs at 16 bytes
  EXPECT_EQ(joins(c), 2u);
  c.intermediate = 68;
  EXPECT_EQ(joins(c), 2u);
  c = joinable_qwen2();
  c.heads = c.kv_heads = 4;  // biases of half a block
  EXPECT_EQ(joins(c), 1u);
  EXPECT_EQ(joins(of_four_heads(tiny_gpt2())), 0u);
}

// Checks the properties that runs of `model` have whether its maps may be joined or not.
void expect_apart(const Config& c, const Layout& l, const Hooks& hooks, const std::string& what) {
  Config other = c;
  other.model = apart(c.model);
  const Trace t = train(c, l, hooks);
  expect_same_training(t, train(other, l, hooks), what);
  expect_planned(t, kSteps, what);
}

Config freezing(Config c, const std::string& pattern) {
  ParamGroupConfig frozen;
  static_cast<UpdateConfig&>(frozen) = c.optimizer;
  frozen.params = {pattern};
  frozen.frozen = true;
  c.optimizer.groups = {frozen};
  return c;
}

TEST(Joined, TilesBranchesAndRowsThatAreFrozenAloneKeepMapsApart) {
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{.dp = 2, .stage = 1}, {.dp = 2, .stage = 3}}) {
      const Config c = config_for(bert(), l, work);
      for (const char* pattern : {"*query.weight", "*key.weight", "*value.bias", "*self.key*"})
        expect_apart(freezing(c, pattern), l, {}, named(c.model, work, l) + " frozen " + pattern);
      Hooks branches;
      branches.parts.model = [](const Config& of, const MeshShape& mesh, const MeshCoord& coord) {
        model::Model m = model::make_model(of, model::shard_of(of, mesh, coord));
        for (auto& layer : m.layers)
          layer->attach([](const model::Linear& linear) {
            return model::LowRank{linear.spec().name.ends_with("value") ? 2 : 0};
          });
        return m;
      };
      expect_apart(c, l, branches, named(c.model, work, l) + " branches");
    }
    Config c = config_for(bert(), {.dp = 2, .stage = 3}, work);
    c.zero.tile_size = 20'000;
    expect_apart(c, {.dp = 2, .stage = 3}, {}, "tiles");
  }
}

// Frozen together they lie side by side still: the bits of a rate of zero.
TEST(Joined, RowsThatAreFrozenTogetherStayJoined) {
  for (const ModelConfig& model : kModels) {
    const char* const pattern = model.family == Family::Bert ? "*attention.self*" : "*self_attn.[qkv]_proj*";
    Config frozen = freezing(config_for(model, {.dp = 2, .stage = 2}), pattern);
    frozen.gradient_clipping = 0;  // norms differ
    Config still = frozen;
    still.optimizer.groups[0].frozen = false;
    still.optimizer.groups[0].lr = still.optimizer.groups[0].weight_decay = 0;
    const Layout l{.dp = 2, .stage = 2};
    const Trace t = train(frozen, l), want = train(still, l);
    EXPECT_TRUE(same_bits(t.losses, want.losses)) << family_name(model.family);
    EXPECT_TRUE(same_bits(t.weights, want.weights)) << family_name(model.family);
    expect_planned(t, kSteps, "frozen");
  }
}

TEST(Joined, RowsThatAreStoredAlikeStayJoined) {
  for (const ModelConfig& model : kModels) {
    Hooks stored;
    stored.parts.model = [](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
      model::Model m = model::make_model(c, model::shard_of(c, mesh, coord));
      for (auto& layer : m.layers) {
        for (size_t r = 0; r < layer->rows().size() && layer->is_block(); ++r) {
          const std::string& name = layer->rows()[r].name;
          if (name.find("attn") != name.npos || name.find("attention") != name.npos)
            layer->store(r, model::Storage::Int8);
        }
      }
      return m;
    };
    const Trace base = train(config_for(model, {}), {}, stored), exact = train(config_for(model, {}), {}, Hooks{});
    EXPECT_FALSE(same_bits(base.losses, exact.losses)) << "nothing is stored";
    for (const Layout& l : {Layout{.stage = 3}, {.dp = 2, .stage = 1}, {.dp = 4, .stage = 3}}) {
      const Trace t = train(config_for(model, l), l, stored);
      expect_same_training(t, base, named(model, DType::F32, l));
      expect_planned(t, kSteps, named(model, DType::F32, l));
    }
  }
}

// Files do not tell whether maps are joined.
TEST(Joined, StepsOfMapsApartResumeWithEveryBit) {
  for (const ModelConfig& model : kModels) {
    for (const bool to_joined : {true, false}) {
      const TempDirectory dir;
      const Layout from{.dp = 2, .stage = 1}, to{.dp = 4, .stage = 3};
      const Saved saved =
          train_and_save(config_for(to_joined ? apart(model) : model, from, DType::BF16), from, kSteps, dir.path());
      const Config c = config_for(to_joined ? model : apart(model), to, DType::BF16);
      const Trace t = resume(c, to, 0, saved.step);
      EXPECT_TRUE(same_bits(t.weights, saved.trace.weights)) << family_name(model.family);
      EXPECT_TRUE(same_bits(t.logits, saved.trace.logits)) << family_name(model.family);
      for (const State s : kOptimizerStates)
        EXPECT_TRUE(same_bits(t.states[s], saved.trace.states[s])) << family_name(model.family) << state_name(s);
    }
  }
}

}  // namespace joined_test
}  // namespace ds::testing
