// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shard.h"

#include <gtest/gtest.h>

#include "model/models.h"

namespace ds {
namespace shard_test {

std::vector<std::vector<std::string>> names_of(const std::vector<std::vector<model::ParamRow>>& units) {
  std::vector<std::vector<std::string>> names;
  for (const auto& unit : units) {
    names.emplace_back();
    for (const model::ParamRow& row : unit) names.back().push_back(row.name);
  }
  return names;
}

TEST(ShardUnits, AreTheLayersOfEveryFamily) {
  for (const Family family : {Family::Gpt2, Family::Llama, Family::Qwen2, Family::Qwen3}) {
    ModelConfig config;
    config.family = family;
    config.vocab_size = 10;
    config.hidden = 8;
    config.layers = 12;
    config.heads = 2;
    config.kv_heads = 1;
    config.head_dim = 4;
    config.intermediate = 12;
    config.max_positions = 16;
    if (family == Family::Gpt2) config.kv_heads = 2;
    config.qk_norm = family == Family::Qwen3;
    config.tie_embeddings = family == Family::Gpt2 || family == Family::Qwen2;
    const model::Model model = model::make_model(config, 16);
    std::vector<ParamEntry> params;
    std::vector<std::vector<std::string>> layers;
    const auto add = [&](const std::vector<model::ParamRow>& rows) {
      if (!rows.empty()) layers.emplace_back();
      for (const model::ParamRow& row : rows) {
        params.push_back({row.name, row.shape, "", {}});
        layers.back().push_back(row.name);
      }
    };
    add(model.shared);
    for (const auto& layer : model.layers) add(layer->rows());
    if (model.tied()) params.push_back({"lm_head.weight", params.front().shape, params.front().name, {}});
    EXPECT_EQ(names_of(units_of(params)), layers) << family_name(family);
  }
}

TEST(ShardUnits, NamesOfAnyKind) {
  EXPECT_EQ(names_of(units_of({})), (std::vector<std::vector<std::string>>{}));
  EXPECT_EQ(names_of(units_of({{"a", {1}, "", {}}, {"0", {1}, "", {}}, {"0.x", {1}, "", {}}, {"b/1/x", {1}, "", {}}})),
            (std::vector<std::vector<std::string>>{{"a"}, {"0", "0.x"}, {"b/1/x"}}));
}

}  // namespace shard_test
}  // namespace ds
