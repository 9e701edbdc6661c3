// SPDX-License-Identifier: Apache-2.0
// Experts in files: one by one under the names of every family or as batches, read and written, with optimizer states
// too; and files that lack one.

#include "checkpoint/expert_names.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "checkpoint/match_weights.h"
#include "checkpoint/state_source.h"
#include "checkpoint/tensor_state.h"
#include "ds/checkpoint.h"
#include "ds/model_config.h"
#include "model/models.h"
#include "temp_directory.h"

namespace ds {
namespace expert_names_test {

using testing::TempDirectory;
using testing::write_file;
using Values = std::vector<float>;
using Tensors = std::map<std::string, std::pair<std::vector<i64>, Values>>;

struct Case {
  const char* family;
  const char* more;  // of its config.json
  const char *block, *gate, *up, *down;
};
constexpr Case kCases[] = {
    {"mixtral", R"("num_local_experts": 3)", "block_sparse_moe", "w1", "w3", "w2"},
    {"olmoe", R"("num_experts": 3)", "mlp", "gate_proj", "up_proj", "down_proj"},
    {"qwen2_moe", R"("num_experts": 3, "moe_intermediate_size": 2, "mlp_only_layers": [0],
                     "shared_expert_intermediate_size": 6)",
     "mlp", "gate_proj", "up_proj", "down_proj"},
    {"qwen3_moe", R"("num_experts": 3, "moe_intermediate_size": 2, "decoder_sparse_step": 2, "head_dim": 4)", "mlp",
     "gate_proj", "up_proj", "down_proj"},
    {"glm4_moe", R"("n_routed_experts": 3, "moe_intermediate_size": 2, "first_k_dense_replace": 1, "head_dim": 4)",
     "mlp", "gate_proj", "up_proj", "down_proj"},
    {"deepseek_v2", R"("n_routed_experts": 3, "moe_intermediate_size": 2, "first_k_dense_replace": 1, "kv_lora_rank": 3,
                       "q_lora_rank": null, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 1)",
     "mlp", "gate_proj", "up_proj", "down_proj"},
    {"deepseek_v3", R"("n_routed_experts": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 2,
                       "first_k_dense_replace": 1, "kv_lora_rank": 3, "q_lora_rank": null, "qk_nope_head_dim": 2,
                       "qk_rope_head_dim": 2, "v_head_dim": 1)",
     "mlp", "gate_proj", "up_proj", "down_proj"}};

void PrintTo(const Case& c, std::ostream* out) { *out << c.family; }

std::string config_of(const Case& c) {
  const std::string class_name = c.family == std::string("mixtral")       ? "Mixtral"
                                 : c.family == std::string("olmoe")       ? "Olmoe"
                                 : c.family == std::string("qwen2_moe")   ? "Qwen2Moe"
                                 : c.family == std::string("glm4_moe")    ? "Glm4Moe"
                                 : c.family == std::string("qwen3_moe")   ? "Qwen3Moe"
                                 : c.family == std::string("deepseek_v2") ? "DeepseekV2"
                                                                          : "DeepseekV3";
  return fmt::format(R"({{"model_type": "{}", "architectures": ["{}ForCausalLM"], "vocab_size": 11, "hidden_size": 4,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 6,
    "max_position_embeddings": 8, "num_experts_per_tok": 2, {}}})",
                     c.family, class_name, c.more);
}

class Experts : public ::testing::TestWithParam<Case> {
 protected:
  Experts() {
    write_file(dir / "config.json", config_of(GetParam()));
    config = load_model_config(dir / "config.json");
    model = model::make_model(config, 8);
    float next = 0;
    for (const model::ParamRow* row : model.params()) {
      Values values(static_cast<size_t>(row->numel()));
      for (float& x : values) x = next += 0.25f;
      batches[row->name] = {row->shape, values};
    }
  }

  // As published.
  Tensors one_by_one(const Tensors& tensors) const {
    const Case& c = GetParam();
    Tensors result;
    for (const auto& [name, tensor] : tensors) {
      const auto& [shape, values] = tensor;
      const size_t mlp = name.find("mlp.");
      const std::string block = mlp == name.npos ? "" : name.substr(0, mlp) + c.block;
      const bool is_down = name.ends_with("mlp.experts.down_proj");
      if (name.ends_with("mlp.gate.weight")) result[block + ".gate.weight"] = tensor;
      if (!is_down && !name.ends_with("mlp.experts.gate_up_proj")) {
        if (!name.ends_with("mlp.gate.weight")) result[name] = tensor;
        continue;
      }
      const i64 rows = is_down ? shape[1] : shape[1] / 2, columns = shape[2];
      auto at = values.begin();
      for (i64 e = 0; e < shape[0]; ++e) {
        for (const char* matrix : is_down ? std::vector{c.down} : std::vector{c.gate, c.up}) {
          result[fmt::format("{}.experts.{}.{}.weight", block, e, matrix)] = {{rows, columns},
                                                                              {at, at + rows * columns}};
          at += rows * columns;
        }
      }
    }
    return result;
  }

  std::string write(const std::string& name, const Tensors& tensors, DType dtype = DType::F32) const {
    std::vector<TensorInfo> list;
    for (const auto& [tensor, value] : tensors) list.push_back({tensor, dtype, value.first});
    const auto sink = create_sink(dir / name, FileFormat::Safetensors, list);
    for (const size_t i : sink->order()) {
      const Values& values = tensors.at(list[i].name).second;
      std::vector<char> raw(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
      convert_elements(dtype, raw.data(), DType::F32, values.data(), std::ssize(values));
      sink->write(list[i].name, 0, std::ssize(values), raw.data());
    }
    sink->finish();
    return dir / name;
  }

  static Tensors read(const TensorSource& source) {
    Tensors result;
    for (const TensorInfo& t : source.list()) {
      Values values(static_cast<size_t>(t.numel()));
      EXPECT_EQ(t.dtype, DType::F32) << t.name;
      source.read(t.name, 0, t.numel(), values.data());
      result[t.name] = {t.shape, values};
    }
    return result;
  }
  static Tensors read(const std::string& path) { return read(*open_source(path)); }

  std::unique_ptr<TensorSource> join(const std::string& path) const { return join_experts(model, open_source(path)); }
  // The published name of a matrix in the last block.
  std::string matrix(i64 expert, const char* name) const {
    return fmt::format("model.layers.1.{}.experts.{}.{}.weight", GetParam().block, expert, name);
  }

  TempDirectory dir;
  ModelConfig config;
  model::Model model;
  Tensors batches;  // as the model has them
};

// States of models that other programs have converted have such matrices.
TEST(Experts, SingleOnesGetTheNamesOfTheirFamily) {
  const auto names = [](const char* block, const char* gate, const char* up, const char* down) {
    std::vector<std::string> all;
    const std::vector<TensorInfo> tensors = {
        {.name = "model.layers.2.mlp.experts.11.gate_proj.weight", .dtype = DType::F32, .shape = {6, 4}},
        {.name = "model.layers.2.mlp.experts.11.up_proj.weight", .dtype = DType::F32, .shape = {6, 4}},
        {.name = "model.layers.2.mlp.experts.11.down_proj.weight", .dtype = DType::F32, .shape = {4, 6}},
        {.name = "model.layers.2.mlp.gate.weight", .dtype = DType::F32, .shape = {12, 4}},
        {.name = "model.layers.2.mlp.experts.x.up_proj.weight", .dtype = DType::F32, .shape = {6, 4}}};
    for (const Rearranged& r : part_experts({.block = block, .gate = gate, .up = up, .down = down}, tensors))
      all.push_back(r.name);
    return all;
  };
  const std::string layer = "model.layers.2.", foreign = layer + "mlp.experts.x.up_proj.weight";
  EXPECT_THAT(names("block_sparse_moe", "w1", "w3", "w2"),
              ::testing::ElementsAre(
                  layer + "block_sparse_moe.experts.11.w1.weight", layer + "block_sparse_moe.experts.11.w3.weight",
                  layer + "block_sparse_moe.experts.11.w2.weight", layer + "block_sparse_moe.gate.weight", foreign));
  EXPECT_THAT(names("mlp", "gate_proj", "up_proj", "down_proj"),
              ::testing::ElementsAre(layer + "mlp.experts.11.gate_proj.weight", layer + "mlp.experts.11.up_proj.weight",
                                     layer + "mlp.experts.11.down_proj.weight", layer + "mlp.gate.weight", foreign));
}

TEST_P(Experts, AreReadOneByOneAndAsBatches) {
  const Tensors published = one_by_one(batches);
  EXPECT_GT(published.size(), batches.size());
  const auto joined = join(write("w.safetensors", published));
  EXPECT_EQ(read(*joined), batches);
  EXPECT_TRUE(match_weights(model, *joined).misfits(true).empty());
  EXPECT_EQ(read(*join(write("b.safetensors", batches))), batches);
}

TEST_P(Experts, AnyRangeOfABatchIsReadFromItsMatrices) {
  const auto joined = join(write("w.safetensors", one_by_one(batches)));
  for (const char* end : {"gate_up_proj", "down_proj"}) {
    const std::string name = fmt::format("model.layers.1.mlp.experts.{}", end);
    const Values& whole = batches.at(name).second;
    const i64 n = std::ssize(whole);
    for (i64 first = 0; first < n; ++first) {
      for (i64 count = 1; first + count <= n; ++count) {
        Values part(static_cast<size_t>(count));
        joined->read(name, first, count, part.data());
        ASSERT_EQ(part, Values(whole.begin() + first, whole.begin() + first + count)) << first << " " << count;
      }
    }
  }
}

TEST_P(Experts, AreFoundBehindPrefixesAndWithoutTheFirstPartOfTheirNames) {
  for (const bool published : {true, false}) {
    Tensors bare, wrapped;
    for (const auto& [name, t] : published ? one_by_one(batches) : batches) {
      bare[name.starts_with("model.") ? name.substr(6) : name] = t;
      wrapped["_orig_mod.module." + name] = t;
    }
    for (const Tensors& tensors : {bare, wrapped}) {
      const auto joined = join(write("w.safetensors", tensors));
      const WeightMatch match = match_weights(model, *joined);
      EXPECT_EQ(match.misfits(true), "");
      for (const TensorInfo* t : match.tensors) EXPECT_NE(t, nullptr);
    }
  }
}

TEST_P(Experts, ThatAreMissingOrDifferAreNamed) {
  const Case& c = GetParam();
  const Tensors good = one_by_one(batches);
  Tensors bad = good;
  bad.erase(matrix(2, c.up));
  EXPECT_ERROR(join(write("w.safetensors", bad)), Errc::Mismatch,
               fmt::format("w.safetensors does not fit the model:\n  {} is missing", matrix(2, c.up)));
  bad.erase(matrix(0, c.down));
  EXPECT_ERROR(join(write("w.safetensors", bad)), Errc::Mismatch,
               fmt::format("\n  {} is missing\n  {} is missing", matrix(0, c.down), matrix(2, c.up)));
  bad = good;
  auto& [shape, values] = bad[matrix(1, c.down)];
  std::swap(shape[0], shape[1]);
  EXPECT_ERROR(join(write("w.safetensors", bad)), Errc::Mismatch,
               fmt::format("{} has shape [{},4], the model needs [4,{}]", matrix(1, c.down),
                           config.experts.intermediate, config.experts.intermediate));
  // One too many is none of the model's parameters.
  bad = good;
  bad[matrix(3, c.gate)] = good.at(matrix(2, c.gate));
  EXPECT_EQ(match_weights(model, *join(write("w.safetensors", bad))).misfits(true),
            matrix(3, c.gate) + " is not a parameter of the model");
  // A whole block is missing under the model's own names.
  bad.clear();
  for (const auto& [name, t] : good)
    if (name.find("layers.1.") == name.npos || name.find(".experts.") == name.npos) bad[name] = t;
  EXPECT_THAT(match_weights(model, *join(write("w.safetensors", bad))).misfits(true),
              ::testing::HasSubstr("model.layers.1.mlp.experts.gate_up_proj is missing"));
}

TEST_P(Experts, OfABlockHaveOneTypeThatIsRead) {
  const Case& c = GetParam();
  std::vector<TensorInfo> list;
  for (const auto& [name, t] : one_by_one(batches)) list.push_back({name, DType::F32, t.first});
  const auto at = std::ranges::find(list, matrix(1, c.gate), &TensorInfo::name);
  at->dtype = DType::BF16;
  EXPECT_ERROR(join_experts(model, list, {}, "file"), Errc::Mismatch, matrix(1, c.gate) + " is bf16, but ");
  at->dtype = DType::F8E4M3;
  EXPECT_ERROR(join_experts(model, list, {}, "file"), Errc::Mismatch,
               fmt::format("{0} is fp8_e4m3, and its scales, '{0}_scale_inv', are missing", matrix(1, c.gate)));
  list.erase(at);
  const std::vector<ForeignTensor> foreign = {{matrix(1, c.gate), "F8_E8M0"}};
  EXPECT_ERROR(join_experts(model, list, foreign, "file"), Errc::Unavailable,
               fmt::format("file: tensor '{}' has elements of type F8_E8M0", matrix(1, c.gate)));
}

TEST_P(Experts, BothFormsAtOnceAreNotChosenFrom) {
  Tensors both = batches;
  const std::string first = matrix(0, GetParam().gate);
  both[first] = one_by_one(batches).at(first);
  EXPECT_EQ(match_weights(model, *join(write("w.safetensors", both))).misfits(true),
            first + " is not a parameter of the model");
  std::filesystem::create_directory(dir / "both");
  std::filesystem::copy(dir / "config.json", dir / "both");
  write("both/model.safetensors", both);
  EXPECT_ERROR(merge_checkpoint(dir / "both", dir / "x.safetensors", {}), Errc::Mismatch,
               fmt::format("contains '{}' twice", first));
}

// A program's dense model, or one of the zoo, takes its tensors as they are.
TEST_P(Experts, OfNoModelAreLeftAlone) {
  const Tensors published = one_by_one(batches);
  write_file(dir / "dense.json", R"({"model_type": "llama", "vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 4})");
  const model::Model dense = model::make_model(load_model_config(dir / "dense.json"), 8);
  EXPECT_EQ(read(*join_experts(dense, open_source(write("w.safetensors", published)))), published);
}

// From a directory into steps of any layout and back, in either form.
TEST_P(Experts, GoThroughStepsAndBack) {
  const Tensors published = one_by_one(batches);
  for (const Tensors& source : {published, batches}) {
    const std::string model_dir = dir / (source == published ? "published" : "fused");
    std::filesystem::create_directory(model_dir);
    std::filesystem::copy(dir / "config.json", model_dir);
    write(std::filesystem::path(model_dir).filename().string() + "/model.safetensors", source);
    std::vector<MeshShape> meshes = {{.dp = 1}, {.dp = 3}, {.dp = 2, .pp = 2}};
    for (const MeshShape& mesh : meshes) {
      const std::string run = dir / "run", out = dir / "out";
      const ShardResult sharded = shard_checkpoint(model_dir, run, {.mesh = mesh, .stage = 3});
      EXPECT_EQ(sharded.num_tensors, std::ssize(batches));
      // A step has the model's own parameters.
      const CheckpointSummary step = describe_checkpoint(run, "");
      for (const auto& p : step.params) EXPECT_TRUE(batches.contains(p.name)) << p.name;
      const MergeResult merged = merge_checkpoint(run, out, {.format = "hf", .verify = true});
      EXPECT_EQ(merged.num_tensors, std::ssize(published));
      EXPECT_EQ(merged.num_parameters, sharded.num_parameters);
      EXPECT_EQ(read(out), published);
      for (const char* file : {"x.safetensors", "x.h5"}) {
        merge_checkpoint(run, dir / file, {.verify = true});
        EXPECT_EQ(read(dir / file), published) << file;
      }
      std::filesystem::remove_all(run);
      std::filesystem::remove_all(out);
    }
    merge_checkpoint(model_dir, dir / "out", {.format = "hf", .verify = true});
    EXPECT_EQ(read(dir / "out"), published);
    std::filesystem::remove_all(dir / "out");
    merge_checkpoint(model_dir, dir / "step", {.format = "checkpoint", .verify = true});
    EXPECT_EQ(read(*make_state_tensors(*open_state(dir / "step"), {})), batches);
    std::filesystem::remove_all(dir / "step");
  }
}

// Slices of tensor-parallel ranks, which have some of the experts each.
TEST_P(Experts, AreCutForRanks) {
  if (config.whole_qk_norm) return;  // such a model takes no tensor parallelism
  ModelConfig four = config;
  four.experts.count = 4;
  const model::Model whole = model::make_model(four, 8);
  batches.clear();
  float next = 0;
  for (const model::ParamRow* row : whole.params()) {
    Values values(static_cast<size_t>(row->numel()));
    for (float& x : values) x = next += 0.25f;
    batches[row->name] = {row->shape, values};
  }
  std::filesystem::create_directory(dir / "four");
  write_file(dir / "four/config.json", model_config_json(four));
  const Tensors published = one_by_one(batches);
  write("four/model.safetensors", published);
  shard_checkpoint(dir / "four", dir / "run", {.mesh = {.dp = 2, .tp = 2}, .stage = 1});
  const CheckpointSummary step = describe_checkpoint(dir / "run", "");
  const auto batch = std::ranges::find(step.params, "model.layers.1.mlp.experts.down_proj",
                                       [](const auto& p) -> std::string_view { return p.name; });
  ASSERT_NE(batch, step.params.end());
  EXPECT_EQ(batch->owners.front().slice_ranges, (std::vector<std::pair<i64, i64>>{{0, 2}}));
  merge_checkpoint(dir / "run", dir / "out", {.format = "hf", .verify = true});
  EXPECT_EQ(read(dir / "out"), published);
}

// Masters and moments have the names of their weights.
TEST_P(Experts, TakeTheirOptimizerStatesAlong) {
  Tensors states = batches;
  for (const auto& [name, t] : batches) {
    for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
      auto& [shape, values] = states[state_tensor_name(s, name)] = t;
      for (float& x : values) x = x * 2 + static_cast<float>(s);
    }
  }
  std::filesystem::create_directory(dir / "all");
  std::filesystem::copy(dir / "config.json", dir / "all");
  write("all/model.safetensors", states);
  shard_checkpoint(dir / "all", dir / "run", {.mesh = {.dp = 3}, .stage = 2});
  merge_checkpoint(dir / "run", dir / "parts.safetensors", {.optimizer = true, .verify = true});
  const Tensors parts = read(dir / "parts.safetensors");
  Tensors weights, moments;
  const std::string prefix = state_tensor_name(State::ExpAvg, "");
  for (const auto& [name, t] : parts) {
    if (!name.starts_with("optimizer.")) weights[name] = t;
    if (name.starts_with(prefix)) moments[name.substr(prefix.size())] = t;
  }
  EXPECT_EQ(weights, one_by_one(batches));
  Tensors wanted;
  for (const auto& [name, t] : batches) wanted[name] = states.at(state_tensor_name(State::ExpAvg, name));
  EXPECT_EQ(moments, one_by_one(wanted));
  // The file knows its model, so a step of it has batches again.
  shard_checkpoint(dir / "parts.safetensors", dir / "again", {.mesh = {.dp = 2}});
  merge_checkpoint(dir / "again", dir / "again.safetensors", {.optimizer = true, .verify = true});
  EXPECT_EQ(read(dir / "again.safetensors"), parts);
  EXPECT_EQ(read(*make_state_tensors(*open_state(dir / "again"), {.optimizer = true})), states);
}

TEST_P(Experts, AreSelectedByTheirPublishedNames) {
  write("model.safetensors", batches);
  merge_checkpoint(dir.path(), dir / "some.h5", {.only = {"*.layers.1.*.experts.2.*"}});
  const Tensors some = read(dir / "some.h5");
  EXPECT_EQ(some.size(), 3u);
  EXPECT_TRUE(some.contains(matrix(2, GetParam().up)));
}

INSTANTIATE_TEST_SUITE_P(Families, Experts, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.family); });

}  // namespace expert_names_test
}  // namespace ds
