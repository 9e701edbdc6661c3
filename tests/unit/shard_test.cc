// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shard.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cpu_time.h"
#include "formats/tensor_io.h"
#include "model/models.h"
#include "temp_directory.h"

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
  for (const Family family : {Family::Gpt2, Family::Llama, Family::Qwen2, Family::Qwen3, Family::Qwen2Moe}) {
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
    if (family == Family::Qwen2Moe) {
      config.experts = {.count = 4, .per_token = 2, .intermediate = 6, .shared = 10, .shared_gate = true};
      config.experts.layers.assign(12, true);
      config.experts.layers[3] = false;
    }
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

// Each name was looked for among all.
TEST(ShardUnits, OfAMillionMatricesTakeTimeByTheirNumber) {
  std::vector<ParamEntry> params;
  for (int i = 0; i < 200'000; ++i) params.push_back({fmt::format("t.{}", i), {1, 1}, "", {}});
  params.push_back({"tied", {1, 1}, "t.7", {}});
  size_t units = 0;
  const double seconds = testing::cpu_seconds_of([&] { units = units_of(params).size(); });
  EXPECT_EQ(units, 200'000u);
  EXPECT_LT(seconds, 10);
}

// Laying out a file of very many tensors takes a while: progress is reported, and the callback may end it.
TEST(ShardProgress, ComesWhileFilesAreLaidOut) {
  const testing::TempDirectory dir;
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 200; ++i) tensors.push_back({fmt::format("t.{}", i), DType::F32, {1, 1}});
  {
    const auto sink = create_sink(dir / "x.safetensors", FileFormat::Safetensors, tensors);
    const float zero = 0;
    for (const size_t i : sink->order()) sink->write(tensors[i].name, 0, 1, &zero);
    sink->finish();
  }
  i64 before = 0, behind = 0;
  const CopyProgress count = [&](i64 done, i64 total) {
    EXPECT_EQ(total, 800);
    ++(done == 0 ? before : behind);
  };
  (void)shard_checkpoint(dir / "x.safetensors", dir / "run", {.progress = count});
  EXPECT_EQ(before, 200);
  EXPECT_GE(behind, 3 * 200);  // elements, the file that is read back, views
  before = behind = 0;
  (void)merge_checkpoint(dir / "x.safetensors", dir / "x.h5", {.progress = count});
  EXPECT_EQ(before, 200);
  EXPECT_EQ(behind, 200);
  struct Stop {};
  const CopyProgress stop = [](i64, i64) { throw Stop(); };
  EXPECT_THROW((void)merge_checkpoint(dir / "x.safetensors", dir / "y.h5", {.progress = stop}), Stop);
  EXPECT_THROW((void)shard_checkpoint(dir / "x.safetensors", dir / "other", {.progress = stop}), Stop);
  EXPECT_FALSE(std::filesystem::exists(dir / "y.h5") || std::filesystem::exists(dir / "other"));
}

TEST(ShardUnits, NamesOfAnyKind) {
  EXPECT_EQ(names_of(units_of({})), (std::vector<std::vector<std::string>>{}));
  EXPECT_EQ(names_of(units_of({{"a", {1}, "", {}}, {"0", {1}, "", {}}, {"0.x", {1}, "", {}}, {"b/1/x", {1}, "", {}}})),
            (std::vector<std::vector<std::string>>{{"a"}, {"0", "0.x"}, {"b/1/x"}}));
}

}  // namespace shard_test
}  // namespace ds
