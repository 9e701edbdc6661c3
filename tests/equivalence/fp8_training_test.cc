// SPDX-License-Identifier: Apache-2.0
// Linear maps in FP8: the training of bf16 but for the rounding of codes, with the same bits however a run is cut, in
// the memory of its plan. Evaluation and generation use the same products.

#include <gmock/gmock.h>

#include <limits>
#include <map>

#include "ds/linear.h"
#include "equivalence/checkpoints.h"
#include "equivalence/fp8_configs.h"
#include "equivalence/toy_experts.h"
#include "expect_error.h"
#include "model/models.h"
#include "plan/op_tally.h"
#include "plan/run_plan.h"
#include "slow_set.h"

namespace ds::testing {
namespace fp8_training_test {

constexpr i64 kSteps = 3;

Config in_bf16(Config c) {
  c.fp8 = {};
  return c;
}
Trace train(const Config& c, const Layout& l = {}, const Hooks& hooks = {}, i64 steps = kSteps) {
  return train_threads(c, l.ranks(), steps, 1, hooks);
}
std::string named(const ModelConfig& model, const Layout& l, Fp8Gradients gradients) {
  return fmt::format("{} {} gradients in {}", family_name(model.family), l.name(),
                     gradients == Fp8Gradients::E4M3 ? "E4M3" : "E5M2");
}

TEST(Fp8Training, IsThatOfBf16ToTheRoundingOfCodes) {
  for (const ModelConfig& model : fp8_models()) {
    for (const Fp8Gradients gradients : {Fp8Gradients::E4M3, Fp8Gradients::E5M2}) {
      const std::string what = named(model, {}, gradients);
      const Config c = fp8_config(model, {}, gradients);
      const Trace t = train(c, {}, {}, 12), want = train(in_bf16(c), {}, {}, 12);
      EXPECT_FALSE(same_bits(t.losses, want.losses)) << what << ": nothing is in FP8";
      expect_close(t, want, what, {.loss = 2e-2, .first_norm = 5e-2, .norm = 0.2});
      EXPECT_LT(t.losses.back(), 0.9 * t.losses.front()) << what << ": it does not learn";
      expect_planned(t, 12, what);
    }
  }
}

TEST(Fp8Training, TheFormatOfGradientsIsThatOfTheKey) {
  for (const ModelConfig& model : fp8_models()) {
    const Trace e4m3 = train(fp8_config(model, {})), e5m2 = train(fp8_config(model, {}, Fp8Gradients::E5M2));
    EXPECT_EQ(std::bit_cast<u64>(e4m3.losses[0]), std::bit_cast<u64>(e5m2.losses[0])) << "forward passes are equal";
    EXPECT_NE(std::bit_cast<u64>(e4m3.norms[0]), std::bit_cast<u64>(e5m2.norms[0]));
  }
}

TEST(Fp8Training, NeitherRanksNorStagesNorSchedulesChangeABit) {
  test::EveryNth chosen(3);
  for (const ModelConfig& model : fp8_models()) {
    for (const Fp8Gradients gradients : {Fp8Gradients::E4M3, Fp8Gradients::E5M2}) {
      const Trace base = train(fp8_config(model, {}, gradients));
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
        if (!chosen()) continue;
        const Trace t = train(fp8_config(model, l, gradients), l);
        expect_same_training(t, base, named(model, l, gradients));
        expect_planned(t, kSteps, named(model, l, gradients));
      }
    }
  }
}

// Codes are those of whole matrices, and sums differ in their order, as in bf16.
TEST(Fp8Training, GroupsOfRanksThatShareMatricesAndTokensGiveTheSameTraining) {
  for (const ModelConfig& model : fp8_models()) {
    const Trace base = train(fp8_config(model, {}));
    for (const Layout& l : {Layout{.tp = 2},
                            {.dp = 2, .tp = 2, .sequence = true, .stage = 3},
                            {.sp = 2, .stage = 1},
                            {.sp = 2, .mode = SequenceParallelMode::Ring, .checkpoints = Granularity::Layer}}) {
      const Trace t = train(fp8_config(model, l), l);
      expect_close(t, base, named(model, l, Fp8Gradients::E4M3), {.loss = 1e-2, .first_norm = 3e-2, .norm = 0.1});
      expect_planned(t, kSteps, named(model, l, Fp8Gradients::E4M3));
    }
  }
}

// A forward pass of joined maps has the bits of maps apart.
TEST(Fp8Training, JoinedMapsHaveTheCodesOfMapsApart) {
  ModelConfig apart = fp8_llama();
  apart.joined_products = false;
  const Trace joined = train(fp8_config(fp8_llama(), {})), want = train(fp8_config(apart, {}));
  EXPECT_EQ(std::bit_cast<u64>(joined.losses[0]), std::bit_cast<u64>(want.losses[0]));
  EXPECT_FALSE(same_bits(joined.weights, want.weights)) << "nothing is joined";
  expect_close(joined, want, "joined", {.loss = 5e-3, .first_norm = 1e-2, .norm = 5e-2});
  expect_planned(want, kSteps, "apart");
}

// Samples of 13 tokens: no number of rows is a multiple of 16, and blocks of tokens are not full.
TEST(Fp8Training, AnyNumberOfRowsIsMultiplied) {
  for (const ModelConfig& model : fp8_models()) {
    for (const Layout& l : {Layout{}, {.dp = 2, .stage = 3}}) {
      Config c = fp8_config(model, l);
      c.data.seq_length = 13;
      const Trace t = train(c, l);
      expect_close(t, train(in_bf16(c), l), named(model, l, Fp8Gradients::E4M3),
                   {.loss = 2e-2, .first_norm = 5e-2, .norm = 0.2});
      expect_planned(t, kSteps, named(model, l, Fp8Gradients::E4M3));
    }
  }
}

// Layers that see a part of the tokens, in numbers that change, multiply fewer rows in the memory for all.
TEST(Fp8Training, LayersThatDropTokensDoNotChangeABitWithRanks) {
  for (const ModelConfig& model : fp8_models()) {
    const auto dropping = [&](const Layout& l) {
      Config c = fp8_config(model, l);
      RandomLtdConfig& ltd = c.random_ltd;
      ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
      ltd.layers = {0, 1};
      ltd.min_value = 5, ltd.max_value = 16, ltd.require_steps = kSteps, ltd.seq_per_step = 1;
      return c;
    };
    const Trace base = train(dropping({}));
    EXPECT_FALSE(same_bits(base.losses, train(fp8_config(model, {})).losses)) << "nothing is dropped";
    const Layout l{.dp = 2, .stage = 3};
    expect_same_training(train(dropping(l), l), base, named(model, l, Fp8Gradients::E4M3));
  }
}

TEST(Fp8Training, ResumesWithEveryBit) {
  for (const ModelConfig& model : fp8_models()) {
    const TempDirectory dir;
    const Layout from{.dp = 2, .stage = 1}, to{.dp = 4, .stage = 3};
    const Trace whole = train(fp8_config(model, from), from, {}, 2 * kSteps);
    const Saved saved = train_and_save(fp8_config(model, from), from, kSteps, dir.path());
    const Trace t = resume(fp8_config(model, to), to, kSteps, saved.step);
    EXPECT_TRUE(same_bits(t.weights, whole.weights)) << family_name(model.family);
    EXPECT_TRUE(same_bits(t.logits, whole.logits)) << family_name(model.family);
  }
}

// Branches stay in bf16 and are added to a product of codes; zeros change no bit.
TEST(Fp8Training, LowRankBranchesAreAdded) {
  const auto with_branches = [](float scale) {
    Hooks hooks;
    hooks.parts.model = [=](const Config& of, const MeshShape& mesh, const MeshCoord& coord) {
      model::Model m = model::make_model(of, model::shard_of(of, mesh, coord));
      for (auto& layer : m.layers) layer->attach([=](const model::Linear&) { return model::LowRank{4, scale}; });
      return m;
    };
    return hooks;
  };
  for (const ModelConfig& model : fp8_models()) {
    const Config c = fp8_config(model, {.dp = 2, .stage = 3});
    const Layout l{.dp = 2, .stage = 3};
    const Trace t = train(c, l, with_branches(1));
    expect_planned(t, kSteps, "branches");
    const Trace scaled = train(c, l, with_branches(3)), want = train(in_bf16(c), l, with_branches(1));
    EXPECT_EQ(std::bit_cast<u64>(t.losses[0]), std::bit_cast<u64>(scaled.losses[0])) << "branches begin as zeros";
    EXPECT_FALSE(same_bits(t.losses, scaled.losses)) << "branches are not trained";
    expect_close(t, want, "branches", {.loss = 2e-2, .first_norm = 5e-2, .norm = 0.2});
  }
}

// A frozen matrix beside trained ones in its block.
TEST(Fp8Training, FrozenMatricesHaveNoGradients) {
  const std::pair<ModelConfig, const char*> cases[] = {{fp8_gpt2(), "*.weight"},
                                                       {fp8_gpt2(), "*c_fc.weight"},
                                                       {fp8_gpt2(), "*c_attn.weight"},
                                                       {fp8_llama(), "*q_proj.weight"},
                                                       {fp8_llama(), "*down_proj.weight"}};
  for (const auto& [model, pattern] : cases) {
    const auto config = [&](const Layout& l) {
      Config c = fp8_config(model, l);
      ParamGroupConfig frozen;
      static_cast<UpdateConfig&>(frozen) = c.optimizer;
      frozen.params = {pattern};
      frozen.frozen = true;
      c.optimizer.groups = {frozen};
      return c;
    };
    const Layout two{.dp = 2, .stage = 2};
    const Trace t = train(config(two), two);
    expect_same_training(t, train(config({})), pattern);
    expect_planned(t, kSteps, pattern);
  }
}

// A weight that is not finite is not saturated: its block reaches the norm of the gradients, which skips the step.
TEST(Fp8Training, InfinitiesSkipTheStep) {
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
      const Trace t = train(fp8_config(model, {}), {}, hooks, 2);
      EXPECT_EQ(t.skipped, (std::vector<bool>{true, true})) << family_name(model.family) << " " << bad;
    }
  }
}

// The products of blocks, and nothing else, are of FP8: their floating-point operations are those of bf16.
TEST(Fp8Training, TheTallyHasTheProductsOfBlocksInFp8) {
  for (const ModelConfig& model : fp8_models()) {
    const auto flops_of = [](const Config& c) {
      const model::Model m = model::make_model(c);
      const plan::OpTally tally = plan::tally_step(m, plan::make_run_plan(c, m, {}, {})).total();
      std::map<DType, i64> flops;
      for (const auto& [call, n] : tally.calls()) {
        if (call.op == "matmul") flops[call.dtype] += n * call.flops;
      }
      return flops;
    };
    const Config c = fp8_config(model, {});
    std::map<DType, i64> fp8 = flops_of(c), bf16 = flops_of(in_bf16(c));
    const i64 R = c.batch.train * c.data.seq_length, head = 6 * R * model.hidden * model.vocab_size;
    EXPECT_EQ(fp8[DType::F8E4M3] + fp8[DType::BF16], bf16[DType::BF16]);
    EXPECT_EQ(fp8[DType::BF16], head);
  }
}

TEST(Fp8Training, SizesThatAreNoMultiplesOfABlockAreRefusedTogether) {
  const auto message = [](const Config& c, const model::Shard& shard) {
    try {
      static_cast<void>(model::make_model(c, shard));
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Config);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  Config c = fp8_config(tiny_gpt2(), {});
  const std::string narrow = message(c, {});
  for (const char* map :
       {"h.0.attn.c_attn [36, 108]", "h.0.mlp.c_fc [36, 144]", "h.1.mlp.c_proj [144, 36], and 4 more", "128 x 128"})
    EXPECT_NE(narrow.find(map), narrow.npos) << map << " in " << narrow;
  c = fp8_config(fp8_llama(), {});
  EXPECT_EQ(message(c, {}), "no error");
  EXPECT_EQ(message(c, {.tp = 2}), "no error");
  // Each of four ranks has 64 of the 256 outputs of gate and up, and one of two heads of keys.
  const std::string shared = message(c, {.tp = 4});
  EXPECT_NE(shared.find("gate_proj [128, 64]"), shared.npos) << shared;
  EXPECT_NE(shared.find("each of the 4 ranks of tensor_parallel"), shared.npos) << shared;
  EXPECT_EQ(shared.find("k_proj"), shared.npos) << shared;
}

// A configuration is refused for its sizes exactly if its model would be.
TEST(Fp8Training, SizesOfAConfigurationAreThoseOfItsModel) {
  const auto check = [](const std::string& model, i64 heads, int tp) {
    const std::vector<std::string> set = {"bf16.enabled=true", fmt::format("tensor_parallel.tp_size={}", tp)};
    const ConfigResult in_bf16 = parse_config(
        fmt::format(R"({{"train_batch_size": 4, "data": {{"seq_length": 16}}, "model": {}}})", model), "text", set, tp);
    if (!in_bf16.ok()) return;  // these ranks cannot share it
    std::vector<std::string> with = set;
    with.push_back("fp8.enabled=true");
    const ConfigResult r =
        parse_config(fmt::format(R"({{"train_batch_size": 4, "data": {{"seq_length": 16}}, "model": {}}})", model),
                     "text", with, tp);
    Config c = in_bf16.config;
    c.fp8.enabled = true;
    bool fits = true;
    try {
      static_cast<void>(model::make_model(c, {.tp = tp}));
    } catch (const Error&) {
      fits = false;
    }
    EXPECT_EQ(r.ok(), fits) << model << " heads " << heads << " tp " << tp << ": " << r.message();
  };
  for (const int tp : {1, 2, 4}) {
    for (const i64 hidden : {64, 128, 192, 256, 512}) {
      for (const i64 heads : {2, 4}) {
        for (const i64 wide : {128, 256, 320}) {
          check(fmt::format(R"({{"type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": {}, "n_layer": 1, )"
                            R"("n_head": {}, "n_inner": {}}})",
                            hidden, heads, wide),
                heads, tp);
          check(fmt::format(R"({{"type": "bert", "vocab_size": 64, "hidden_size": {}, "num_hidden_layers": 1, )"
                            R"("num_attention_heads": {}, "intermediate_size": {}}})",
                            hidden, heads, wide),
                heads, tp);
          for (const i64 kv : {1, 2})
            check(fmt::format(R"({{"type": "llama", "vocab_size": 64, "hidden_size": {}, "num_hidden_layers": 1, )"
                              R"("num_attention_heads": {}, "num_key_value_heads": {}, "intermediate_size": {}}})",
                              hidden, heads, kv, wide),
                  heads, tp);
        }
      }
    }
  }
}

// A model whose block has a matrix, but no linear map.
struct WithoutMaps final : model::Source {
  std::string identity() const override { return "toy"; }
  model::Model make(const ModelConfig& c, const model::Shard& shard) const override {
    ModelConfig family = c;
    family.source = nullptr;
    model::Model m = model::make_llama(family, shard);
    m.layers[1] = std::make_unique<ToyExpertLayer>("toy", ToyExperts{.hidden = c.hidden}, shard);
    return m;
  }
};

TEST(Fp8Training, BlocksWithoutLinearMapsAreRefusedByName) {
  Config c = fp8_config(fp8_llama(), {});
  c.model.source = std::make_shared<WithoutMaps>();
  expect_error(Errc::Unavailable, ::testing::HasSubstr("fp8.enabled: the block toy has no linear map"),
               [&] { static_cast<void>(model::make_model(c)); });
}

// Rows are multiplied with the bits that they have alone.
TEST(Fp8Training, TextIsThatOfItsPromptAlone) {
  for (const ModelConfig& model : fp8_models()) {
    Config c = fp8_config(model, {});
    c.use = ConfigUse::Generate;
    with_engines(c, 1, [&](engine::Engine& engine) {
      const Texts prompts = {{1, 2, 3}, {7, 8, 9, 10, 11}, {5}, {20, 21}, {30, 31, 32}};
      const Texts together = texts_of(engine, prompts, {.sizes = {.at_once = 4}});
      for (size_t p = 0; p < prompts.size(); ++p)
        EXPECT_EQ(text_of(engine, prompts[p], {}), together[p]) << family_name(model.family) << " prompt " << p;
    });
  }
}

}  // namespace fp8_training_test
}  // namespace ds::testing
