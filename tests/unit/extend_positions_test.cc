// SPDX-License-Identifier: Apache-2.0
// A learned position embedding that is repeated: the rows of every state, in whatever ranges and slices they are read;
// the length in config.json; and the models without such an embedding.

#include "checkpoint/extend_positions.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/json.h"
#include "checkpoint/reader.h"
#include "ds/checkpoint.h"
#include "ds/log.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace extend_positions_test {

using testing::read_file;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

const std::string kEmbedding = "wpe.weight";
constexpr i64 kRows = 3, kWidth = 4;

// The elements of a tensor count from ten times its number.
void write_tensors(const std::string& path, const std::vector<TensorInfo>& tensors) {
  const auto sink = create_sink(path, FileFormat::Safetensors, tensors);
  for (const size_t i : sink->order()) {
    std::vector<float> values(static_cast<size_t>(tensors[i].numel()));
    std::iota(values.begin(), values.end(), 10.0f * static_cast<float>(i));
    std::vector<char> stored(values.size() * dtype_bytes(tensors[i].dtype));
    convert_elements(tensors[i].dtype, stored.data(), DType::F32, values.data(), std::ssize(values));
    sink->write(tensors[i].name, 0, std::ssize(values), stored.data());
  }
  sink->finish();
}

// The tensors of GPT-2 that are looked at, in bf16 with masters and moments, and the masks of old files.
std::vector<TensorInfo> tensors_of_gpt2() {
  std::vector<TensorInfo> tensors = {{kEmbedding, DType::BF16, {kRows, kWidth}},
                                     {"h.0.attn.c_attn.bias", DType::BF16, {5}},
                                     {"h.0.attn.bias", DType::F32, {1, 1, kRows, kRows}},
                                     {"h.0.attn.masked_bias", DType::F32, {}}};
  for (const char* state : {"master", "exp_avg", "exp_avg_sq"}) {
    for (size_t i = 0; i < 4; ++i)
      tensors.push_back({fmt::format("optimizer.{}.{}", state, tensors[i].name), DType::F32, tensors[i].shape});
  }
  return tensors;
}

std::vector<float> values_of(StateSource& state, State s, i64 param, i64 first, i64 count,
                             const model::ParamSlice& slice = {}) {
  std::vector<float> values(static_cast<size_t>(count));
  state.read(s, DType::F32, param, slice, first, count, values.data());
  return values;
}

i64 number_of(const StateSource& state, const std::string& name) {
  return std::ranges::find(state.params(), name, &ParamEntry::name) - state.params().begin();
}

TEST(ExtendPositions, RepeatsTheRowsOfEveryState) {
  const TempDirectory dir;
  write_tensors(dir / "model.safetensors", tensors_of_gpt2());
  write_file(dir / "config.json", R"({"model_type": "gpt2", "n_positions": 3, "n_ctx": 3, "n_embd": 4})");
  std::string said;
  set_log_sink([&](LogLevel, std::string_view line) { said += line; });
  const std::unique_ptr<StateSource> state = extend_positions(open_state(dir.path()), 8, "");
  set_log_sink({});
  EXPECT_NE(said.find("left out, because they are computed from the old length:\n  h.0.attn.bias"), std::string::npos)
      << said;
  EXPECT_EQ(state->meta().model_config_json, R"({"model_type":"gpt2","n_positions":8,"n_ctx":8,"n_embd":4})");
  ASSERT_EQ(state->params().size(), 3u);
  const i64 embedding = number_of(*state, kEmbedding);
  EXPECT_EQ(state->params()[embedding].shape, (std::vector<i64>{8, kWidth}));
  EXPECT_EQ(number_of(*state, "h.0.attn.bias"), 3);
  const std::vector<State> states = {State::Master, State::ExpAvg, State::ExpAvgSq};
  for (size_t s = 0; s < states.size(); ++s) {
    for (i64 first = 0; first < 8 * kWidth; ++first) {
      for (const i64 count : {i64{0}, i64{1}, i64{5}, 8 * kWidth - first}) {
        if (first + count > 8 * kWidth) continue;
        const std::vector<float> got = values_of(*state, states[s], embedding, first, count);
        for (i64 i = 0; i < count; ++i) {
          const auto row = static_cast<float>((first + i) / kWidth % kRows);
          const auto column = static_cast<float>((first + i) % kWidth);
          ASSERT_EQ(got[i], 10.0f * static_cast<float>(4 * (s + 1)) + row * kWidth + column) << first << " + " << i;
        }
      }
    }
  }
  // Elements after the part left out are read at their own index.
  EXPECT_EQ(values_of(*state, State::Master, number_of(*state, "h.0.attn.masked_bias"), 0, 1), std::vector<float>{70});
  EXPECT_EQ(values_of(*state, State::Master, number_of(*state, "h.0.attn.c_attn.bias"), 1, 2),
            (std::vector<float>{51, 52}));
}

TEST(ExtendPositions, SlicesOfTheRows) {
  const TempDirectory dir;
  write_tensors(dir / "model.safetensors", tensors_of_gpt2());
  write_file(dir / "config.json", R"({"model_type": "gpt2", "n_positions": 3})");
  const std::unique_ptr<StateSource> state = extend_positions(open_state(dir.path()), 7, "");
  const i64 embedding = number_of(*state, kEmbedding), bias = number_of(*state, "h.0.attn.c_attn.bias");
  const std::vector<float> columns = values_of(*state, State::ExpAvg, embedding, 1, 12, {1, {{0, 1}, {3, 4}}});
  EXPECT_EQ(columns, (std::vector<float>{83, 84, 87, 88, 91, 80, 83, 84, 87, 88, 91, 80}));
  const std::vector<float> rows = values_of(*state, State::ExpAvg, embedding, 2, 8, {0, {{2, 4}, {6, 7}}});
  EXPECT_EQ(rows, (std::vector<float>{90, 91, 80, 81, 82, 83, 80, 81}));
  EXPECT_EQ(values_of(*state, State::ExpAvg, bias, 0, 2, {0, {{1, 2}, {4, 5}}}), (std::vector<float>{91, 94}));
}

TEST(ExtendPositions, OfPublishedModelsOnlyThatChanges) {
  struct Case {
    std::string model, name, key;
    i64 rows, width, positions;
  };
  for (const Case& c :
       {Case{"gpt2", "transformer.wpe.weight", "n_positions", 40, 36, 101},
        {"gpt2", "transformer.wpe.weight", "n_positions", 40, 36, 40},
        {"bert", "bert.embeddings.position_embeddings.weight", "max_position_embeddings", 24, 48, 96}}) {
    for (const MeshShape& mesh : {MeshShape{}, MeshShape{.dp = 3}, MeshShape{.dp = 2, .pp = 2}}) {
      SCOPED_TRACE(fmt::format("{} {} dp {} pp {}", c.model, c.positions, mesh.dp, mesh.pp));
      const TempDirectory dir;
      const std::string source = test_data(c.model);
      shard_checkpoint(source, dir / "run", {.mesh = mesh, .stage = 3, .positions = c.positions});
      merge_checkpoint(dir / "run", dir / "model", {.format = "hf", .verify = true});
      // A merge does the same at once.
      merge_checkpoint(source, dir / "merged", {.format = "hf", .verify = true, .positions = c.positions});
      for (const char* file : {"model.safetensors", "config.json"})
        EXPECT_EQ(read_file(dir / "model/" + file), read_file(dir / "merged/" + file)) << file;

      Json want = Json::parse(read_file(source + "/config.json")),
           got = Json::parse(read_file(dir / "model/config.json"));
      EXPECT_EQ(got[c.key], c.positions);
      for (Json* config : {&want, &got}) {
        for (const char* of_the_writer : {"dtype", "torch_dtype"}) config->erase(of_the_writer);
      }
      want[c.key] = c.positions;
      EXPECT_EQ(got.dump(), want.dump());

      const auto before = open_source(source), after = open_source(dir / "model");
      ASSERT_EQ(before->list().size(), after->list().size());
      for (const TensorInfo& t : before->list()) {
        const TensorInfo& now = after->at(t.name);
        std::vector<float> a(static_cast<size_t>(t.numel())), b(static_cast<size_t>(now.numel()));
        before->read(t.name, 0, t.numel(), a.data());
        after->read(t.name, 0, now.numel(), b.data());
        if (t.name != c.name) {
          EXPECT_EQ(now, t);
        } else {
          ASSERT_EQ(now.shape, (std::vector<i64>{c.positions, c.width}));
          ASSERT_EQ(t.shape, (std::vector<i64>{c.rows, c.width}));
          for (size_t i = a.size(); i < b.size(); ++i) a.push_back(a[i - static_cast<size_t>(t.numel())]);
        }
        EXPECT_EQ(a, b) << t.name;
      }
    }
  }
}

// Once more than there is to be repeated, and to no more than there are: tensors that were left out before come along.
TEST(ExtendPositions, AgainAndToTheSameLength) {
  const TempDirectory dir;
  write_tensors(dir / "model.safetensors", tensors_of_gpt2());
  write_file(dir / "config.json", R"({"model_type": "gpt2"})");
  EXPECT_EQ(extend_positions(open_state(dir.path()), kRows, "")->params(), open_state(dir.path())->params());
  shard_checkpoint(dir.path(), dir / "four", {.positions = 4});
  const std::unique_ptr<StateSource> state = extend_positions(open_state(dir / "four"), 9, "");
  EXPECT_EQ(state->meta().model_config_json, R"({"model_type":"gpt2","n_positions":9})");
  const std::vector<float> got = values_of(*state, State::Master, number_of(*state, kEmbedding), 0, 9 * kWidth);
  for (i64 i = 0; i < std::ssize(got); ++i)
    EXPECT_EQ(got[i], static_cast<float>(40 + i / kWidth % 4 % kRows * kWidth + i % kWidth));
}

// The manifest's configuration of the run, by which ds-memreport knows the model, contains the length too.
TEST(ExtendPositions, TheConfigurationOfTheRunSaysIt) {
  const TempDirectory dir;
  write_tensors(dir / "x.safetensors", {{kEmbedding, DType::F32, {kRows, kWidth}}});
  write_file(dir / "config.json", R"({"model_type": "gpt2", "n_positions": 3})");
  shard_checkpoint(dir / "x.safetensors", dir / "run", {.positions = 3});
  const std::string manifest = dir / "run/step-00000000/manifest.json";
  for (const auto& [run, want] :
       {std::pair{R"({"model": {"type": "gpt2", "n_positions": 3}})", R"({"model":{"type":"gpt2","n_positions":5}})"},
        std::pair{R"({"model": {"path": "a"}})", R"({"model":{"path":"a"}})"}}) {
    Manifest m = parse_manifest(read_file(manifest), "manifest.json");
    m.meta.config_json = run;
    m.meta.history = "a@1";
    write_file(manifest, format_manifest(m));
    const CheckpointMeta meta = extend_positions(open_state(dir / "run"), 5, "")->meta();
    EXPECT_EQ(Json::parse(meta.config_json).dump(), want);
    EXPECT_EQ(meta.history, "");
  }
}

TEST(ExtendPositions, WhatCannotBeExtendedIsSaid) {
  const TempDirectory dir;
  write_tensors(dir / "x.safetensors", {{kEmbedding, DType::F32, {kRows, kWidth}}});
  const auto extend = [&](const std::string& config, i64 positions = 5) {
    write_file(dir / "config.json", config);
    shard_checkpoint(dir / "x.safetensors", dir / "out", {.positions = positions});
  };
  const std::string gpt2 = R"({"model_type": "gpt2", "n_positions": 3})";
  EXPECT_ERROR(extend(gpt2, 2), Errc::Config, "--positions 2 is fewer than the 3 that the model has");
  EXPECT_ERROR(extend(gpt2, -1), Errc::Config, "--positions -1 is fewer than the 3");
  EXPECT_ERROR(extend(gpt2, kMostPositions + 1), Errc::Config, "--positions 16777217: a model has at most 16777216");
  EXPECT_ERROR(extend(R"({"model_type": "gpt2", "n_positions": 4})"), Errc::Mismatch,
               "wpe.weight has 3 rows, but n_positions of config.json is 4");
  EXPECT_ERROR(extend(R"({"model_type": "gpt2", "max_position_embeddings": "3"})"), Errc::Mismatch,
               "max_position_embeddings of config.json is \"3\"");
  for (const char* family : {"llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe",
                             "deepseek_v2", "deepseek_v3"}) {
    EXPECT_ERROR(extend(fmt::format(R"({{"model_type": "{}"}})", family)), Errc::Config,
                 fmt::format("a model of type \"{}\" has none", family));
  }
  EXPECT_ERROR(extend(R"({"model_type": "roberta"})"), Errc::Unavailable, "not of \"roberta\"");
  EXPECT_ERROR(extend(R"({"model_type": "bert"})"), Errc::Mismatch,
               "bert.embeddings.position_embeddings.weight is missing");
  write_file(dir / "named.json", "{}");
  EXPECT_ERROR(shard_checkpoint(dir / "x.safetensors", dir / "out", {.config = dir / "named.json", .positions = 9}),
               Errc::Config, "needs model_type in config.json");
  EXPECT_ERROR(merge_checkpoint(dir / "x.safetensors", dir / "y.safetensors", {.positions = 9}), Errc::Config,
               "format safetensors takes no positions");

  write_tensors(dir / "x.safetensors", {{"embeddings.position_embeddings.weight", DType::F32, {kRows, kWidth}}});
  EXPECT_ERROR(extend(R"({"model_type": "bert", "position_embedding_type": "relative_key"})"), Errc::Unavailable,
               "positions of type \"relative_key\"");
  write_tensors(dir / "x.safetensors", {{kEmbedding, DType::F32, {kRows}}});
  EXPECT_ERROR(extend(gpt2), Errc::Mismatch, "wpe.weight is not a matrix of a row for each position");
  EXPECT_FALSE(std::filesystem::exists(dir / "out") || std::filesystem::exists(dir / "y.safetensors"));
}

}  // namespace extend_positions_test
}  // namespace ds
