// SPDX-License-Identifier: Apache-2.0
// Tokens that layers pass by: DeepSpeed's schedule, the draws, and the refusals.
#include "config/random_ltd.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "base/json.h"
#include "model/models.h"
#include "model/token_dropping.h"
#include "unit/config_reading.h"

namespace ds {
namespace random_ltd_test {

using ::testing::HasSubstr;
using namespace ds::testing;

RandomLtdConfig schedule(i64 min, i64 max, i64 steps, i64 per_step) {
  RandomLtdConfig c;
  c.min_value = min, c.max_value = max, c.require_steps = steps, c.seq_per_step = per_step;
  return c;
}

// DeepSpeed 0.19.8's RandomLTDScheduler over 10^4 steps: tests/golden/make_curricula.py.
TEST(RandomLtd, IsTheScheduleOfTheOriginal) {
  std::ifstream in(DS_TEST_DATA "/random_ltd.json");
  const Json all = Json::parse(in);
  ASSERT_GE(all.size(), 6u);
  for (const Json& c : all) {
    const RandomLtdConfig ltd =
        schedule(c.at("min_value"), c.at("max_value"), c.at("require_steps"), c.at("seq_per_step"));
    for (const Json& point : c.at("kept_at"))
      EXPECT_EQ(random_ltd_kept(ltd, point.at(0).get<i64>()), point.at(1).get<i64>()) << c << point;
    i64 sum = 0;
    for (i64 step = 1; step <= 10'000; ++step) sum += step * random_ltd_kept(ltd, step);
    EXPECT_EQ(sum, c.at("sum").get<i64>()) << c;
  }
}

struct Drawing {
  std::vector<i32> rows, positions, inverse, passing, documents;
};

Drawing draw(const RngKey& key, i64 layer, i64 B, i64 T, i64 kept, std::span<const i32> documents = {},
             std::span<const i32> positions = {}) {
  ModelConfig c;
  c.family = Family::Gpt2;
  c.vocab_size = 5, c.hidden = 4, c.layers = 1, c.heads = c.kv_heads = 1, c.head_dim = 4, c.intermediate = 4;
  c.max_positions = T;
  model::Model m = model::make_model(c, T);
  const auto dropping = model::drop_tokens(
      std::move(m.layers[1]), {.number = layer, .hidden = 4, .kept = kept, .most = T, .documents = !documents.empty()});
  model::ActivationPlanner planner;
  const model::LayerActs acts = dropping->plan(planner, {.B = B, .T = T});
  std::vector<i32> all(static_cast<size_t>(acts.drawn.numel()));
  dropping->draw({.rng = key, .B = B, .T = T, .documents = documents, .positions = positions}, all);
  Drawing d;
  auto at = all.begin();
  const auto take = [&](std::vector<i32>& to, i64 n) { to.assign(at, at + n), at += n; };
  take(d.rows, B * kept);
  take(d.positions, B * kept);
  take(d.inverse, B * T);
  take(d.passing, B * T);
  if (!documents.empty()) take(d.documents, 2 * B * kept);
  EXPECT_EQ(at, all.end());
  return d;
}

TEST(RandomLtd, DrawsSomeTokensOfEachSampleInOrder) {
  constexpr i64 B = 3, T = 17;
  for (const i64 kept : {i64{1}, i64{8}, i64{16}}) {
    const Drawing d = draw({7, 0, 5}, 2, B, T, kept);
    for (i64 b = 0; b < B; ++b) {
      for (i64 n = 0; n < kept; ++n) {
        const i64 row = d.rows[static_cast<size_t>(b * kept + n)];
        EXPECT_TRUE(row >= b * T && row < (b + 1) * T);
        if (n > 0) {
          EXPECT_GT(row, d.rows[static_cast<size_t>(b * kept + n - 1)]);
        }
        EXPECT_EQ(d.positions[static_cast<size_t>(b * kept + n)], row - b * T);
        EXPECT_EQ(d.inverse[static_cast<size_t>(row)], b * kept + n);
        EXPECT_EQ(d.passing[static_cast<size_t>(row)], -1);
      }
    }
    EXPECT_EQ(std::ranges::count(d.inverse, -1), B * (T - kept));
    for (i64 row = 0; row < B * T; ++row) {
      if (d.inverse[static_cast<size_t>(row)] < 0) {
        EXPECT_EQ(d.passing[static_cast<size_t>(row)], row);
      }
    }
  }
  // By seed, micro-batch and layer; the same otherwise.
  const auto rows = [](const RngKey& key, i64 layer) { return draw(key, layer, B, T, 8).rows; };
  EXPECT_EQ(rows({7, 0, 5}, 2), rows({7, 9, 5}, 2));
  EXPECT_NE(rows({7, 0, 5}, 2), rows({8, 0, 5}, 2));
  EXPECT_NE(rows({7, 0, 5}, 2), rows({7, 0, 6}, 2));
  EXPECT_NE(rows({7, 0, 5}, 2), rows({7, 0, 5}, 3));
}

// All sets of two of five tokens alike: 10 of them, 4000 draws, chi-squared below its 0.999 quantile for 9 degrees.
TEST(RandomLtd, EverySetOfTokensIsAsLikely) {
  std::map<std::vector<i32>, i64> seen;
  constexpr i64 kDraws = 4000;
  for (u32 micro = 0; micro < kDraws; ++micro) ++seen[draw({3, 0, micro}, 1, 1, 5, 2).rows];
  EXPECT_EQ(seen.size(), 10u);
  double chi = 0;
  for (const auto& [rows, n] : seen) chi += std::pow(static_cast<double>(n) - kDraws / 10.0, 2) / (kDraws / 10.0);
  EXPECT_LT(chi, 27.9);
}

TEST(RandomLtd, KeepsDocumentsApart) {
  constexpr i64 B = 2, T = 9, kept = 5;
  // Documents of 4 and 5 tokens, and of 1, 6 and 2.
  const std::vector<i64> lengths[B] = {{4, 5}, {1, 6, 2}};
  std::vector<i32> documents(2 * B * T), positions(B * T);
  for (i64 b = 0; b < B; ++b) {
    i64 begin = 0;
    for (const i64 length : lengths[b]) {
      for (i64 t = begin; t < begin + length; ++t) {
        documents[static_cast<size_t>(b * T + t)] = static_cast<i32>(begin);
        documents[static_cast<size_t>((B + b) * T + t)] = static_cast<i32>(begin + length);
        positions[static_cast<size_t>(b * T + t)] = static_cast<i32>(t - begin);
      }
      begin += length;
    }
  }
  for (u32 micro = 0; micro < 50; ++micro) {
    const Drawing d = draw({3, 0, micro}, 1, B, T, kept, documents, positions);
    for (i64 n = 0; n < B * kept; ++n) {
      const i64 b = n / kept;
      const auto row_of = [&](i64 i) { return d.rows[static_cast<size_t>(b * kept + i)]; };
      const size_t row = static_cast<size_t>(row_of(n % kept));
      EXPECT_EQ(d.positions[static_cast<size_t>(n)], positions[row]);
      for (i64 i = 0; i < kept; ++i) {  // kept tokens of the same document, and no others
        const bool same = documents[static_cast<size_t>(row_of(i))] == documents[row];
        EXPECT_EQ(i >= d.documents[static_cast<size_t>(n)] && i < d.documents[static_cast<size_t>(B * kept + n)], same);
      }
    }
  }
}

TEST(RandomLtd, ADroppingLayerCountsWhatItComputes) {
  ConfigResult r = parse_config(R"({"steps": 1, "train_batch_size": 1, "data": {"train": "t", "seq_length": 8},
    "model": {"type": "gpt2", "vocab_size": 256, "n_embd": 4, "n_layer": 4, "n_head": 1, "n_positions": 8}})",
                                "c", {}, 1, ConfigUse::Train);
  ASSERT_TRUE(r.ok()) << r.message();
  Config c = r.config;
  const double whole = model::make_model(c).flops_per_token(8);
  c.random_ltd.data_efficiency = c.random_ltd.data_routing = c.random_ltd.enabled = true;
  c.random_ltd.layers = {1, 2};
  EXPECT_EQ(model::make_model(c).flops_per_token(8), whole);
  // Each of the two layers has 12 C^2 parameters and attends to T tokens: 6 N and 12 C T operations for each token.
  const double layer = 6 * 12 * 16, attention = 12 * 4 * 8;
  EXPECT_DOUBLE_EQ(whole - model::make_model(c, {}, {.sequence = 8, .kept = 2}).flops_per_token(8),
                   2 * (layer * 3 / 4 + attention * 15 / 16));
}

TEST(RandomLtd, WhatDoesNotFitIsRefused) {
  const auto message = [](std::string_view ltd, std::string_view more = "", int world = 1) {
    const std::string text = fmt::format(
        R"({{"steps": 1, "train_batch_size": {}, "data": {{"train": "t", "seq_length": 8}},
        "model": {{"type": "llama", "vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 8{}, "data_efficiency": {{"enabled": true,
        "data_routing": {{"enabled": true, "random_ltd": {{"enabled": true{}, "random_ltd_schedule":
        {{"min_value": 4, "max_value": 8, "schedule_config": {{"require_steps": 10, "seq_per_step": 2}}}}}}}}}}}})",
        world, more.empty() ? "}" : more, ltd);
    return parse_config(text, "c", {}, world, ConfigUse::Train).message();
  };
  EXPECT_EQ(message(""), "");
  EXPECT_EQ(message(R"(, "random_ltd_layer_id": [2, 0], "random_ltd_layer_num": 2, "total_layer_num": 4)"), "");
  EXPECT_THAT(message(R"(, "random_ltd_layer_id": [4])"), HasSubstr("names layer 4; the model has 4, from 0"));
  EXPECT_THAT(message(R"(, "random_ltd_layer_id": [1, 1])"), HasSubstr("names a layer twice"));
  EXPECT_THAT(message(R"(, "random_ltd_layer_id": [])"), HasSubstr("names no layer"));
  EXPECT_THAT(message(R"(, "random_ltd_layer_num": 3)"), HasSubstr("is 3, and there are 2 layers"));
  EXPECT_THAT(message(R"(, "total_layer_num": 3)"), HasSubstr("is 3, and the model has 4 layers"));
  EXPECT_THAT(message(R"(, "layer_token_lr_schedule": {"enabled": true})"), HasSubstr("not supported yet"));
  EXPECT_THAT(message("", R"(}, "sequence_parallel_size": 2)", 2), HasSubstr("share the tokens of a sequence"));
  EXPECT_THAT(message("", R"(}, "tensor_parallel": {"tp_size": 2, "sequence_parallel": true})", 2),
              HasSubstr("share the rows"));
  EXPECT_THAT(message("", R"(}, "sparse_attention": {"mode": "local", "block": 4})"), HasSubstr("whole sequences"));
}

}  // namespace random_ltd_test
}  // namespace ds
