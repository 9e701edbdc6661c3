// SPDX-License-Identifier: Apache-2.0
// Initial weights: which names, types and directories are taken, and what is said about the others.

#include "engine/weights.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/json.h"
#include "ds/log.h"
#include "temp_directory.h"

namespace ds::engine {
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
  Engine engine;
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
  // Just above the middle of two fp32 numbers, by less than fp32 or bf16 can tell.
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

TEST_P(Weights, UnreadableTypesAreNamedAndNotMissing) {
  Tensors file = tensors;
  Tensor& t = file[names[0]];
  t.type = "F8_E4M3";
  t.data.resize(t.data.size() / 4);
  EXPECT_ERROR(load(file), Errc::Unavailable, names[0] + " is of type fp8_e4m3");
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
  EXPECT_ERROR(load(file), Errc::Mismatch, "has shape [4,8], the model wants [8,4]");
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

INSTANTIATE_TEST_SUITE_P(Names, Weights, ::testing::Values(Family::Gpt2, Family::Llama, Family::Bert),
                         [](const auto& test) { return std::string(family_name(test.param)); });

// What Google's files and those of other tasks have beside, or instead.
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
  c.new_head = true;
  Engine fresh(c, mesh, ledger, *device);
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
  for (const char* name : {"model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "tf_model.h5",
                           "flax_model.msgpack", "adapter_model.safetensors"}) {
    write_file(dir / name, "x");
    EXPECT_ERROR(published_weights(dir.path()), Errc::Unavailable, std::string("weights in ") + name);
    EXPECT_ERROR(published_weights(dir / "config.json"), Errc::Unavailable, name);
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

}  // namespace weights_test
}  // namespace ds::engine
