// SPDX-License-Identifier: Apache-2.0
// Checkpoints that DeepSpeed itself wrote (tests/golden/make_deepspeed.py), against what DeepSpeed reads out of them.

#include "checkpoint/deepspeed.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "ds/checkpoint.h"
#include "ds/log.h"
#include "formats/tensor_io.h"
#include "formats/zip.h"
#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace deepspeed_test {

namespace fs = std::filesystem;
using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

std::string fixture(const std::string& name) { return testing::test_data("deepspeed/" + name); }

struct Case {
  const char* name;
  int stage;
  i64 ranks;
  DType work;
  bool master;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class DeepSpeedFixture : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    source_ = open_deepspeed(fixture(GetParam().name));
    expected_ = open_source(fixture(GetParam().name) + "/expected.safetensors");
  }
  i64 find(std::string_view name) const {
    const auto& params = source_->params();
    const auto it = std::find_if(params.begin(), params.end(), [&](const ParamEntry& p) { return p.name == name; });
    return it == params.end() ? -1 : it - params.begin();
  }
  // Every element of the state, read in pieces of `step`.
  std::vector<char> read(State state, DType dtype, i64 param, i64 step) const {
    const i64 n = *checked_product(source_->params()[param].shape);
    std::vector<char> out(static_cast<size_t>(n * dtype_bytes(dtype)));
    for (i64 first = 0; first < n; first += step) {
      source_->read(state, dtype, param, first, std::min(step, n - first), out.data() + first * dtype_bytes(dtype));
    }
    return out;
  }
  // Compares with the tensor `key` of the reference, bit by bit.
  void expect_equal(State state, DType dtype, i64 param, const std::string& key) const {
    const TensorInfo& t = expected_->at(key);
    ASSERT_EQ(t.dtype, dtype) << key;
    ASSERT_EQ(t.shape, source_->params()[param].shape) << key;
    std::vector<char> wanted(static_cast<size_t>(t.bytes()));
    expected_->read(key, 0, t.numel(), wanted.data());
    for (const i64 step : {i64{1} << 40, i64{5}}) EXPECT_EQ(read(state, dtype, param, step), wanted) << key;
  }
  // The parameter whose elements `name` has.
  i64 owner(const std::string& name) const {
    const i64 i = find(name);
    const std::string& tied = i < 0 ? name : source_->params()[i].tied_to;
    return tied.empty() ? i : find(tied);
  }

  std::unique_ptr<StateSource> source_;
  std::unique_ptr<TensorSource> expected_;
};

bool has_prefix(const std::string& name) {
  for (const char* prefix : {"param.", "fp32.", "exp_avg.", "exp_avg_sq."}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

TEST_P(DeepSpeedFixture, WeightsAreBitForBitThoseOfZeroToFp32) {
  int compared = 0;
  for (const TensorInfo& t : expected_->list()) {
    if (has_prefix(t.name)) continue;
    const i64 i = owner(t.name);
    ASSERT_GE(i, 0) << t.name;
    const bool is_f = is_float(source_->stored_dtype(State::Param, i));
    // zero_to_fp32 widens buffers; it hands out frozen parameters as they are
    const DType dtype = is_f ? t.dtype : source_->stored_dtype(State::Param, i);
    expect_equal(State::Param, dtype, i, t.name);
    ++compared;
  }
  EXPECT_GE(compared, 9);
}

TEST_P(DeepSpeedFixture, WeightsAreThoseOfTheLiveModuleInItsOwnDtype) {
  int compared = 0;
  for (const TensorInfo& t : expected_->list()) {
    if (!t.name.starts_with("param.")) continue;
    const i64 i = owner(t.name.substr(6));
    ASSERT_GE(i, 0) << t.name;
    EXPECT_EQ(source_->stored_dtype(State::Param, i), t.dtype) << t.name;
    expect_equal(State::Param, t.dtype, i, t.name);
    ++compared;
  }
  EXPECT_EQ(compared, 10);
  EXPECT_EQ(source_->params().size(), 10u);
}

TEST_P(DeepSpeedFixture, MasterAndMomentsAreThoseOfTheLiveOptimizer) {
  ASSERT_EQ(source_->has(State::Master), GetParam().master);
  ASSERT_TRUE(source_->has(State::ExpAvg) && source_->has(State::ExpAvgSq));
  std::map<State, int> compared;
  for (const TensorInfo& t : expected_->list()) {
    for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) {
      const std::string prefix = s == State::Master ? "fp32." : fmt::format("{}.", kStateNames[static_cast<size_t>(s)]);
      if (!t.name.starts_with(prefix)) continue;
      expect_equal(s, DType::F32, owner(t.name.substr(prefix.size())), t.name);
      ++compared[s];
    }
  }
  EXPECT_EQ(compared[State::ExpAvg], 6);
  EXPECT_EQ(compared[State::ExpAvgSq], 6);
  EXPECT_EQ(compared[State::Master], GetParam().master ? 6 : 0);
}

TEST_P(DeepSpeedFixture, WhatIsNotTrainedIsItsOwnMasterWithoutMoments) {
  const i64 position = find("position"), table = find("table");
  ASSERT_TRUE(position >= 0 && table >= 0);
  EXPECT_EQ(source_->stored_dtype(State::Param, table), DType::I64);
  EXPECT_EQ(read(State::ExpAvg, DType::F32, position, 100), std::vector<char>(35 * 4));
  std::vector<char> widened(35 * 4);
  convert_elements(DType::F32, widened.data(), GetParam().work, read(State::Param, GetParam().work, position, 7).data(),
                   35);
  EXPECT_EQ(read(State::Master, DType::F32, position, 100), widened);
}

TEST_P(DeepSpeedFixture, MetaSaysWhereTheRunWas) {
  const CheckpointMeta& m = source_->meta();
  EXPECT_EQ(m.step, 4);
  EXPECT_EQ(m.zero_stage, GetParam().stage);
  EXPECT_EQ(m.world_size, GetParam().ranks);
  EXPECT_EQ(m.work_dtype, GetParam().work);
  EXPECT_EQ(m.consumed_samples, 4 * 2 * GetParam().ranks);
  // Adam's own count: at stage 0 in 16 bits DeepSpeed steps once with zero gradients to make the states.
  const bool unfused = m.zero_stage == 0 && m.work_dtype != DType::F32;
  EXPECT_EQ(m.optimizer_step, (unfused ? 5 : 4) - m.skipped_steps);
  EXPECT_NE(m.config_json.find("train_micro_batch_size_per_gpu"), std::string::npos);
  EXPECT_TRUE(m.isa.empty() && m.data_json.empty() && m.model_config_json.empty());
  const bool fp16 = GetParam().work == DType::F16;
  EXPECT_EQ(m.loss_scaler.iteration, fp16 || unfused ? 4 : 0);
  EXPECT_EQ(m.loss_scaler.scale > 1, fp16);
  const ParamEntry& head = source_->params()[find("head.weight")];
  EXPECT_EQ(head.tied_to, "embed.weight");
}

// To any sink, and as a checkpoint of ours for another number of ranks.
TEST_P(DeepSpeedFixture, IsMergedAndSharded) {
  const TempDirectory dir;
  const std::string from = fixture(GetParam().name), out = dir / "out.safetensors";
  merge_checkpoint(from, out, {.dtype = DType::F32, .optimizer = true, .verify = true});
  const auto merged = open_source(out);
  int compared = 0;
  for (const TensorInfo& t : expected_->list()) {
    const bool weight = !has_prefix(t.name), moment = t.name.starts_with("exp_avg");
    if (t.name == "head.weight" || t.dtype != DType::F32 || !(weight || moment)) continue;
    const std::string key = moment ? "optimizer." + t.name : t.name;
    std::vector<float> wanted(static_cast<size_t>(t.numel())), got(wanted.size());
    expected_->read(t.name, 0, t.numel(), wanted.data());
    ASSERT_EQ(merged->at(key).dtype, DType::F32) << key;
    merged->read(key, 0, t.numel(), got.data());
    EXPECT_EQ(std::memcmp(got.data(), wanted.data(), wanted.size() * 4), 0) << key;
    ++compared;
  }
  EXPECT_GE(compared, 7 + 12);
  EXPECT_EQ(merged->find("head.weight"), nullptr);
  EXPECT_EQ(merged->metadata().at("head.weight"), "embed.weight");

  shard_checkpoint(from, dir / "run", {.mesh = {.dp = 3}, .stage = 2});
  const auto sharded = open_state(dir / "run");
  ASSERT_EQ(sharded->params().size(), source_->params().size());
  EXPECT_EQ(sharded->meta().optimizer_step, source_->meta().optimizer_step);
  for (size_t i = 0; i < sharded->params().size(); ++i) {
    const auto p = static_cast<i64>(i);
    ASSERT_EQ(sharded->params()[i].name, source_->params()[i].name);
    if (!sharded->params()[i].tied_to.empty()) continue;
    for (const State state : kStates) {
      if (!sharded->stores(state, p)) continue;
      const DType dtype = sharded->stored_dtype(state, p);
      const i64 n = *checked_product(sharded->params()[i].shape);
      std::vector<char> got(static_cast<size_t>(n * dtype_bytes(dtype)));
      sharded->read(state, dtype, p, 0, n, got.data());
      EXPECT_EQ(got, read(state, dtype, p, n)) << sharded->params()[i].name;
    }
  }
}

TEST_P(DeepSpeedFixture, VerifyFindsEveryDamagedFile) {
  EXPECT_TRUE(source_->verify({}).empty());
  const TempDirectory dir;
  fs::copy(fixture(GetParam().name), dir.path(), fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  source_ = open_deepspeed(dir.path());
  std::vector<std::string> paths;
  for (const auto& entry : fs::recursive_directory_iterator(dir.path())) {
    if (entry.path().extension() == ".pt") paths.push_back(entry.path().string());
  }
  for (const std::string& path : paths) {
    std::string bytes = read_file(path);
    const size_t at = bytes.find("/version");  // the entry that every file has, and that nobody reads: "3\n"
    ASSERT_NE(at, std::string::npos);
    const size_t digit = bytes.find("3\n", at);
    ASSERT_LT(digit - at, 200u);
    bytes[digit] ^= 1;
    write_file(path, bytes);
  }
  const std::vector<std::string> bad = source_->verify({});
  EXPECT_EQ(bad.size(), paths.size());
  for (const std::string& path : paths) {
    const std::string name = path.substr(dir.path().size());
    EXPECT_TRUE(std::any_of(bad.begin(), bad.end(), [&](auto& line) { return line.find(name) != std::string::npos; }))
        << name;
  }
}

const Case kCases[] = {
    {"zero0-fp32", 0, 1, DType::F32, false},      {"zero0-fp16", 0, 2, DType::F16, true},
    {"zero0-bf16", 0, 2, DType::BF16, true},      {"zero1-fp16", 1, 2, DType::F16, true},
    {"zero1-bf16", 1, 2, DType::BF16, true},      {"zero1-elastic", 1, 3, DType::F32, true},
    {"zero2-bf16", 2, 3, DType::BF16, true},      {"zero2-fp32", 2, 2, DType::F32, true},
    {"zero3-bf16", 3, 3, DType::BF16, true},      {"zero3-fp32", 3, 2, DType::F32, true},
    {"zero3-fp16", 3, 2, DType::F16, true},       {"zero2-dealt", 2, 3, DType::BF16, true},
    {"universal-zero1", 1, 2, DType::BF16, true}, {"universal-zero3", 3, 2, DType::BF16, true},
};

INSTANTIATE_TEST_SUITE_P(Fixtures, DeepSpeedFixture, ::testing::ValuesIn(kCases), [](const auto& p) {
  std::string name = p.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// --- models with experts, over two ranks of ep: by files of their own, or in partitions of the ranks with the same
// ones; and those that AutoEP converted, under the names of the published model

class DeepSpeedExperts : public DeepSpeedFixture {};

TEST_P(DeepSpeedExperts, WeightsAndStatesOfAllRanksStandUnderNamesOverAllRanks) {
  ASSERT_EQ(source_->has(State::Master), GetParam().master);
  ASSERT_TRUE(source_->has(State::ExpAvg) && source_->has(State::ExpAvgSq));
  std::map<State, int> compared;
  for (const TensorInfo& t : expected_->list()) {
    for (const State s : {State::Param, State::Master, State::ExpAvg, State::ExpAvgSq}) {
      const std::string prefix = s == State::Param    ? "param."
                                 : s == State::Master ? "fp32."
                                                      : fmt::format("{}.", kStateNames[static_cast<size_t>(s)]);
      if (!t.name.starts_with(prefix)) continue;
      const i64 param = find(t.name.substr(prefix.size()));
      ASSERT_GE(param, 0) << t.name;
      expect_equal(s, s == State::Param ? GetParam().work : DType::F32, param, t.name);
      ++compared[s];
    }
  }
  // Embedding, head and its bias, two routers, and experts of three parameters each: 2 x 4, or in residual layers 2 and
  // 4, beside an MLP and a coefficient with its bias. AutoEP's model: three blocks, of which two have as many experts
  // and a shared one with its gate, and a norm that is frozen.
  const std::string_view name = GetParam().name;
  const bool autoep = name.find("autoep") != name.npos, residual = name.find("residual") != name.npos;
  const int trained = autoep ? 66 : residual ? 5 + 3 * (2 + 4) + 2 * 5 : 5 + 3 * 2 * 4, params = autoep ? 67 : trained;
  EXPECT_EQ(compared[State::Param], params);
  EXPECT_EQ(compared[State::ExpAvg], trained);
  EXPECT_EQ(compared[State::ExpAvgSq], trained);
  EXPECT_EQ(compared[State::Master], GetParam().master ? trained : 0);
  EXPECT_EQ(std::ssize(source_->params()), params);
  EXPECT_EQ(source_->meta().step, 4);
  const bool unfused = GetParam().stage == 0 && GetParam().master;  // whose first step has zero gradients
  EXPECT_EQ(source_->meta().optimizer_step, unfused ? 5 : 4);
  EXPECT_EQ(source_->meta().zero_stage, GetParam().stage);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, DeepSpeedExperts,
                         ::testing::Values(Case{"experts-zero0-fp32", 0, 2, DType::F32, false},
                                           Case{"experts-zero1-bf16", 1, 4, DType::BF16, true},
                                           Case{"experts-zero2-fp32", 2, 4, DType::F32, true},
                                           Case{"experts-residual-zero0-fp16", 0, 2, DType::F16, true},
                                           Case{"experts-residual-zero1-fp32", 1, 2, DType::F32, true},
                                           Case{"autoep-zero0-fp32", 0, 2, DType::F32, false},
                                           Case{"autoep-zero1-bf16", 1, 4, DType::BF16, true},
                                           Case{"autoep-zero2-fp32", 2, 4, DType::F32, true},
                                           Case{"autoep-zero3-bf16", 3, 4, DType::BF16, true},
                                           Case{"universal-autoep-zero3", 3, 2, DType::BF16, true}),
                         [](const auto& p) {
                           std::string name = p.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// --- directories that are not as DeepSpeed left them

class DeepSpeedDirectory : public ::testing::Test {
 protected:
  // A copy of a fixture; returns its tag directory.
  std::string copy(const std::string& name) {
    fs::remove_all(dir_.path());
    fs::copy(fixture(name), dir_.path(), fs::copy_options::recursive);
    return dir_ / (name.starts_with("universal") ? "global_step4_universal" : "global_step4");
  }
  void refused(Errc code, const std::string& part, int rank = -1) {
    try {
      open_deepspeed(dir_.path());
      ADD_FAILURE() << "no error; expected " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_EQ(e.rank(), rank) << e.what();
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
  TempDirectory dir_;
};

TEST_F(DeepSpeedDirectory, IsRecognised) {
  for (const Case& c : kCases) EXPECT_TRUE(is_deepspeed(fixture(c.name))) << c.name;
  EXPECT_TRUE(is_deepspeed(fixture("zero2-bf16/global_step4")));
  EXPECT_FALSE(is_deepspeed(fixture("zero2-bf16/latest")));
  EXPECT_FALSE(is_deepspeed(testing::test_data("checkpoint-v1")));
  EXPECT_FALSE(is_deepspeed(testing::test_data("gpt2")));
  EXPECT_FALSE(is_deepspeed(testing::test_data("absent")));
  EXPECT_TRUE(is_deepspeed_shard("a/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"));
  EXPECT_TRUE(is_deepspeed_shard("zero_pp_rank_0_mp_rank_00_model_states.pt"));
  EXPECT_FALSE(is_deepspeed_shard("a/mp_rank_00_model_states.pt"));
  EXPECT_FALSE(is_deepspeed_shard("zero_pp_rank_0_mp_rank_00_optim_states.pt/model.pt"));
}

TEST_F(DeepSpeedDirectory, TagsAreFound) {
  const std::string tag = copy("zero1-fp16");
  EXPECT_EQ(open_deepspeed(tag)->path(), tag);
  EXPECT_EQ(open_deepspeed(dir_.path(), "global_step4")->path(), tag);
  write_file(dir_ / "latest", "global_step4\n");
  EXPECT_EQ(open_deepspeed(dir_.path())->path(), tag);
  EXPECT_ERROR(open_deepspeed(dir_.path(), "global_step5"), Errc::Io, "no tag 'global_step5'");
  EXPECT_ERROR(open_deepspeed(dir_.path(), "../x"), Errc::Config, "is not a tag");
  write_file(dir_ / "latest", "../" + fs::path(dir_.path()).filename().string());
  refused(Errc::Corrupt, "not a directory next to it");
  write_file(dir_ / "latest", "global_step5");
  refused(Errc::Corrupt, "names 'global_step5', which does not exist or contains no model states (tags: global_step4)");
  fs::remove(dir_ / "latest");
  refused(Errc::Config, "there is no file 'latest' to choose a tag (tags: global_step4)");
  // The tag can be named however `latest` is.
  for (const char* latest : {"", "zz", "../x"}) {
    write_file(dir_ / "latest", latest);
    EXPECT_TRUE(is_deepspeed(dir_.path())) << latest;
    EXPECT_EQ(open_state(dir_.path(), "global_step4")->path(), tag);
    EXPECT_ERROR(open_state(dir_.path()), Errc::Corrupt, "(tags: global_step4)");
  }
}

// One element, three hundred million times.
TEST_F(DeepSpeedDirectory, AFileDoesNotUnfoldWithoutBound) {
  using testing::dict, testing::number, testing::storage, testing::tensor;
  const auto model = [](i64 elems) {
    const std::string w = tensor(storage("FloatStorage", "0", 1), 0, {elems}, {0});
    return testing::torch_file(testing::pickle(dict({{"module", dict({{"w", w}})}, {"global_steps", number(1)}})),
                               {{"0", std::string(4, '\1')}});
  };
  fs::create_directory(dir_ / "tag");
  write_file(dir_ / "tag/mp_rank_00_model_states.pt", model(300'000'000));
  EXPECT_ERROR(open_deepspeed(dir_ / "tag"), Errc::Unavailable, "it unfolds to more than 16 times");
  write_file(dir_ / "tag/mp_rank_00_model_states.pt", model(3));
  EXPECT_EQ(open_deepspeed(dir_ / "tag")->params().size(), 1u);
}

TEST_F(DeepSpeedDirectory, AMissingShardIsNamedWithItsRank) {
  fs::remove(copy("zero2-bf16") + "/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
  refused(Errc::Corrupt, "the optimizer states of rank 1 are missing", 1);
  fs::remove(copy("zero2-bf16") + "/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt");
  refused(Errc::Corrupt, "the optimizer states of rank 2 are missing", 0);
  fs::remove(copy("zero2-bf16") + "/mp_rank_00_model_states.pt");
  refused(Errc::Corrupt, "the model states are missing");
  fs::remove(copy("zero3-bf16") + "/zero_pp_rank_2_mp_rank_00_model_states.pt");
  refused(Errc::Corrupt, "the model states of rank 2 are missing", 0);
  for (const char* r : {"0", "1", "2"}) {
    if (*r == '0') copy("zero2-bf16");
    fs::remove(dir_ / fmt::format("global_step4/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", r));
  }
  refused(Errc::Corrupt, "the optimizer states are missing");
  fs::remove(copy("universal-zero1") + "/zero/blocks.0.norm.bias/fp32.pt");
  refused(Errc::Corrupt, "blocks.0.norm.bias/fp32.pt: is missing");
}

TEST_F(DeepSpeedDirectory, ForeignShardsAreNamedWithTheirRank) {
  const std::string a = "/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                    b = "/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
  std::string tag = copy("zero2-bf16");
  fs::copy(tag + a, tag + b, fs::copy_options::overwrite_existing);  // rank 0's instead of rank 1's
  refused(Errc::Mismatch, "the shard of another rank or save", 1);
  tag = copy("zero2-bf16");                                                                         // of three ranks
  fs::copy(fixture("zero1-bf16/global_step4") + b, tag + b, fs::copy_options::overwrite_existing);  // of two
  refused(Errc::Mismatch, "one of 2 shards, but there are 3", 1);
  tag = copy("zero3-fp32");
  fs::copy(fixture("zero3-fp16/global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt"),
           tag + "/zero_pp_rank_1_mp_rank_00_model_states.pt", fs::copy_options::overwrite_existing);
  refused(Errc::Mismatch, "its parameters are not those of rank 0", 1);
  tag = copy("zero3-fp32");
  fs::copy(fixture("zero3-fp16/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
           tag + "/zero_pp_rank_1_mp_rank_00_optim_states.pt", fs::copy_options::overwrite_existing);
  refused(Errc::Mismatch, "the shard of another save", 1);
}

TEST_F(DeepSpeedDirectory, WhatIsNotReadIsRefusedByName) {
  for (const auto& [name, part] : std::vector<std::pair<std::string, std::string>>{
           {"mp_rank_01_model_states.pt", "tensor- or pipeline-parallel"},
           {"zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor- or pipeline-parallel"},
           {"layer_03-model_00-model_states.pt", "layer of a pipeline-parallel run"},
           {"expert_0_mp_rank_00_model_states.pt", "experts as an old version of DeepSpeed has named them"},
           {"layer_0_expert_0_mp_rank_01_model_states.pt", "tensor- or pipeline-parallel"},
           {"offloaded_tensors", "swapped to NVMe"}}) {
    write_file(copy("zero1-fp16") + "/" + name, "");
    refused(Errc::Unavailable, part);
    refused(Errc::Unavailable, name);
  }
  write_file(copy("zero1-fp16") + "/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "");
  refused(Errc::Corrupt, "two checkpoints in one directory");
}

TEST_F(DeepSpeedDirectory, ExpertsThatAreMissingOrNotRanksOwnAreNamed) {
  const auto without = [&](const std::string& name) {
    ASSERT_TRUE(fs::remove(copy("experts-zero1-bf16") + "/" + name));
  };
  without("layer_1_expert_2_mp_rank_00_model_states.pt");
  refused(Errc::Corrupt, "expert 2 of layer 1 is missing");
  copy("experts-zero1-bf16");
  for (const int e : {0, 1, 2, 3})
    fs::remove(fmt::format("{}/global_step4/layer_0_expert_{}_mp_rank_00_model_states.pt", dir_.path(), e));
  refused(Errc::Corrupt, "the experts of layer 0 are missing");
  without("layer_1_expert_3_mp_rank_00_model_states.pt");  // three experts, of which a rank has two
  refused(Errc::Corrupt, "a rank has 2 of 3 experts");
  const std::string dir = copy("experts-zero1-bf16"), other = dir + "/layer_1_expert_";
  fs::rename(other + "3_mp_rank_00_model_states.pt", other + "x");
  fs::rename(other + "2_mp_rank_00_model_states.pt", other + "3_mp_rank_00_model_states.pt");
  fs::rename(other + "x", other + "2_mp_rank_00_model_states.pt");
  refused(Errc::Corrupt, "is not a parameter of expert 2");
  without("layer_0_expert_1_mp_rank_00_model_states.pt");
  fs::copy_file(fixture("experts-zero0-fp32") + "/global_step4/layer_0_expert_1_mp_rank_00_model_states.pt",
                dir_ / "global_step4/layer_0_expert_1_mp_rank_00_model_states.pt");
  refused(Errc::Mismatch, "the file of another save");
  fs::remove(copy("experts-zero0-fp32") + "/expp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_FALSE(open_deepspeed(dir_.path())->has(State::ExpAvg));  // of half of the experts: none, with a warning
  // Partitions of rank 1, which has other experts, in the place of those of rank 2.
  const std::string parts = copy("experts-zero1-bf16") + "/bf16_zero_pp_rank_";
  fs::copy_file(parts + "1_mp_rank_00_optim_states.pt", parts + "2_mp_rank_00_optim_states.pt",
                fs::copy_options::overwrite_existing);
  refused(Errc::Mismatch, "the shard of another rank or save", 2);
}

// The file of one rank in the place of another's.
void replace_file(const std::string& tag, const std::string& from, const std::string& to) {
  fs::copy_file(tag + "/" + from, tag + "/" + to, fs::copy_options::overwrite_existing);
}

TEST_F(DeepSpeedDirectory, OptimizersOfExpertsThatChangedPlacesAreNamed) {
  const std::string tag = copy("experts-zero0-fp32") + "/expp_rank_", rest = "_mp_rank_00_optim_states.pt";
  fs::rename(tag + "0" + rest, tag + "x");
  fs::rename(tag + "1" + rest, tag + "0" + rest);
  fs::rename(tag + "x", tag + "1" + rest);
  refused(Errc::Mismatch, "was saved as expp_rank_1_mp_rank_00_optim_states: the file of another rank");
}

TEST_F(DeepSpeedDirectory, ExpertsOfAutoepThatAreMissingOrNotRanksOwnAreNamed) {
  const std::string end = "_mp_rank_00_model_states.pt";
  fs::remove(copy("autoep-zero1-bf16") + "/layer_1_expert_3" + end);
  refused(Errc::Corrupt, "expert 3 of layer 1 is missing");
  std::string tag = copy("autoep-zero0-fp32");
  for (int e = 0; e < 4; ++e) fs::remove(fmt::format("{}/layer_1_expert_{}{}", tag, e, end));
  refused(Errc::Corrupt, "expert 0 of layer 1 is missing");
  replace_file(copy("autoep-zero1-bf16"), "layer_0_expert_1" + end, "layer_0_expert_2" + end);
  refused(Errc::Corrupt, "'model.layers.0.mlp.experts.w1.1' is not a parameter of expert 2");
  replace_file(copy("autoep-zero1-bf16"), "layer_0_expert_1" + end, "layer_1_expert_1" + end);
  refused(Errc::Corrupt, "'model.layers.0.mlp.experts.w1.1' is not a parameter of expert 1");
  replace_file(copy("autoep-zero1-bf16"), "layer_0_expert_1" + end, "layer_1_expert_4" + end);
  refused(Errc::Corrupt, "is not a parameter of expert 4");
  // At stage 3 ranks 0 and 2 share their experts, and so do 1 and 3.
  replace_file(copy("autoep-zero3-bf16"), "zero_pp_rank_1" + end, "zero_pp_rank_2" + end);
  refused(Errc::Mismatch, "it has the experts of rank 1 of ep, where those of rank 0 belong", 2);
  replace_file(copy("autoep-zero3-bf16"), "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt",
               "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt");
  refused(Errc::Mismatch, "it shares the experts of group 2 with other ranks than 0, 2", 0);
}

// Replaces `from` by `to` everywhere in the pickle of a file of torch.save, and updates its checksum.
void replace_in_pickle(const std::string& path, const std::string& from, const std::string& to) {
  std::string bytes = read_file(path);
  const std::vector<ZipEntry> entries = read_zip(File::open_read(path));
  const auto is_pickle = [](const ZipEntry& e) { return e.name.ends_with("data.pkl"); };
  const ZipEntry& pickle = *std::find_if(entries.begin(), entries.end(), is_pickle);
  const auto replace_all = [&](size_t begin, size_t end, const std::string& a, const std::string& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t at = begin; (at = bytes.find(a, at)) < end; at += b.size()) bytes.replace(at, b.size(), b);
  };
  const size_t begin = static_cast<size_t>(pickle.offset), size = static_cast<size_t>(pickle.bytes);
  replace_all(begin, begin + size, from, to);
  const auto crc = ::crc32(0, reinterpret_cast<const Bytef*>(bytes.data() + begin), static_cast<uInt>(size));
  replace_all(0, bytes.size(), testing::le(pickle.crc32), testing::le(static_cast<u32>(crc)));
  write_file(path, bytes);
}

// At stage 0 the groups of the optimizers alone tell experts from MLPs of the same shapes beside them.
TEST_F(DeepSpeedDirectory, ExpertsThatNoGroupTellsFromDenseMlpsAreReadWithoutStates) {
  const auto open_changed = [&](const std::string& from, const std::string& to) {
    const std::string tag = copy("experts-residual-zero0-fp16");
    for (const char* rank : {"0", "1"})
      replace_in_pickle(tag + "/expp_rank_" + rank + "_mp_rank_00_optim_states.pt", from, to);
    std::string log;
    set_log_sink([&](LogLevel, std::string_view line) { log += line; });
    const auto state = open_deepspeed(dir_.path());
    set_log_sink({});
    for (const State s : {State::Master, State::ExpAvg, State::ExpAvgSq}) EXPECT_FALSE(state->has(s)) << from;
    EXPECT_EQ(state->params().size(), 33u);
    EXPECT_NE(log.find("weights are read without optimizer states: "), log.npos) << log;
    return log;
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(open_changed("moe", "mox"),
              HasSubstr("expp_rank_0_mp_rank_00_optim_states.pt: group 1 of the optimizer ('ep_size_2') has a state of "
                        "shape [9,7] that may be that of 'blocks.0.mlp.up.weight' or of "
                        "'blocks.0.deepspeed_moe.experts.deepspeed_experts.0.up.weight'"));
  EXPECT_THAT(open_changed("ep_size_2", "ep_size_4"),
              HasSubstr("group 1 of the optimizer ('ep_size_4') has experts of ep_size 4, and there are files "
                        "'expp_rank_*' of 2 ranks"));
  EXPECT_THAT(open_changed("ep_size_2", "ep_size_1"), HasSubstr("has experts of ep_size 1, and others have ep_size 2"));
  EXPECT_THAT(open_changed("exp_avg_sq", "exp_avg_xx"), HasSubstr("has no two moments of Adam for each parameter"));
  const std::string tag = copy("experts-residual-zero0-fp16") + "/expp_rank_";
  for (const char* rank : {"1", "0"}) {
    ASSERT_TRUE(fs::remove(tag + rank + "_mp_rank_00_optim_states.pt"));
    std::string log;
    set_log_sink([&](LogLevel, std::string_view line) { log += line; });
    EXPECT_FALSE(open_deepspeed(dir_.path())->has(State::ExpAvg));
    set_log_sink({});
    EXPECT_THAT(
        log, HasSubstr(fmt::format("has experts of ep_size 2, and there are files 'expp_rank_*' of {} ranks", rank)));
  }
}

TEST_F(DeepSpeedDirectory, GroupsOfExpertsThatAreDamagedAreNamed) {
  using namespace std::string_literals;
  const auto change = [&](const std::string& from, const std::string& to) {
    const std::string tag = copy("experts-residual-zero0-fp16");
    replace_in_pickle(tag + "/expp_rank_1_mp_rank_00_optim_states.pt", from, to);
  };
  change("ep_size_2", "ep_size_x");
  refused(Errc::Corrupt, "expp_rank_1_mp_rank_00_optim_states.pt: group 1 of the optimizer is of 'ep_size_x'");
  change("ep_size_2", "ep_size_0");
  refused(Errc::Corrupt, "which is no number of ranks");
  const std::string path = copy("experts-residual-zero0-fp16") + "/expp_rank_1_mp_rank_00_optim_states.pt";
  const std::string bytes = read_file(path), key = "moe";
  const size_t at = bytes.find(key), flag = bytes.find('\x88', at);  // NEWTRUE
  ASSERT_LT(flag - at, 16u);
  const std::string before = bytes.substr(at, flag - at);
  change(before + "\x88", before + "N");
  refused(Errc::Corrupt, "'moe' of group 1 of the optimizer is a ");
}

TEST_F(DeepSpeedDirectory, ExpertsOfAutoepInAnotherOrderAreRefused) {
  replace_in_pickle(copy("autoep-zero1-bf16") + "/mp_rank_00_model_states.pt", "expert_placement", "expert_placemenx");
  EXPECT_TRUE(open_deepspeed(dir_.path())->has(State::ExpAvg));  // as versions before wrote it
  replace_in_pickle(copy("autoep-zero1-bf16") + "/mp_rank_00_model_states.pt", "ranks", "rankx");
  refused(Errc::Unavailable, "'model.layers.0.mlp.experts.*' are not divided over ranks evenly and in order");
}

// As Lion saves it.
TEST_F(DeepSpeedDirectory, OneMomentAloneIsNoStateOfAdam) {
  const std::string tag = copy("zero1-fp16");
  for (const char* rank : {"0", "1"})
    replace_in_pickle(tag + "/zero_pp_rank_" + rank + "_mp_rank_00_optim_states.pt", "exp_avg_sq", "exp_avg_xx");
  const auto state = open_deepspeed(dir_.path());
  EXPECT_TRUE(state->has(State::Master));
  EXPECT_FALSE(state->has(State::ExpAvg));
  EXPECT_FALSE(state->has(State::ExpAvgSq));
}

TEST_F(DeepSpeedDirectory, AStateOfAnotherShapeThanItsParameterIsRefused) {
  using namespace std::string_literals;
  const std::string tag = copy("zero0-fp16");  // blocks.0.down.weight is the last of its masters
  replace_in_pickle(tag + "/mp_rank_00_model_states.pt", "K\x07K\x0f\x86r/\x01"s, "K\x07K\x0b\x86r/\x01"s);
  refused(Errc::Mismatch, "'blocks.0.down.weight' is of shape [7,15], and its master of shape [7,11]");
}

TEST_F(DeepSpeedDirectory, DamagedHeadersAreNamed) {
  const std::string path = copy("zero1-fp16") + "/zero_pp_rank_1_mp_rank_00_optim_states.pt", good = read_file(path);
  write_file(path, good.substr(0, good.size() / 2));
  refused(Errc::Corrupt, "zero_pp_rank_1_mp_rank_00_optim_states.pt");
  std::string flipped = good;
  flipped[good.find("single_partition")] ^= 1;  // in the pickle: its checksum is always looked at
  write_file(path, flipped);
  refused(Errc::Corrupt, "data.pkl' is damaged");
}

}  // namespace deepspeed_test
}  // namespace ds
