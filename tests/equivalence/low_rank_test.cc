// SPDX-License-Identifier: Apache-2.0
// Low-rank branches beside the linear maps of every family, attached to a model that knows nothing of them. A branch of
// zeros keeps the bits of the model without it; other branches train with the same bits in every layout that promises
// them, and with the same numbers over tensor-parallel ranks; their memory and messages are those of the plan.

#include "ds/linear.h"
#include "equivalence/layouts.h"
#include "model/models.h"

namespace ds::testing {
namespace low_rank_test {

constexpr i64 kSteps = 4;
constexpr float kScale = 0.7f;

const ModelConfig kModels[] = {of_four_heads(tiny_gpt2()), of_four_heads(tiny_llama()), of_four_heads(tiny_bert()),
                               tiny_latent()};

bool is_branch(const std::string& name) { return name.find(".lora_") != name.npos; }
bool is_last(const std::string& name) { return name.ends_with(".lora_B.weight"); }

Hooks with_branches(i64 rank) {
  Hooks hooks;
  hooks.parts.model = [=](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    const model::PassLengths lengths{.sequence = c.data.seq_length,
                                     .kept = c.random_ltd.on() ? c.random_ltd.min_value : 0};
    model::Model model = model::make_model(c, model::shard_of(c, mesh, coord), lengths);
    for (auto& layer : model.layers) layer->attach([=](auto&) { return model::LowRank{rank, kScale}; });
    return model;
  };
  return hooks;
}

// Initial weights by name, so that they do not depend on what else the model has. B is `last` times noise.
std::vector<float> values_of(model::ParamRow row, float last, i64 begin, i64 count) {
  const bool of_b = is_last(row.name);
  if (of_b) row.init = model::Init::Normal;
  std::vector<float> values(static_cast<size_t>(count));
  const i64 number = static_cast<i64>(std::hash<std::string>{}(row.name) % 1'000'003);
  model::init_values(row, number, 7, begin, count, values.data());
  if (of_b) std::ranges::for_each(values, [&](float& x) { x *= last; });
  return values;
}

Hooks by_name(Hooks hooks, float last) {
  hooks.start = [=](engine::Engine& engine) {
    const std::vector<const model::ParamRow*> rows = engine.model().params();
    engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
      std::ranges::copy(values_of(*rows[static_cast<size_t>(param)], last, begin, count), out);
    });
  };
  return hooks;
}

Config config(const ModelConfig& model, const Layout& l, DType work = DType::F32) {
  Config c = config_of(model, l, 4);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(work);
  return c;
}

Trace train(const ModelConfig& model, const Layout& l, DType work = DType::F32,
            const std::function<void(Config&)>& change = {}) {
  Config c = config(model, l, work);
  if (change) change(c);
  return train_threads(c, l.ranks(), kSteps, 1, by_name(with_branches(3), 5));
}

// The weights of the model itself, without branches.
std::vector<float> base_weights(const Trace& t, const ModelConfig& model, bool with) {
  model::Model m = model::make_model(model, 16);
  if (with) {
    for (auto& layer : m.layers) layer->attach([](auto&) { return model::LowRank{3, kScale}; });
  }
  std::vector<float> weights;
  i64 at = 0;
  for (const model::ParamRow* row : m.params()) {
    const auto first = t.weights.begin() + std::exchange(at, at + row->numel());
    if (!is_branch(row->name)) weights.insert(weights.end(), first, first + row->numel());
  }
  EXPECT_EQ(at, std::ssize(t.weights));
  return weights;
}

TEST(LowRank, EveryLinearMapHasRoomForIt) {
  for (const ModelConfig& config : kModels) {
    model::Model base = model::make_model(config, 16), model = model::make_model(config, 16);
    size_t matrices = 0;
    for (const auto& layer : base.layers) {
      for (const model::ParamRow& row : layer->rows()) matrices += layer->is_block() && row.shape.size() == 2 ? 1 : 0;
    }
    if (!config.causal()) ++matrices;  // the head's
    std::vector<std::string> chosen;
    for (auto& layer : model.layers) {
      const size_t before = chosen.size();
      const size_t attached = layer->attach([&](const model::Linear& linear) {
        chosen.push_back(linear.spec().name);
        return model::LowRank{2};
      });
      EXPECT_EQ(attached, chosen.size() - before) << layer->name();
    }
    EXPECT_EQ(chosen.size(), matrices) << family_name(config.family);
    const auto rows = model.params();
    for (const std::string& name : chosen) {
      const auto a = std::ranges::find(rows, name + ".lora_A.weight", &model::ParamRow::name);
      ASSERT_NE(a, rows.end());
      EXPECT_EQ((*a)->shape[0], 2);
      EXPECT_EQ((*std::next(a))->name, name + ".lora_B.weight");
      EXPECT_EQ((*std::next(a))->shape[1], 2);
    }
  }
}

// The loss of the first step is that of the matrices W + scale B A.
TEST(LowRank, AddsItsProductToTheMatrix) {
  constexpr float kLast = 20;
  for (const ModelConfig& model : kModels) {
    std::map<std::string, std::vector<float>> products;  // scale B A, in the orientation of the weight
    model::Model attached = model::make_model(model, 16);
    std::map<std::string, model::LinearSpec> linears;
    for (auto& layer : attached.layers) {
      layer->attach([&](const model::Linear& linear) {
        linears.emplace(linear.spec().name, linear.spec());
        return model::LowRank{3, kScale};
      });
    }
    std::map<std::string, std::vector<float>> branches;
    for (const model::ParamRow* row : attached.params())
      if (is_branch(row->name)) branches[row->name] = values_of(*row, kLast, 0, row->numel());
    for (const auto& [name, linear] : linears) {
      const std::vector<float>&a = branches[name + ".lora_A.weight"], &b = branches[name + ".lora_B.weight"];
      std::vector<float>& sum = products[name + ".weight"];
      sum.resize(static_cast<size_t>(linear.in * linear.out));
      for (i64 o = 0; o < linear.out; ++o) {
        for (i64 i = 0; i < linear.in; ++i) {
          float x = 0;
          for (i64 r = 0; r < 3; ++r)
            x += b[static_cast<size_t>(o * 3 + r)] * a[static_cast<size_t>(r * linear.in + i)];
          const bool out_in = linear.orientation == model::Orientation::OutIn;
          sum[static_cast<size_t>(out_in ? o * linear.in + i : i * linear.out + o)] = kScale * x;
        }
      }
    }
    Hooks merged;
    merged.start = [&](engine::Engine& engine) {
      const std::vector<const model::ParamRow*> rows = engine.model().params();
      engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
        const model::ParamRow& row = *rows[static_cast<size_t>(param)];
        std::ranges::copy(values_of(row, 0, begin, count), out);
        const auto product = products.find(row.name);
        for (i64 i = 0; i < count && product != products.end(); ++i)
          out[i] += product->second[static_cast<size_t>(begin + i)];
      });
    };
    const Config c = config(model, {});
    const double want = train_threads(c, 1, 1, 1, merged).losses[0],
                 without = train_threads(c, 1, 1, 1, by_name({}, 0)).losses[0],
                 got = train_threads(c, 1, 1, 1, by_name(with_branches(3), kLast)).losses[0];
    EXPECT_NEAR(got, want, 2e-6 * want) << family_name(model.family);
    EXPECT_GT(std::abs(without - want), 5e-5 * want) << family_name(model.family);
  }
}

// The rows of the branches are frozen, else they would not stay zero.
TEST(LowRank, ZerosKeepTheBitsOfTheModel) {
  for (const ModelConfig& base : kModels) {
    for (const DType work : {DType::F32, DType::BF16}) {
      // A branch makes the activation a call of its own, which reads a rounded value.
      if (work == DType::BF16 && base.activation != Activation::Silu) continue;
      ModelConfig model = base;
      if (base.activation != Activation::Silu) model.resid_dropout = 0.1f;
      model.joined_products = false;  // as maps with branches are
      Config c = config(model, {}, work);
      const Trace want = train_threads(c, 1, kSteps, 1, by_name({}, 0));
      ParamGroupConfig frozen;
      static_cast<UpdateConfig&>(frozen) = c.optimizer;
      frozen.frozen = true, frozen.params = {"*.lora_*"};
      c.optimizer.groups = {frozen};
      const Trace got = train_threads(c, 1, kSteps, 1, by_name(with_branches(3), 0));
      const std::string what = fmt::format("{} {}", family_name(model.family), dtype_name(work));
      EXPECT_TRUE(same_bits(got.losses, want.losses)) << what;
      EXPECT_TRUE(same_bits(got.logits, want.logits)) << what;
      EXPECT_TRUE(same_bits(base_weights(got, model, true), base_weights(want, model, false))) << what;
    }
  }
}

TEST(LowRank, LayoutsChangeNoBit) {
  for (const ModelConfig& base : kModels) {
    for (const DType work : {DType::F32, DType::BF16}) {
      ModelConfig model = base;
      model.attn_dropout = 0.1f;
      const Trace one = train(model, {}, work);
      EXPECT_LT(one.losses.back(), one.losses.front());
      for (const Layout& l : {Layout{.dp = 2, .stage = 3},
                              {.dp = 2, .checkpoints = Granularity::Layer, .stage = 2},
                              {.checkpoints = Granularity::Layer, .interval = 2},
                              {.checkpoints = Granularity::Selective},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Selective},
                              {.pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 3}}) {
        const std::string what = fmt::format("{} {} {}", family_name(model.family), dtype_name(work), l.name());
        const Trace t = train(model, l, work);
        expect_same_training(t, one, what);
        expect_planned(t, kSteps, what);
      }
    }
  }
}

TEST(LowRank, SlicesFollowTheMatrices) {
  for (const ModelConfig& model : kModels) {
    const Trace one = train(model, {});
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 4},  // fewer key/value heads than ranks
                            {.tp = 2, .sequence = true},
                            {.dp = 2, .tp = 2, .sequence = true, .checkpoints = Granularity::Layer, .stage = 3},
                            {.sp = 2},
                            {.tp = 2, .sp = 2}}) {
      const std::string what = fmt::format("{} {}", family_name(model.family), l.name());
      const Trace t = train(model, l);
      expect_close(t, one, what);
      expect_planned(t, kSteps, what);
    }
  }
}

TEST(LowRank, TheMatricesBesideItMayBeInTiles) {
  for (const ModelConfig& model : kModels) {
    const auto in_tiles = [](Config& c) { c.zero.tile_size = 1200; };
    const Trace one = train(model, {.stage = 3}, DType::F32, in_tiles);
    expect_close(one, train(model, {.stage = 3}), std::string(family_name(model.family)));
    for (const Layout& l : {Layout{.dp = 2, .stage = 3}, {.checkpoints = Granularity::Layer, .stage = 3}})
      expect_same_training(train(model, l, DType::F32, in_tiles), one, l.name());
  }
}

// The layers that drop tokens wrap those with the linear maps.
TEST(LowRank, LayersThatDropTokensPassItOn) {
  const auto dropping = [](Config& c) {
    RandomLtdConfig& ltd = c.random_ltd;
    ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
    ltd.min_value = 8, ltd.max_value = 16, ltd.require_steps = 1000, ltd.seq_per_step = 1, ltd.layers = {1};
  };
  for (const ModelConfig& model : kModels) {
    const Trace one = train(model, {}, DType::F32, dropping);
    EXPECT_FALSE(same_bits(one.losses, train(model, {}).losses));
    expect_same_training(train(model, {.checkpoints = Granularity::Layer}, DType::F32, dropping), one, "");
    expect_close(train(model, {.tp = 2}, DType::F32, dropping), one, std::string(family_name(model.family)));
  }
}

TEST(LowRank, GenerationIsThatOfWholePasses) {
  for (const ModelConfig& model : {kModels[0], kModels[1]}) {
    for (const int tp : {1, 2}) {
      Config c = config(model, {.tp = tp});
      c.use = ConfigUse::Generate;
      const Hooks hooks = by_name(with_branches(3), 5);
      const auto body = [&](engine::Engine& engine) {
        hooks.start(engine);
        const std::vector<i32> text = text_of(engine, {3, 1, 4}, {.max_tokens = 12});
        for (const size_t n : {size_t{1}, size_t{6}, size_t{11}}) {
          std::vector<i32> longer = {3, 1, 4};
          longer.insert(longer.end(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n));
          EXPECT_EQ(text_of(engine, longer, {.max_tokens = 1}), std::vector{text[n]}) << n;
        }
      };
      with_engines(c, tp, body, *cpu_ops(), 1, hooks.parts);
    }
  }
}

}  // namespace low_rank_test
}  // namespace ds::testing
