// SPDX-License-Identifier: Apache-2.0
// Keys about documents that have no effect beside the others are warned of, and no others.
#include "config/documents.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "config_reading.h"
#include "ds/sample_source.h"

namespace ds {
namespace config_documents_test {

using ::testing::HasSubstr;
using testing::kModel;

constexpr const char* kBertData = R"("mlm": {"mask_token": 256, "cls_token": 257, "sep_token": 258}, )";

struct OfProgram final : SampleSource {
  i64 count() const override { return 1; }
  void sample(i64, RngKey, std::span<i32>, std::span<i32>) const override {}
  std::string identity() const override { return "of the program"; }
};

ConfigResult read(bool is_bert, bool is_of_program, const std::string& data) {
  const std::string text =
      fmt::format(R"({{{}, "data": {{{}{}}}}})",
                  is_bert ? std::string(testing::kBert) : fmt::format(R"({}, "train_batch_size": 8)", kModel),
                  is_bert && !is_of_program ? kBertData : "", data);
  ProgramParts parts;
  if (is_of_program) parts.samples = std::make_shared<OfProgram>();
  return parse_config(text, "cfg", {}, 1, ConfigUse::Inspect, parts);
}

// The keys about documents that are said to have no effect, and why.
std::map<std::string, std::string> without_effect(const ConfigResult& r) {
  std::map<std::string, std::string> keys;
  for (const Diagnostic& d : r.diagnostics)
    if (d.severity == Severity::Warning && d.key.starts_with("data.")) keys[d.key.substr(5)] = d.message;
  return keys;
}

TEST(ConfigDocuments, ARotationThatDependsOnTheLengthOfSamplesIsRefused) {
  const auto error = [](const std::string& scaling, const std::string& data) {
    return parse_config(fmt::format(R"({{"model": {{"type": "llama", "vocab_size": 256, "hidden_size": 16,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64,
      "rope_scaling": {{{}}}}}, "train_batch_size": 8, "data": {{"train": "a.bin", {}}}}})",
                                    scaling, data),
                        "cfg", {}, 1, ConfigUse::Inspect)
        .message();
  };
  const std::string dynamic = R"("rope_type": "dynamic", "factor": 2)",
                    longrope = R"("rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2],
                                "original_max_position_embeddings": 32)";
  EXPECT_THAT(error(dynamic, R"("document_token": 0, "seq_length": 65)"), HasSubstr("beyond 64 tokens"));
  EXPECT_THAT(error(longrope, R"("document_token": 0, "packing": "best_fit", "seq_length": 33)"),
              HasSubstr("beyond 32 tokens"));
  EXPECT_THAT(error(longrope, R"("document_token": 0)"), HasSubstr("beyond 32 tokens"));  // seq_length 64
  for (const char* data : {R"("document_token": 0, "seq_length": 32)", R"("seq_length": 64)",
                           R"("document_token": 0, "seq_length": 64, "document_positions": "continue")",
                           R"("document_token": 0, "seq_length": 64, "separate_documents": false)"})
    EXPECT_EQ(error(longrope, data), "") << data;
  EXPECT_EQ(error(R"("rope_type": "linear", "factor": 2)", R"("document_token": 0, "seq_length": 64)"), "");
}

TEST(ConfigDocuments, KeysWithoutEffectAreWarnedOf) {
  const struct {
    const char* data;
    const char* key;
    const char* why;
    bool is_bert = false, is_of_program = false;
  } rows[] = {
      {R"("train": "a.bin", "document_token": 7, "separate_documents": false)", "document_token",
       "documents are neither separated nor packed"},
      {R"("train": "a.bin", "document_token": 7, "document_token_at": "begin", "separate_documents": false)",
       "document_token_at", "documents are neither separated nor packed"},
      {R"("train": "a.jsonl", "document_token_at": "end")", "document_token_at", "there is no data.document_token"},
      {R"("train": "a.jsonl", "document_token": 7, "add_document_token": true)", "add_document_token",
       "texts of JSONL, Parquet and Arrow get data.document_token without it"},
      {R"("train": "a", "format": "parquet", "document_token": 7, "add_document_token": false)", "add_document_token",
       "without it"},
      {R"("train": "a.bin", "document_token": 7, "packing": "best_fit", "loss_across_documents": false)",
       "loss_across_documents", "packed samples"},
      {R"("train": "a.bin", "document_token": 7, "document_token_at": "begin", "loss_across_documents": false)",
       "loss_across_documents", "a token that begins documents is always predicted"},
      {R"("train": "a.jsonl", "separate_documents": true, "loss_across_documents": false)", "loss_across_documents",
       "without data.document_token"},
      {R"("train": "a.bin", "loss_across_documents": true)", "loss_across_documents", "are not separated"},
      {R"("train": "a.bin", "document_token": 7, "loss_across_documents": false)", "loss_across_documents",
       "masked tokens", true},
      {R"("train": "a.bin", "document_positions": "restart")", "document_positions", "are not separated"},
      {R"("train": "a.bin", "packing": "best_fit", "separate_documents": false, "document_positions": "continue")",
       "document_positions", "are not separated"},
      {R"("document_token": 7, "separate_documents": false)", "document_token", "are not separated", false, true},
  };
  for (const auto& row : rows) {
    const ConfigResult r = read(row.is_bert, row.is_of_program, row.data);
    EXPECT_TRUE(r.ok()) << row.data << r.message();
    const auto keys = without_effect(r);
    ASSERT_TRUE(keys.contains(row.key)) << row.data;
    EXPECT_THAT(keys.at(row.key), HasSubstr("has no effect: ")) << row.data;
    EXPECT_THAT(keys.at(row.key), HasSubstr(row.why)) << row.data;
  }
}

// One value of each key in kKeys; -1: the key is not given.
using Choice = std::array<int, 7>;
constexpr std::array<const char*, 7> kKeys = {"document_token",
                                              "document_token_at",
                                              "add_document_token",
                                              "separate_documents",
                                              "document_positions",
                                              "loss_across_documents",
                                              "packing"};
constexpr size_t kToken = 0, kPlace = 1, kAdd = 2;
constexpr std::array<std::array<const char*, 2>, 7> kValues = {{{"7", "8"},
                                                                {R"("end")", R"("begin")"},
                                                                {"true", "false"},
                                                                {"true", "false"},
                                                                {R"("restart")", R"("continue")"},
                                                                {"true", "false"},
                                                                {R"("none")", R"("best_fit")"}}};

// Everything about documents that a run does.
using Behaviour = std::tuple<bool, bool, i64, bool, bool, bool, bool>;
Behaviour behaviour_of(const Config& c, bool has_texts, bool has_others) {
  const DataConfig& d = c.data;
  const bool packed = d.packing == DataPacking::BestFit, matters = d.separate_documents || packed;
  const bool uses_token = d.document_token >= 0 && (matters || has_texts);
  const bool begins = uses_token && d.document_token_at == DocumentTokenAt::Begin;
  return {d.separate_documents,
          packed,
          uses_token ? d.document_token : -1,
          begins,
          uses_token && matters && has_others && d.add_document_token,
          d.separate_documents && d.document_positions == DocumentPositions::Continue,
          d.separate_documents && !packed && c.model.causal() && d.document_token >= 0 &&
              (begins || d.loss_across_documents)};
}

// All combinations of all values: a key is warned of exactly if it could have another value, and that would not change
// the run.
TEST(ConfigDocuments, AKeyIsWarnedOfIfAndOnlyIfNoOtherValueWouldChangeTheRun) {
  const struct {
    const char* train;
    bool has_texts, has_others, is_bert = false, is_of_program = false;
  } sources[] = {{R"("train": "a.bin")", false, true},
                 {R"("train": "a.txt")", false, true},
                 {R"("train": ["a.jsonl", "a.txt"])", true, true},
                 {R"("train": "a.parquet")", true, false},
                 {R"("train": "a.parquet", "validation": "b.txt")", true, true},
                 {R"("split": 0.5)", true, true},  // the files are not known
                 {R"("train": "a.bin")", false, true, true},
                 {R"("seed": 1)", false, false, false, true}};
  int warned = 0, silent = 0;
  for (const auto& source : sources) {
    std::map<Choice, ConfigResult> results;
    Choice choice;
    const auto read_all = [&](const auto& self, size_t key) -> void {
      if (key == kKeys.size()) {
        std::string data = source.train;
        for (size_t k = 0; k < kKeys.size(); ++k)
          if (choice[k] >= 0)
            data += fmt::format(R"(, "{}": {})", kKeys[k], kValues[k][static_cast<size_t>(choice[k])]);
        results.emplace(choice, read(source.is_bert, source.is_of_program, data));
        return;
      }
      for (choice[key] = -1; choice[key] < 2; ++choice[key]) self(self, key + 1);
    };
    read_all(read_all, 0);
    for (const auto& [given, result] : results) {
      if (!result.ok()) continue;
      std::set<std::string> want;
      const Behaviour own = behaviour_of(result.config, source.has_texts, source.has_others);
      for (size_t k = 0; k < kKeys.size(); ++k) {
        if (given[k] < 0) continue;
        // The other value is an error: the place of a token that there is not, and texts that get theirs anyway.
        const bool is_contradicted =
            k == kPlace ? given[kToken] < 0 : k == kAdd && given[kToken] >= 0 && source.has_texts && !source.has_others;
        bool has_other = is_contradicted, changes = false;
        for (int other = -1; other < 2; ++other) {
          Choice changed = given;
          changed[k] = other;
          const ConfigResult& r = results.at(changed);
          if (!r.ok()) continue;
          has_other |= other >= 0 && other != given[k];
          changes |= behaviour_of(r.config, source.has_texts, source.has_others) != own;
        }
        if (has_other && !changes) want.insert(kKeys[k]);
      }
      std::set<std::string> got;
      for (const auto& [key, why] : without_effect(result)) got.insert(key);
      EXPECT_EQ(got, want) << source.train << " " << ::testing::PrintToString(given);
      (want.empty() ? silent : warned) += 1;
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(warned, 1000);
  EXPECT_GT(silent, 100);
}

}  // namespace config_documents_test
}  // namespace ds
