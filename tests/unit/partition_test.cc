// SPDX-License-Identifier: Apache-2.0
#include "pipeline/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <thread>

#include "config/parallel.h"
#include "model/models.h"

namespace ds::pipeline {
namespace partition_test {

using ::testing::HasSubstr;
using Cuts = std::vector<i64>;

i64 heaviest(std::span<const i64> weights, const Cuts& cuts) {
  i64 most = 0;
  for (size_t k = 0; k + 1 < cuts.size(); ++k) {
    i64 sum = 0;
    for (i64 i = cuts[k]; i < cuts[k + 1]; ++i) sum += weights[i];
    most = std::max(most, sum);
  }
  return most;
}

// The best of all cuts.
i64 brute_force(std::span<const i64> weights, int parts) {
  if (parts == 1) return heaviest(weights, {0, static_cast<i64>(weights.size())});
  i64 best = std::numeric_limits<i64>::max(), first = 0;
  for (size_t n = 1; n + static_cast<size_t>(parts) <= weights.size() + 1; ++n) {
    first += weights[n - 1];
    best = std::min(best, std::max(first, brute_force(weights.subspan(n), parts - 1)));
  }
  return best;
}

void expect_parts(const Cuts& cuts, i64 items, int parts) {
  ASSERT_EQ(static_cast<int>(cuts.size()), parts + 1);
  ASSERT_EQ(cuts.front(), 0);
  ASSERT_EQ(cuts.back(), items);
  for (size_t k = 0; k + 1 < cuts.size(); ++k) ASSERT_LT(cuts[k], cuts[k + 1]) << "an empty part";
}

template <class F>
std::string config_error(F f) {
  try {
    f();
    return "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    return e.what();
  }
}

TEST(LayerTypes, AreThoseOfTheModels) {
  for (const Family family :
       {Family::Gpt2, Family::Llama, Family::Qwen2, Family::Qwen3, Family::Mixtral, Family::Olmoe, Family::Qwen2Moe,
        Family::Qwen3Moe, Family::Glm4Moe, Family::DeepseekV2, Family::DeepseekV3, Family::Bert}) {
    ModelConfig c;
    c.family = family;
    c.vocab_size = 16;
    c.hidden = c.intermediate = 8;
    c.layers = 2;
    c.heads = c.kv_heads = 1;
    c.head_dim = 8;
    c.max_positions = 8;
    c.token_types = family == Family::Bert ? 2 : 0;
    const model::Model model = model::make_model(c, 8);
    const auto types = layer_types(family);
    EXPECT_EQ(model.layers.front()->type(), types[0]);
    EXPECT_EQ(model.layers[1]->type(), types[1]);
    EXPECT_EQ(model.layers.back()->type(), types[2]);
  }
}

TEST(Partition, UniformPartsDifferByOne) {
  EXPECT_EQ(uniform_cuts(10, 4), (Cuts{0, 3, 6, 8, 10}));
  EXPECT_EQ(uniform_cuts(3, 3), (Cuts{0, 1, 2, 3}));
  EXPECT_EQ(uniform_cuts(5, 1), (Cuts{0, 5}));
  for (int parts = 1; parts <= 12; ++parts) {
    for (i64 items = parts; items <= 40; ++items) {
      const Cuts cuts = uniform_cuts(items, parts);
      expect_parts(cuts, items, parts);
      EXPECT_EQ(heaviest(std::vector<i64>(static_cast<size_t>(items), 1), cuts), div_ceil(items, parts));
    }
  }
}

TEST(Partition, BalancedCutsOfKnownWeights) {
  std::vector<i64> weights(14, 3);
  weights.front() = weights.back() = 10;
  EXPECT_EQ(balanced_cuts(weights, 4), (Cuts{0, 2, 7, 12, 14}));
  EXPECT_EQ(balanced_cuts(std::vector<i64>{1, 1, 1, 1, 5}, 3), (Cuts{0, 3, 4, 5}));
  EXPECT_EQ(balanced_cuts(std::vector<i64>{0, 0, 0}, 2), (Cuts{0, 2, 3}));
  EXPECT_EQ(balanced_cuts(std::vector<i64>{7}, 1), (Cuts{0, 1}));
  const i64 huge = i64{1} << 60;
  EXPECT_EQ(balanced_cuts(std::vector<i64>{huge, huge, huge, huge}, 2), (Cuts{0, 2, 4}));
}

TEST(Partition, BalancedCutsAreTheBest) {
  std::mt19937_64 rng(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<i64> weights(1 + rng() % 10);
    const u64 range = round % 2 == 0 ? 4 : 1000;  // small ones: many zeros and ties
    for (i64& w : weights) w = static_cast<i64>(rng() % range);
    const int parts = static_cast<int>(1 + rng() % weights.size());
    const Cuts cuts = balanced_cuts(weights, parts);
    expect_parts(cuts, static_cast<i64>(weights.size()), parts);
    ASSERT_EQ(heaviest(weights, cuts), brute_force(weights, parts));
  }
}

TEST(Partition, TypesAreMatchedBySearchWithoutCase) {
  const std::vector<std::string> types = {"Embedding", "TransformerBlock", "TransformerBlock", "Head"};
  EXPECT_EQ(match_weights(types, "block"), (Cuts{0, 1, 1, 0}));
  EXPECT_EQ(match_weights(types, "^(embed|head)"), (Cuts{1, 0, 0, 1}));
  EXPECT_EQ(match_weights(types, ""), (Cuts{1, 1, 1, 1}));
  EXPECT_THAT(config_error([&] { match_weights(types, "(block"); }), HasSubstr("pipeline.partition"));
  const std::string none = config_error([&] { match_weights(types, "mamba"); });
  EXPECT_THAT(none, HasSubstr("pipeline.partition"));
  EXPECT_THAT(none, HasSubstr("Embedding, Head, TransformerBlock"));
}

TEST(Partition,
     ThreadsMatchAtOnce) {  // for the thread sanitizer: libstdc++ compiles expressions through a shared cache
  const std::vector<std::string> types = {"Embedding", "TransformerBlock"};
  std::vector<std::jthread> threads;
  for (const char* regex : {"block", "^embed", "BLOCK|head", "[a-z]+Block$"})
    threads.emplace_back([&types, regex] { EXPECT_EQ(match_weights(types, regex).size(), types.size()); });
}

TEST(Partition, EachMethodWeighsLayersItsWay) {
  const std::vector<LayerCost> layers = {{"Embedding", 90}, {"Block", 30}, {"Block", 30}, {"Block", 30}, {"Block", 30}};
  EXPECT_EQ(partition("uniform", layers, 2), (Cuts{0, 3, 5}));
  EXPECT_EQ(partition("parameters", layers, 2), (Cuts{0, 2, 5}));
  EXPECT_EQ(partition("type:BLOCK", layers, 2), (Cuts{0, 3, 5}));
  EXPECT_THAT(config_error([&] { partition("param", layers, 2); }), HasSubstr("\"type:REGEX\""));
}

// The embedding looks up, the head multiplies by the matrix of both: a head of two blocks is a part, the embedding is
// none.
TEST(Partition, ComputeIsWhatLayersMultiply) {
  const auto cuts = [](std::string_view partition) {
    const ConfigResult r = parse_config(
        R"({"model": {"type": "gpt2", "vocab_size": 768, "n_positions": 64, "n_embd": 32, "n_layer": 6, "n_head": 2},
            "data": {"seq_length": 64}, "train_batch_size": 2, "pipeline": {"stages": 2, "schedule": "zb-v"}})",
        "cfg", std::vector<std::string>{fmt::format("pipeline.partition={}", partition)}, 2, ConfigUse::Inspect);
    EXPECT_TRUE(r.ok()) << r.message();
    EXPECT_EQ(r.config.pipeline.virtual_stages, 2);
    return cuts_of(r.config, model::make_model(r.config, model::Shard{}));
  };
  EXPECT_EQ(cuts("compute"), (Cuts{0, 3, 5, 7, 8}));
  EXPECT_EQ(cuts("parameters"), (Cuts{0, 1, 4, 7, 8}));
}

TEST(Partition, MorePartsThanLayersIsAMistake) {
  for (const std::string& message : {config_error([] { uniform_cuts(3, 8); }), config_error([] {
                                       balanced_cuts(std::vector<i64>{1, 2, 3}, 8);
                                     })}) {
    EXPECT_THAT(message, HasSubstr("3 layers"));
    EXPECT_THAT(message, HasSubstr("pipeline.stages"));
    EXPECT_THAT(message, HasSubstr("at most 3"));
  }
}

}  // namespace partition_test
}  // namespace ds::pipeline
