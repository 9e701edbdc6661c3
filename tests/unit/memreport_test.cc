// SPDX-License-Identifier: Apache-2.0
// Predictions of ds-memreport for a run, against the plans of its ranks, one by one.

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "ds/memreport.h"
#include "mesh/from_config.h"
#include "run/gpu_kernels.h"
#include "run/plans.h"

namespace ds::memreport {
namespace memreport_test {

using ::testing::HasSubstr;

Config parse(const std::string& text, int ranks) {
  ConfigResult r = parse_config(text, "cfg", {}, ranks, ConfigUse::Inspect);
  EXPECT_TRUE(r.ok()) << r.message();
  return r.config;
}

constexpr const char* kLlama =
    R"({"model": {"type": "llama", "vocab_size": 1003, "max_position_embeddings": 128, "hidden_size": 96,
        "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192,
        "tie_word_embeddings": true}, "data": {"seq_length": 64}, "bf16": {"enabled": true},
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, )";

struct Case {
  const char* keys;
  int ranks;
};
class EveryRank : public ::testing::TestWithParam<Case> {};

TEST_P(EveryRank, HasWhatItsPlanSays) {
  const auto [keys, ranks] = GetParam();
  const Config config = parse(std::string(kLlama) + keys + "}", ranks);
  for (const DeviceKind device : {DeviceKind::Cpu, DeviceKind::Cuda}) {
    const Prediction p = predict(config, {.ranks = ranks, .nodes = 1}, device);
    std::vector<int> times(static_cast<size_t>(ranks), 0);
    std::map<std::string, bool> exact;  // by group and tag: met by one of its ranks
    i64 most = 0, host = 0;
    for (const RankGroup& g : p.groups) {
      for (const int rank : g.ranks) {
        ++times[rank];
        const run::WholePlan planned(config, mesh_shape(config, ranks), rank, device, ranks,
                                     run::kernels_of(config, run::kUnknownGpu));
        // Sums over tp of small parameters: the group has those of the rank with most.
        const auto agrees = [&](i64 of_group, i64 of_rank, const std::string& what) {
          const i64 small = planned.plan.mesh.tp > 1 ? 32 << 10 : 0;
          EXPECT_LE(of_rank, of_group) << rank << what;
          EXPECT_GE(of_rank, of_group - small) << rank << what;
          exact[what] |= of_rank == of_group;
        };
        std::map<std::string, i64> memory, traffic;
        for (const TagBytes& t : g.memory) memory[t.tag] = t.bytes;
        for (size_t t = 0; t < planned.memory().size(); ++t)
          agrees(memory[std::string(tag_name(static_cast<Tag>(t)))], planned.memory()[t],
                 fmt::format("{}.{}", g.ranks[0], tag_name(static_cast<Tag>(t))));
        for (const Traffic& t : g.traffic) traffic[t.name] = t.bytes;
        for (const auto& [name, count] : planned.plan.traffic.last)
          agrees(traffic[name], count.bytes, fmt::format("{}.{}", g.ranks[0], name));
        EXPECT_EQ(g.num_params, planned.plan.dp().layout.num_params());
        most = std::max(most, planned.total_memory());
        host += device == DeviceKind::Cpu ? planned.total_memory() : planned.memory()[static_cast<size_t>(Tag::Host)];
      }
    }
    EXPECT_EQ(times, std::vector<int>(times.size(), 1));
    for (const auto& [what, met] : exact) EXPECT_TRUE(met) << what;
    EXPECT_EQ(p.worst_group().device_bytes, most);
    EXPECT_NEAR(static_cast<double>(p.fullest.host_bytes), static_cast<double>(host),
                p.mesh.tp > 1 ? 1e-2 * static_cast<double>(host) : 0);
  }
}
INSTANTIATE_TEST_SUITE_P(
    Arrangements, EveryRank,
    ::testing::Values(Case{R"("seed": 1)", 1}, Case{R"("zero_optimization": {"stage": 3})", 4},
                      Case{R"("tensor_parallel": {"tp_size": 3})", 3},
                      Case{R"("tensor_parallel": {"tp_size": 3, "sequence_parallel": true},
                         "zero_optimization": {"stage": 1})",
                           6},
                      Case{R"("pipeline": {"stages": 3}, "zero_optimization": {"stage": 1})", 6},
                      Case{R"("pipeline": {"stages": 2}, "tensor_parallel": {"tp_size": 3}, "sequence_parallel_size": 2,
                         "activation_checkpointing": {"granularity": "layer", "cpu_checkpointing": true})",
                           24}));

TEST(Predict, CountsNodesAndRefusesUnevenOnes) {
  const Config config = parse(std::string(kLlama) + R"("pipeline": {"stages": 2}})", 4);
  const Prediction p = predict(config, {.ranks = 4, .nodes = 2}, DeviceKind::Cpu);
  ASSERT_EQ(p.groups.size(), 2u);
  EXPECT_EQ(p.fullest.host_bytes, 2 * p.worst_group().device_bytes);  // a stage is a node
  EXPECT_EQ(p.fullest.node, p.worst_group().ranks.front() / 2);
  EXPECT_GT(p.bubble_fraction, 0);
  EXPECT_THROW(predict(config, {.ranks = 4, .nodes = 3}, DeviceKind::Cpu), Error);
}

TEST(Predict, SaysTheSameInTextAndJson) {
  const Config config = parse(std::string(kLlama) + R"("pipeline": {"stages": 2}})", 2);
  const Prediction p = predict(config, {.ranks = 2, .nodes = 1}, DeviceKind::Cuda);
  EXPECT_THAT(text(p, false), HasSubstr("which need most"));
  EXPECT_THAT(text(p, true), ::testing::AllOf(HasSubstr("memory of rank 0"), HasSubstr("memory of rank 1")));
  EXPECT_THAT(json(p), HasSubstr(fmt::format("\"device_bytes\":{}", p.worst_group().device_bytes)));
}

class OpenSource : public ::testing::Test {
 protected:
  OpenSource() { std::filesystem::create_directories(dir_); }
  ~OpenSource() override { std::filesystem::remove_all(dir_); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(dir_ + "/" + name) << text;
    return dir_ + "/" + name;
  }
  const std::string dir_ = ::testing::TempDir() + "memreport-" + std::to_string(::getpid());
};

constexpr const char* kPublished =
    R"({"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})";

TEST_F(OpenSource, TakesConfigurationsAndModels) {
  const std::string set[] = {"zero_optimization.stage=3", "train_micro_batch_size_per_gpu=4"};
  const Source config = open_source(write("cfg.json", std::string(kLlama) + R"("seed": 1})"), set, 8);
  ASSERT_TRUE(config.config.ok()) << config.config.message();
  EXPECT_EQ(config.config.config.zero.stage, 3);
  EXPECT_EQ(config.config.config.batch.train, 4 * 4 * 8);
  const std::string file = write("config.json", kPublished);
  for (const std::string& path : {file, dir_}) {
    const Source model = open_source(path, {}, 2);
    ASSERT_TRUE(model.config.ok()) << model.config.message();
    EXPECT_EQ(model.config.config.model.vocab_size, 300);
    EXPECT_EQ(model.config.config.batch.train, 2);
    EXPECT_TRUE(model.config.config.bf16.enabled);
  }
}

TEST_F(OpenSource, TellsWhatIsWrong) {
  EXPECT_THAT(open_source(write("a.json", R"({"train_batch_size": 8})"), {}, 1).config.message(),
              HasSubstr("model: is missing"));
  EXPECT_THAT(open_source(write("b.json", R"({"train_batch_sise": 8})"), {}, 1).config.message(),
              HasSubstr("train_batch_size"));
  EXPECT_THAT(open_source(write("c.json", "{"), {}, 1).config.message(), HasSubstr("c.json:1"));
  EXPECT_THROW(open_source(dir_ + "/nothing", {}, 1), Error);
  EXPECT_THROW(open_source(dir_, {}, 1), Error);  // no checkpoint
}

}  // namespace memreport_test
}  // namespace ds::memreport
