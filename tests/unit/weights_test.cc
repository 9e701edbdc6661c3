// SPDX-License-Identifier: Apache-2.0
// Initial weights: valid names, types and directories, and the errors for others.

#include "run/weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "base/json.h"
#include "checkpoint/state_source.h"
#include "comm/make_communicator.h"
#include "config/trainer_output.h"
#include "ds/checkpoint.h"
#include "ds/log.h"
#include "temp_directory.h"

namespace ds::run {
namespace weights_test {

using testing::TempDirectory;
using testing::write_file;

struct Tensor {
  std::string type = "F32", data{};
  std::vector<i64> shape{};
  bool operator==(const Tensor&) const = default;
};
using Tensors = std::map<std::string, Tensor>;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string s(values.size() * sizeof(T), '\0');
  std::memcpy(s.data(), values.data(), s.size());
  return s;
}

void write_safetensors(const std::string& path, const Tensors& tensors) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, t] : tensors) {
    header[name] = {
        {"dtype", t.type}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.data.size()}}};
    data += t.data;
  }
  const std::string json = header.dump();
  const u64 length = json.size();
  write_file(path, bytes_of(std::vector<u64>{length}) + json + data);
}

class Weights : public ::testing::TestWithParam<Family> {
 protected:
  Weights() : mesh(make_self_communicator({})), engine(config(), mesh, ledger, *device) {
    float next = 0.5f;
    for (const auto& unit : engine.plan().rows) {
      for (const model::ParamRow& row : unit) {
        std::vector<float> values(static_cast<size_t>(row.numel()));
        for (float& x : values) x = next += 0.25f;
        names.push_back(row.name);
        tensors[row.name] = {.data = bytes_of(values), .shape = row.shape};
      }
    }
  }
  static Config config() {
    Config c;
    ModelConfig& m = c.model;
    m.family = GetParam();
    m.vocab_size = 8;
    m.hidden = m.max_positions = 4;
    m.layers = 1;
    m.heads = m.kv_heads = m.head_dim = 2;
    m.intermediate = 6;
    m.token_types = 2;
    if (m.family == Family::Qwen2Moe)
      m.experts = {.count = 4, .per_token = 2, .intermediate = 2, .shared = 6, .shared_gate = true, .layers = {true}};
    c.batch = {.train = 1, .micro = 1, .accumulation = 1};
    c.data.seq_length = 4;
    return c;
  }
  void load(const Tensors& file) {
    write_safetensors(dir / "w.safetensors", file);
    load_weights(engine, dir / "w.safetensors");
  }
  std::vector<float> values(i64 param) {
    for (const zero::Piece& piece : engine.plan().dp().layout.held_pieces(0)) {
      const float* at = static_cast<const float*>(engine.lease(piece)[State::Param]);
      if (piece.param == param) return {at, at + piece.count};
    }
    return {};
  }
  void expect_loaded() {
    for (size_t p = 0; p < names.size(); ++p)
      EXPECT_EQ(bytes_of(values(static_cast<i64>(p))), tensors.at(names[p]).data);
  }

  TempDirectory dir;
  Mesh mesh;
  std::unique_ptr<Device> device = make_cpu_device(*cpu_ops(), 1);
  MemoryLedger ledger;
  engine::Engine engine;
  std::vector<std::string> names;  // by parameter number
  Tensors tensors;                 // of a file that fits
};

TEST_P(Weights, WithAndWithoutTheFirstPartOfTheirNames) {
  load(tensors);
  expect_loaded();
  engine.init_weights();
  Tensors bare;
  for (const auto& [name, t] : tensors) bare[name.starts_with("cls.") ? name : name.substr(name.find('.') + 1)] = t;
  load(bare);
  expect_loaded();
}

TEST_P(Weights, Fp64IsRoundedOnce) {
  // Just above the middle of two fp32 numbers, by less than fp32 or bf16 can represent.
  const std::vector<double> exact(static_cast<size_t>(engine.row_of(0).numel()), 1 + 0x1p-24 + 0x1p-50);
  Tensors file = tensors;
  file[names[0]].type = "F64";
  file[names[0]].data = bytes_of(exact);
  load(file);
  EXPECT_EQ(values(0)[0], 1 + 0x1p-23f);
}

TEST_P(Weights, ThatAreNotNumbersAreRefused) {
  for (const double bad : {1e300, std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
    std::vector<double> values(static_cast<size_t>(engine.row_of(0).numel()), 1);
    values[5] = bad;
    Tensors file = tensors;
    file[names[0]].type = "F64";
    file[names[0]].data = bytes_of(values);
    EXPECT_ERROR(load(file), Errc::Numeric, "element 5 of " + names[0]);
  }
}

// Parts that wrappers of a module put in front of all names, or into many.
TEST_P(Weights, AreFoundBehindTheWrappersOfTheirModule) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, std::string_view text) { warnings.emplace_back(text); });
  const auto loads = [&](const std::string& removed, const std::function<std::string(std::string)>& rename) {
    engine.init_weights();
    Tensors file;
    for (const auto& [name, t] : tensors) file[rename(name)] = t;
    warnings.clear();
    load(file);
    expect_loaded();
    ASSERT_EQ(warnings.size(), 1u) << removed;
    EXPECT_EQ(warnings[0], fmt::format("{}: tensor names are read without {}, which a wrapper of the model has added",
                                       dir / "w.safetensors", removed));
  };
  for (const char* prefix : {"module.", "module.module.", "model.", "base_model.model.", "anything.at.all."})
    loads(fmt::format("'{}'", prefix), [&](const std::string& name) { return prefix + name; });
  for (const char* wrapper : {"_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.", "language_model."})
    loads(fmt::format("'{}'", wrapper), [&](const std::string& name) { return wrapper + name; });
  loads("'_orig_mod.' and 'module.'", [](const std::string& name) { return "module._orig_mod." + name; });
  loads("'_orig_mod.' and 'module.'", [](const std::string& name) { return "_orig_mod.module." + name; });
  // In the names of layers only.
  loads("'_checkpoint_wrapped_module.'", [](std::string name) {
    const size_t at = name.find(".0.");
    return at == name.npos ? name : name.insert(at + 3, "_checkpoint_wrapped_module.");
  });
  loads("'_fsdp_wrapped_module.' and 'model.'", [](std::string name) {
    const size_t at = name.find(".0.");
    return "_fsdp_wrapped_module.model." + (at == name.npos ? name : name.insert(at + 3, "_fsdp_wrapped_module."));
  });
  set_log_sink(nullptr);
}

TEST_P(Weights, BehindNoWrapperTwoOfTheFilesNamesStandInTheMessage) {
  Tensors file;
  for (const auto& [name, t] : tensors) file[(name == names[0] ? "a." : "b.") + name] = t;
  EXPECT_ERROR(load(file), Errc::Mismatch, names[0] + " is missing");
  EXPECT_ERROR(load(file), Errc::Mismatch, "\n  names of the file: ");
  const std::string second = file.begin()->first;
  EXPECT_ERROR(load(file), Errc::Mismatch, second);
  // Two tensors for one parameter: neither can be preferred.
  file = tensors;
  file["_orig_mod." + names[0]] = tensors[names[0]];
  EXPECT_ERROR(load(file), Errc::Mismatch, "_orig_mod." + names[0] + " is not a parameter of the model");
}

TEST_P(Weights, AnAdapterBesideThemIsNotDropped) {
  for (const char* part : {"lora_A.default.weight", "lora_B.weight", "lora_magnitude_vector.default", "ia3_l.weight"}) {
    Tensors file = tensors;
    file[names[1].substr(0, names[1].rfind('.') + 1) + part] = {.data = std::string(8, 'x'), .shape = {2}};
    EXPECT_ERROR(load(file), Errc::Unavailable, "belongs to an adapter of PEFT");
    EXPECT_ERROR(load(file), Errc::Unavailable, part);
  }
  Tensors file;
  for (const auto& [name, t] : tensors) file["base_model.model." + name] = t;
  file["base_model.model.x.base_layer.weight"] = {.data = std::string(8, 'x'), .shape = {2}};
  EXPECT_ERROR(load(file), Errc::Unavailable, "merge it (merge_and_unload)");
}

TEST_P(Weights, UnreadableTypesAreNamedAndNotMissing) {
  Tensors file = tensors;
  Tensor& t = file[names[0]];
  t.type = "F8_E4M3";
  t.data.resize(t.data.size() / 4);
  EXPECT_ERROR(load(file), Errc::Unavailable, names[0] + " is of type fp8_e4m3");
  EXPECT_ERROR(load(file), Errc::Unavailable, "its scales, '" + names[0] + "_scale_inv', are missing: add them");
  EXPECT_ERROR(load(file), Errc::Unavailable, dir / "w.safetensors");
  t.type = "I64";
  t.data.resize(t.data.size() * 8);
  EXPECT_ERROR(load(file), Errc::Unavailable, names[0] + " is of type int64");
  file = tensors;
  file[names[0]].type = "F8_E8M0";
  file[names[0]].data = std::string(file[names[0]].data.size() / 4, 'x');
  EXPECT_ERROR(load(file), Errc::Unavailable, names[0] + " is of type F8_E8M0");
  file = tensors;
  file["scale"] = {.type = "F8_E8M0", .data = "x", .shape = {1}};
  EXPECT_ERROR(load(file), Errc::Mismatch, "scale is not a parameter of the model");
}

TEST_P(Weights, MissingOnesAndOtherShapesAreNamed) {
  Tensors file = tensors;
  file.erase(names[1]);
  EXPECT_ERROR(load(file), Errc::Mismatch, names[1] + " is missing");
  file = tensors;
  file[names[0]].shape = {4, 8};
  EXPECT_ERROR(load(file), Errc::Mismatch, "has shape [4,8], the model needs [8,4]");
}

TEST_P(Weights, TiedNamesMustHaveTheValuesOfTheirParameter) {
  for (const auto& [alias, name] : engine.model().ties) {
    Tensors file = tensors;
    file[alias] = tensors[name];
    load(file);
    expect_loaded();
    file.erase(name);
    load(file);
    expect_loaded();
    file[name] = file[alias];
    file[alias].data[20] ^= 1;
    EXPECT_ERROR(load(file), Errc::Mismatch, alias + " differs from " + name);
    file[alias] = {.type = "F8_E4M3", .data = std::string(32, 'x'), .shape = {8, 4}};
    EXPECT_ERROR(load(file), Errc::Unavailable, alias + " is of type fp8_e4m3");
    file[alias].type = "F8_E8M0";
    EXPECT_ERROR(load(file), Errc::Unavailable, alias + " is of type F8_E8M0");
  }
}

INSTANTIATE_TEST_SUITE_P(Names, Weights, ::testing::Values(Family::Gpt2, Family::Llama, Family::Qwen2Moe, Family::Bert),
                         [](const auto& test) { return std::string(family_name(test.param)); });

// Names that Google's files and those of other tasks use in addition, or instead.
class BertWeights : public Weights {};

TEST_P(BertWeights, GammaAndBetaAreLayerNormsOldNames) {
  Tensors old;
  for (const auto& [name, t] : tensors) {
    const bool norm = name.find("LayerNorm") != name.npos;
    const std::string layer = name.substr(0, name.rfind('.'));
    old[!norm ? name : layer + (name.ends_with("weight") ? ".gamma" : ".beta")] = t;
  }
  ASSERT_NE(old, tensors);
  load(old);
  expect_loaded();
}

TEST_P(BertWeights, PoolerAndNextSentenceHeadAreLeftOutWithAWarning) {
  Tensors file = tensors;
  file["bert.pooler.dense.weight"] = {.data = std::string(64, 'x'), .shape = {4, 4}};
  file["cls.seq_relationship.bias"] = {.data = std::string(8, 'x'), .shape = {2}};
  file["bert.embeddings.position_ids"] = {.type = "I64", .data = std::string(32, 'x'), .shape = {1, 4}};
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warning) warnings.emplace_back(text);
  });
  load(file);
  set_log_sink(nullptr);
  expect_loaded();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("bert.pooler.dense.weight, cls.seq_relationship.bias"), std::string::npos) << warnings[0];
  file["bert.classifier.weight"] = file["cls.seq_relationship.bias"];
  EXPECT_ERROR(load(file), Errc::Mismatch, "bert.classifier.weight is not a parameter");
}

TEST_P(BertWeights, AModelWithoutItsHeadIsRefusedByName) {
  Tensors file = tensors;
  std::erase_if(file, [](const auto& t) { return t.first.starts_with("cls."); });
  EXPECT_ERROR(load(file), Errc::Mismatch, "cls.predictions.transform.dense.weight is missing");
}

TEST_P(BertWeights, ANewHeadIsRandomAndTheRestIsLoaded) {
  Config c = config();
  c.published.new_head = true;
  engine::Engine fresh(c, mesh, ledger, *device);
  Tensors file = tensors;
  std::erase_if(file, [](const auto& t) { return t.first.starts_with("cls."); });
  write_safetensors(dir / "w.safetensors", file);
  load_weights(fresh, dir / "w.safetensors");
  engine.init_weights();
  for (const zero::Piece& piece : engine.plan().dp().layout.held_pieces(0)) {
    const std::string& name = names[piece.param];
    const auto* got = static_cast<const float*>(fresh.lease(piece)[State::Param]);
    const auto* random = static_cast<const float*>(engine.lease(piece)[State::Param]);
    const std::string loaded(reinterpret_cast<const char*>(got), static_cast<size_t>(piece.count) * 4);
    if (name.starts_with("cls.")) {
      EXPECT_TRUE(std::equal(got, got + piece.count, random)) << name;
    } else {
      EXPECT_EQ(loaded, tensors.at(name).data) << name;
    }
  }
  file.erase("bert.embeddings.word_embeddings.weight");
  write_safetensors(dir / "w.safetensors", file);
  EXPECT_ERROR(load_weights(fresh, dir / "w.safetensors"), Errc::Mismatch, "word_embeddings.weight is missing");
}

INSTANTIATE_TEST_SUITE_P(Bert, BertWeights, ::testing::Values(Family::Bert));

TEST(PublishedWeights, StandBesideConfigJson) {
  const TempDirectory dir;
  write_file(dir / "config.json", "{}");
  EXPECT_EQ(published_weights(""), "");
  EXPECT_EQ(published_weights(dir.path()), "");
  EXPECT_EQ(published_weights(dir / "config.json"), "");
  for (const char* name : {"tokenizer.json", "training_args.bin", "optimizer.pt", "rng_state_0.pth", "train.bin"})
    write_file(dir / name, "x");
  EXPECT_EQ(published_weights(dir.path()), "");
  for (const char* name :
       {"model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "tf_model.h5", "flax_model.msgpack"}) {
    write_file(dir / name, "x");
    EXPECT_ERROR(published_weights(dir.path()), Errc::Unavailable, std::string("weights in ") + name);
    EXPECT_ERROR(published_weights(dir / "config.json"), Errc::Unavailable, name);
    std::filesystem::remove(dir / name);
  }
  for (const char* folder : {"runs", "pytorch_model_fsdp_0"}) std::filesystem::create_directory(dir / folder);
  write_file(dir / "runs/model.pt", "x");  // of no model in this directory
  EXPECT_EQ(published_weights(dir.path()), "");
  for (const char* name :
       {"__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp", "onnx/model.onnx", "model.onnx",
        "iter_0000010/mp_rank_00/model_optim_rng.pt", "original/consolidated.00.pth", "openvino/openvino_model.bin"}) {
    std::filesystem::create_directories(std::filesystem::path(dir / name).parent_path());
    write_file(dir / name, "x");
    EXPECT_ERROR(published_weights(dir.path()), Errc::Unavailable, std::string("weights in ") + name + ",");
    std::filesystem::remove(dir / name);
  }
  write_file(dir / "small.json", "{}");
  write_file(dir / "pytorch_model.bin", "x");
  EXPECT_EQ(published_weights(dir / "small.json"), "");  // a description that belongs to no weights
  std::filesystem::remove(dir / "pytorch_model.bin");
  for (const char* name :
       {"model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"}) {
    write_file(dir / name, "x");
    EXPECT_EQ(published_weights(dir.path()), dir.path());
    EXPECT_EQ(published_weights(dir / "config.json"), dir.path());
    std::filesystem::remove(dir / name);
  }
}

// In the order of transformers; where there are several, a warning names them and the one that is read.
TEST(PublishedWeights, OneFileComesBeforeAnIndexAndSafetensorsBeforePickles) {
  const TempDirectory dir;
  write_safetensors(dir / "model-00001-of-00001.safetensors", {{"old", {.data = "1234", .shape = {1}}}});
  write_safetensors(dir / "model.safetensors", {{"new", {.data = "1234", .shape = {1}}}});
  write_file(dir / "model.safetensors.index.json", R"({"weight_map": {"old": "model-00001-of-00001.safetensors"}})");
  write_file(dir / "pytorch_model.bin.index.json", "{}");
  write_file(dir / "pytorch_model.bin", "x");
  std::string said;
  set_log_sink([&](LogLevel, std::string_view text) { said = text; });
  const auto warning = [&] {
    said.clear();
    warn_of_several_weights(dir.path());
    return said;
  };
  EXPECT_NE(open_source(dir.path())->find("new"), nullptr);
  EXPECT_EQ(warning(), dir.path() +
                           " contains model.safetensors and model.safetensors.index.json and pytorch_model.bin and "
                           "pytorch_model.bin.index.json: model.safetensors is read, as transformers does");
  EXPECT_NE(open_state(dir.path())->path(), "");
  EXPECT_EQ(said, warning());
  std::filesystem::remove(dir / "model.safetensors");
  EXPECT_NE(open_source(dir.path())->find("old"), nullptr);
  EXPECT_EQ(warning().find(dir.path() + " contains model.safetensors.index.json and pytorch_model.bin and "), 0u)
      << said;
  std::filesystem::remove(dir / "model.safetensors.index.json");
  EXPECT_EQ(published_weights_in(dir.path()),
            (std::vector<std::string>{"pytorch_model.bin", "pytorch_model.bin.index.json"}));
  std::filesystem::remove(dir / "pytorch_model.bin");
  EXPECT_EQ(warning(), "");
  std::filesystem::create_directory(dir / "model.safetensors");  // no file
  EXPECT_EQ(published_weights_in(dir.path()), std::vector<std::string>{"pytorch_model.bin.index.json"});
  set_log_sink(nullptr);
}

TEST(PublishedWeights, AnAdapterBesideThemIsRefused) {
  for (const char* name : {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}) {
    const TempDirectory dir;
    write_file(dir / "config.json", "{}");
    write_safetensors(dir / "model.safetensors", {{"a", {.data = "1234", .shape = {1}}}});
    EXPECT_EQ(published_weights(dir.path()), dir.path());
    write_file(dir / name, "{}");
    const std::string message = std::string(name) + ": belongs to an adapter of PEFT";
    EXPECT_ERROR(published_weights(dir.path()), Errc::Unavailable, message);
    EXPECT_ERROR(open_source(dir.path()), Errc::Unavailable, message);
    EXPECT_ERROR(open_state(dir.path()), Errc::Unavailable, message);
  }
}

// Its saves are named where the directory itself holds no model.
TEST(PublishedWeights, OfHuggingFacesTrainerAreInItsCheckpoints) {
  const TempDirectory dir;
  write_file(dir / "config.json", "{}");
  for (const char* name : {"checkpoint-1000", "checkpoint-90", "checkpoint-x", "checkpoint-5-old", "checkpoint-"})
    std::filesystem::create_directory(dir / name);
  write_file(dir / "checkpoint-7", "");
  const std::string names = "Hugging Face's Trainer has saved checkpoint-90, checkpoint-1000 ";
  EXPECT_ERROR(published_weights(dir.path()), Errc::Config, names + "there: name one of them");
  EXPECT_ERROR(open_source(dir.path()), Errc::Io, names + "in it: name one of them");
  EXPECT_ERROR(open_state(dir.path()), Errc::Io, names + "in it: name one of them");
  EXPECT_ERROR(find_checkpoint(dir.path()), Errc::Io, names + "in it: name one of them");
  for (int step = 1; step <= 4; ++step) std::filesystem::create_directory(dir / fmt::format("checkpoint-{}", step));
  EXPECT_EQ(trainer_checkpoints(dir.path()),
            "..., checkpoint-2, checkpoint-3, checkpoint-4, checkpoint-90, checkpoint-1000");
  write_safetensors(dir / "model.safetensors", {{"a", {.data = "1234", .shape = {1}}}});
  EXPECT_EQ(published_weights(dir.path()), dir.path());
}

}  // namespace weights_test
}  // namespace ds::run
