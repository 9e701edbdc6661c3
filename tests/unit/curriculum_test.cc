// SPDX-License-Identifier: Apache-2.0
#include "config/curriculum.h"

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "unit/config_reading.h"

namespace ds::testing {
namespace curriculum_test {

using ::testing::HasSubstr;

std::string golden() {
  std::ifstream file(DS_TEST_DATA "/curricula.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

ConfigResult read(const Json& section, i64 seq_length = 4096) {
  const Json text = {{"train_batch_size", 2}, {"data", {{"seq_length", seq_length}}}, {"curriculum_learning", section}};
  return parse_config(text.dump(), "curricula.json", {}, 1, ConfigUse::Inspect);
}

// DeepSpeed's own scheduler, over ten thousand steps.
TEST(Curriculum, IsThatOfTheOriginal) {
  const Json cases = Json::parse(golden());
  ASSERT_GT(cases.size(), 12u);
  for (const Json& c : cases) {
    SCOPED_TRACE(c.at("curriculum").dump());
    const ConfigResult r = read(c.at("curriculum"));
    ASSERT_TRUE(r.ok()) << r.message();
    EXPECT_TRUE(r.diagnostics.empty());
    const CurriculumConfig& curriculum = r.config.curriculum;
    i64 sum = 0;
    std::vector<i64> seen;
    for (i64 n = 1; n <= 10000; ++n) {
      const i64 length = curriculum_length(curriculum, n);
      sum += (n % 97 + 1) * length;
      if (seen.empty() || seen.back() != length) seen.push_back(length);
    }
    EXPECT_EQ(sum, c.at("length_sum").get<i64>());
    for (const Json& point : c.at("length_at"))
      EXPECT_EQ(curriculum_length(curriculum, point.at(0).get<i64>()), point.at(1).get<i64>()) << point.dump();
    // The lengths that are checked before a run are those that it comes to.
    const std::vector<i64> lengths = curriculum_lengths(curriculum, 1 << 24);
    EXPECT_TRUE(std::ranges::is_sorted(lengths));
    for (const i64 length : seen) EXPECT_TRUE(std::ranges::binary_search(lengths, length)) << length;
    const i64 last = curriculum.total_curriculum_step;
    if (last > 0 && last < 10000) {
      EXPECT_EQ(lengths, seen);
    }
  }
}

Json linear(Json more = Json::object()) {
  Json section = {{"enabled", true},
                  {"curriculum_type", "seqlen"},
                  {"min_difficulty", 8},
                  {"max_difficulty", 64},
                  {"schedule_type", "fixed_linear"},
                  {"schedule_config", {{"total_curriculum_step", 100}, {"difficulty_step", 8}}}};
  section.merge_patch(more);
  return section;
}

TEST(Curriculum, MistakesNameTheirKey) {
  const struct {
    Json section;
    std::string_view message;
  } cases[] = {
      {linear({{"schedule_type", "custom"}}), "\"custom\" is not supported yet"},
      {linear({{"schedule_type", "linear"}}), "curriculum_learning.schedule_type"},
      {linear({{"curriculum_type", "vocab"}}), "curriculum_learning.curriculum_type"},
      {linear({{"max_difficulty", nullptr}}), "curriculum_learning.max_difficulty: is missing"},
      {linear({{"min_difficulty", 72}}), "72 is above curriculum_learning.max_difficulty, 64"},
      {linear({{"min_difficulty", 0}}), "curriculum_learning.min_difficulty: must be"},
      {linear({{"schedule_config", {{"total_curriculum_step", nullptr}}}}), "total_curriculum_step: is missing"},
      {linear({{"schedule_config", {{"difficulty_steps", 3}}}}), "difficulty_step?"},
      {linear({{"schedule_type", "fixed_discrete"}}), "schedule_config.difficulty: is missing"},
      {linear(
           {{"schedule_type", "fixed_discrete"}, {"schedule_config", {{"difficulty", {1, 2}}, {"max_step", {1, 2}}}}}),
       "max_step: has 2 numbers for the 2 of"},
      {linear({{"schedule_type", "fixed_discrete"},
               {"schedule_config", {{"difficulty", {1, 2, 3}}, {"max_step", {5, 5}}}}}),
       "max_step: must be steps that grow"},
  };
  for (const auto& c : cases) {
    const ConfigResult r = read(c.section);
    ASSERT_FALSE(r.ok()) << c.section.dump();
    EXPECT_THAT(r.message(), HasSubstr(std::string(c.message))) << c.section.dump();
  }
  EXPECT_TRUE(read({{"enabled", false}}).diagnostics.empty());
  EXPECT_FALSE(read({{"enabled", false}}).config.curriculum.enabled);
}

TEST(Curriculum, LengthsThatDoNotFitAreFoundBeforeTheRun) {
  const auto message = [](const std::string& more, int world) {
    const std::string text =
        R"({"train_micro_batch_size_per_gpu": 1, "data": {"seq_length": 64}, "curriculum_learning": )" +
        linear().dump() + ", " + more + "}";
    return parse(text, world).message();
  };
  const std::string model =
      R"("model": {"type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1,
    "n_head": 16})";
  EXPECT_THAT(message(model + R"(, "sequence_parallel_size": 16)", 16),
              HasSubstr("difficulty_step: makes sequences of 8 tokens: 8 tokens cannot be cut in 16 parts"));
  EXPECT_EQ(message(model + R"(, "sequence_parallel_size": 4)", 4), "");
  EXPECT_THAT(message(model + R"(, "tensor_parallel": {"tp_size": 16, "sequence_parallel": true})", 16),
              HasSubstr("the 8 rows of a micro-batch"));
  EXPECT_THAT(message(model + R"(, "sparse_attention": {"mode": "fixed"})", 1), HasSubstr("one length"));
  EXPECT_THAT(message(std::string(kBert), 1), HasSubstr("end with [SEP]"));
  EXPECT_THAT(message(model + R"(, "activation_checkpointing": {"cpu_checkpointing": true})", 1),
              HasSubstr("one length"));
  // Lengths are enumerated only below that of the samples, however many the schedule could reach; then the longest
  // follows.
  CurriculumConfig many;
  many.max_difficulty = 1 << 24;
  many.difficulty_step = 1;
  many.total_curriculum_step = kMostCount;
  EXPECT_EQ(curriculum_lengths(many, 9), (std::vector<i64>{1, 2, 3, 4, 5, 6, 7, 8, 1 << 24}));
  // Longer than samples are: whole samples.
  const ConfigResult r = read(linear(), 32);
  ASSERT_TRUE(r.ok()) << r.message();
  ASSERT_EQ(r.diagnostics.size(), 1u);
  EXPECT_THAT(r.diagnostics[0].message, HasSubstr("64 is beyond data.seq_length 32: samples are whole"));
}

TEST(Curriculum, IsWrittenAndReadBack) {
  for (const Json& section :
       {linear(), linear({{"schedule_type", "fixed_root"}, {"schedule_config", {{"root_degree", 3}}}}),
        Json{{"enabled", true},
             {"schedule_type", "fixed_discrete"},
             {"schedule_config", {{"difficulty", {8, 16, 64}}, {"max_step", {2, 10}}}}}}) {
    const std::string once = resolved_json(read(section).config);
    const ConfigResult again = parse(once, 1);
    EXPECT_TRUE(again.diagnostics.empty()) << once << again.message();
    EXPECT_EQ(resolved_json(again.config), once);
  }
}

}  // namespace curriculum_test
}  // namespace ds::testing
