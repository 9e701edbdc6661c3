// SPDX-License-Identifier: Apache-2.0
// The section sparse_attention: the meaning of its keys when they are left out, together, with a model and with the
// length of its sequences.
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "unit/config_reading.h"

namespace ds {
namespace config_sparse_attention_test {

using ::testing::HasSubstr;
using namespace ds::testing;

constexpr std::string_view kLlama =
    R"("model": {"type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512})";

// A section beside others, of sequences of 512 tokens: 32 blocks of 16.
ConfigResult with(std::string_view section, std::string_view others = "") {
  return parse(fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "data": {{"seq_length": 512}},
                               "sparse_attention": {}{}{}}})",
                           section, others.empty() ? "" : ", ", others));
}

SparseAttentionConfig resolved(std::string_view section, std::string_view others = "") {
  const ConfigResult r = with(section, others);
  EXPECT_TRUE(r.diagnostics.empty()) << section << "\n" << to_string(r.diagnostics[0]);
  const Config again = good(resolved_json(r.config));
  EXPECT_EQ(again.sparse_attention, r.config.sparse_attention) << resolved_json(r.config);
  return r.config.sparse_attention;
}

TEST(ConfigSparseAttention, WithoutASectionThereIsNone) {
  EXPECT_EQ(good(R"({"train_batch_size": 1})").sparse_attention, SparseAttentionConfig());
  EXPECT_EQ(resolved("null"), SparseAttentionConfig());
  EXPECT_EQ(resolved(R"({"mode": "none"})"), SparseAttentionConfig());
  EXPECT_THAT(resolved_json(good(R"({"train_batch_size": 1})")), ::testing::Not(HasSubstr("sparse_attention")));
}

TEST(ConfigSparseAttention, ASectionWithoutAModeIsFixedAsInDeepSpeed) {
  SparseAttentionConfig fixed;
  fixed.mode = SparseAttentionMode::Fixed;
  fixed.unidirectional = true;
  EXPECT_EQ(resolved("{}"), fixed);
  EXPECT_EQ(resolved(R"({"mode": "FIXED"})"), fixed);
  fixed.block = 64;
  EXPECT_EQ(resolved(R"({"block": 64})"), fixed);
}

TEST(ConfigSparseAttention, DefaultsAreDeepSpeedsAndFollowMode) {
  EXPECT_EQ(resolved(R"({"mode": "bigbird"})").num_random_blocks, 1);
  EXPECT_EQ(resolved(R"({"mode": "bigbird", "num_random_blocks": 0})").num_random_blocks, 0);
  const SparseAttentionConfig variable = resolved(R"({"mode": "variable"})");
  EXPECT_EQ(variable.num_random_blocks, 0);
  EXPECT_EQ(variable.local_window_blocks, std::vector<i64>{4});
  EXPECT_EQ(variable.global_block_indices, std::vector<i64>{0});
  EXPECT_EQ(variable.global_block_end_indices, std::vector<i64>{});
  EXPECT_EQ(resolved(R"({"mode": "variable", "global_block_end_indices": null})"), variable);
}

// The resolved form for a short sequence is read back.
TEST(ConfigSparseAttention, WindowsMayBeWiderThanTheSequence) {
  for (const char* mode : {"bigbird", "bslongformer", "local"}) {
    for (const int tokens : {1, 16, 32, 40}) {
      const ConfigResult r = parse(fmt::format(R"({{"train_micro_batch_size_per_gpu": 1, "data": {{"seq_length": {}}},
                                                   "sparse_attention": {{"mode": "{}"}}}})",
                                               tokens, mode));
      ASSERT_TRUE(r.ok()) << r.message();
      EXPECT_EQ(good(resolved_json(r.config)).sparse_attention, r.config.sparse_attention) << mode << " " << tokens;
    }
  }
}

// 512 tokens over four ranks: eight chunks of 64.
TEST(ConfigSparseAttention, BlocksMeetInRings) {
  for (const auto& [mode, block, fits] : {std::tuple{"ring", 64, true}, {"ring", 128, false}, {"ulysses", 128, true}}) {
    const ConfigResult r = with(fmt::format(R"({{"block": {}}})", block),
                                fmt::format(R"("sequence_parallel_size": 4, "sequence_parallel_mode": "{}")", mode));
    const bool told = std::ranges::any_of(r.diagnostics, [](const Diagnostic& d) {
      return d.key == "sparse_attention.block" && d.message.find("do not meet in ring attention") != std::string::npos;
    });
    EXPECT_EQ(told, !fits) << mode << " " << block;
  }
}

TEST(ConfigSparseAttention, TheDirectionIsTheModels) {
  for (const char* mode : {"fixed", "variable", "bigbird", "bslongformer", "local", "dense"}) {
    const std::string section = fmt::format(R"({{"mode": "{}"}})", mode);
    EXPECT_TRUE(resolved(section).unidirectional) << mode;
    EXPECT_TRUE(resolved(section, kLlama).unidirectional) << mode;
    EXPECT_FALSE(resolved(section, R"("model": {"type": "bert", "vocab_size": 259, "hidden_size": 32,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64})")
                     .unidirectional)
        << mode;
  }
  EXPECT_FALSE(resolved(R"({"attention": "bidirectional"})", kLlama).unidirectional);
  EXPECT_TRUE(resolved(R"({"attention": "bidirectional", "horizontal_global_attention": true})", kLlama)
                  .horizontal_global_attention);
  // A layout from a file is causal if the model is.
  EXPECT_TRUE(resolved(R"({"mode": "layout", "layout": "blocks.h5"})", kLlama).unidirectional);
}

TEST(ConfigSparseAttention, TakesEveryKeyOfItsModes) {
  const SparseAttentionConfig fixed =
      resolved(R"({"mode": "fixed", "block": 32, "different_layout_per_head": true, "num_local_blocks": 8,
    "num_global_blocks": 2, "attention": "bidirectional", "horizontal_global_attention": true,
    "num_different_global_patterns": 4})");
  EXPECT_EQ(fixed.num_different_global_patterns, 4);
  const SparseAttentionConfig variable = resolved(R"({"mode": "variable", "num_random_blocks": 2,
    "local_window_blocks": [1, 2, 4.0], "global_block_indices": [0, 9], "global_block_end_indices": [1, 40],
    "attention": "unidirectional"})");
  EXPECT_EQ(variable.local_window_blocks, (std::vector<i64>{1, 2, 4}));
  EXPECT_EQ(variable.global_block_end_indices, (std::vector<i64>{1, 40}));
  EXPECT_EQ(resolved(R"({"mode": "bslongformer", "num_sliding_window_blocks": 5, "global_block_indices": [3]})")
                .num_sliding_window_blocks,
            5);
  EXPECT_EQ(resolved(R"({"mode": "layout", "layout": "blocks.json"})").layout, "blocks.json");
}

TEST(ConfigSparseAttention, RefusesWhatContradictsItself) {
  const struct {
    std::string_view section, message, others = "";
  } cases[] = {
      {R"({"mode": "fixd"})", "did you mean \"fixed\"?"},
      {R"({"mode": 1})", R"(must be one of "none", "dense", "fixed")"},
      {R"(true)", "sparse_attention: must be an object, not true"},
      {R"({"num_local_block": 4})", "did you mean sparse_attention.num_local_blocks?"},
      {R"({"block": 24})", "sparse_attention.block: 24 tokens are no block; 16, 32, 64 and 128 are"},
      {R"({"num_local_blocks": 6, "num_global_blocks": 4})",
       "num_global_blocks: the 6 blocks of a window are no multiple of 4 global ones; 2 would do"},
      {R"({"num_global_blocks": 0})", "must be an integer, 1 to"},
      {R"({"attention": "both"})", R"(must be one of "bidirectional", "unidirectional")"},
      {R"({"attention": "unidirectional", "horizontal_global_attention": true})",
       "horizontal_global_attention: needs sparse_attention.attention \"bidirectional\""},
      {R"({"horizontal_global_attention": true})", "which a causal model takes, too"},
      {R"({"attention": "unidirectional"})", "attention: a model of type \"bert\" attends to what comes before and",
       R"("model": {"type": "bert", "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 64})"},
      {R"({"num_different_global_patterns": 2})", "set sparse_attention.different_layout_per_head to true"},
      {R"({"num_different_global_patterns": 3, "num_global_blocks": 2, "different_layout_per_head": true})",
       "3 patterns are more than places of 2 global blocks in a window of 4: at most 2"},
      {R"({"mode": "local", "num_sliding_window_blocks": 4})",
       "4 is even, and as many blocks are seen before as behind"},
      {R"({"mode": "variable", "local_window_blocks": []})", "local_window_blocks: is empty"},
      {R"({"mode": "variable", "local_window_blocks": 4})", "must be an array of integers, 1 to 1000000000000, not 4"},
      {R"({"mode": "variable", "local_window_blocks": [4, 0]})", "must be an array of integers, 1 to"},
      {R"({"mode": "variable", "global_block_indices": []})", "global_block_indices: is empty"},
      {R"({"mode": "bslongformer", "global_block_indices": [-1]})", "must be an array of integers, 0 to"},
      {R"({"mode": "bslongformer", "global_block_indices": [1.5]})", "must be an array of integers"},
      {R"({"mode": "variable", "global_block_indices": [0, 4], "global_block_end_indices": [2]})",
       "has 1 ends of the 2 ranges"},
      {R"({"mode": "variable", "global_block_end_indices": []})", "has 0 ends of the 1 ranges"},
      {R"({"mode": "variable", "global_block_indices": [0, 4], "global_block_end_indices": [2, 4]})",
       "sparse_attention.global_block_end_indices[1]: 4 is not above the 4 at which the range begins"},
      {R"({"mode": "bigbird", "num_random_blocks": 33})",
       "num_random_blocks: 33 blocks are too many: a sequence has 32 (512 tokens in blocks of 16)"},
      {R"({"mode": "bigbird", "num_global_blocks": 5, "block": 128})", "5 blocks are too many: a sequence has 4"},
      {R"({"num_local_blocks": 64, "num_global_blocks": 64})", "64 blocks are too many"},
      {R"({"mode": "layout"})", "sparse_attention.layout: is missing"},
      {R"({"layout": "blocks.h5"})",
       "sparse_attention.layout: is a file for sparse_attention.mode \"layout\", which is \"fixed\""},
  };
  for (const auto& c : cases) {
    const ConfigResult r = with(c.section, c.others);
    ASSERT_FALSE(r.ok()) << c.section;
    EXPECT_EQ(r.code(), Errc::Config) << c.section;
    EXPECT_EQ(std::ranges::count(r.diagnostics, Severity::Error, &Diagnostic::severity), 1) << r.message();
    EXPECT_THAT(r.message(), HasSubstr(std::string(c.message))) << c.section;
  }
}

TEST(ConfigSparseAttention, AllMistakesAreReportedAtOnce) {
  const ConfigResult r = with(R"({"mode": "bigbird", "block": 17, "num_sliding_window_blocks": 2, "attention": 3})");
  EXPECT_EQ(r.diagnostics.size(), 3u) << r.message();
  const ConfigResult fixed =
      with(R"({"num_local_blocks": 4, "num_global_blocks": 3, "horizontal_global_attention": true})");
  EXPECT_EQ(fixed.diagnostics.size(), 2u) << fixed.message();
}

TEST(ConfigSparseAttention, LayoutsThatNoMemoryHoldsAreRefused) {
  const ConfigResult r = parse(R"({"train_batch_size": 1, "data": {"seq_length": 16777216}, "sparse_attention": {}})");
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.message(), HasSubstr("sparse_attention.block: 1 layouts of 1048576 x 1048576 blocks take 256.0 GiB"));
}

TEST(ConfigSparseAttention, KeysThatTheModeDoesNotUseAreWarningsAndDefaults) {
  const struct {
    std::string_view section, message;
  } cases[] = {
      {R"({"mode": "none", "block": 32})", "block: has no effect: sparse_attention.mode is \"none\""},
      {R"({"mode": "dense", "num_local_blocks": 8})",
       "num_local_blocks: has no effect: sparse_attention.mode is \"dense\", and this is for \"fixed\""},
      {R"({"mode": "local", "different_layout_per_head": true})",
       "this is for \"fixed\", \"variable\", \"bigbird\" and \"bslongformer\""},
      {R"({"mode": "bigbird", "global_block_indices": [3]})", "this is for \"variable\" and \"bslongformer\""},
      {R"({"mode": "dense", "attention": "bidirectional"})", "attention: has no effect"},
      {R"({"mode": "layout", "layout": "a.json", "num_sliding_window_blocks": 4})",
       "num_sliding_window_blocks: has no effect"},
      {R"({"mode": "bslongformer", "global_block_indices": [0, 32, 33]})",
       "global_block_indices: block 32 has no effect: a sequence has 32"},
  };
  for (const auto& c : cases) {
    const ConfigResult r = with(c.section);
    EXPECT_TRUE(r.ok()) << r.message();
    ASSERT_EQ(r.diagnostics.size(), 1u) << c.section;
    EXPECT_EQ(r.diagnostics[0].severity, Severity::Warning);
    EXPECT_THAT(to_string(r.diagnostics[0]), HasSubstr(std::string(c.message)));
    EXPECT_EQ(good(resolved_json(r.config)).sparse_attention, r.config.sparse_attention) << resolved_json(r.config);
  }
  EXPECT_EQ(with(R"({"mode": "local", "different_layout_per_head": true})").config.sparse_attention,
            resolved(R"({"mode": "local"})"));
}

TEST(ConfigSparseAttention, ArgumentsReachIt) {
  const std::vector<std::string> set = {"sparse_attention.mode=variable", "sparse_attention.local_window_blocks=[2,3]",
                                        "sparse_attention.local_window_blocks[2]=5"};
  EXPECT_EQ(good(R"({"train_batch_size": 1})", 1, set).sparse_attention.local_window_blocks,
            (std::vector<i64>{2, 3, 5}));
}

}  // namespace config_sparse_attention_test
}  // namespace ds
