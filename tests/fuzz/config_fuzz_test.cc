// SPDX-License-Identifier: Apache-2.0
// The configuration reader on damaged input: every file of the corpus, and thousands of deterministic mutations of it.
// It must never crash or throw; a refusal must be explained; an accepted file must survive resolved_json.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "ds/config.h"
#include "fuzz/rounds.h"

namespace ds {
namespace config_fuzz_test {

std::vector<std::string> corpus() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(DS_TEST_DATA "/../fuzz/corpus/config"))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> texts;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    std::stringstream s;
    s << in.rdbuf();
    texts.push_back(s.str());
  }
  return texts;
}

// Returns whether the text was accepted.
bool check(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const ConfigResult r = parse_config(text, "cfg", overrides, 2, ConfigUse::Inspect);
  for (const Diagnostic& d : r.diagnostics) {
    EXPECT_FALSE(d.message.empty()) << text;
    EXPECT_FALSE(d.source.empty()) << text;
    EXPECT_TRUE(d.code == Errc::Config || d.code == Errc::Unavailable) << to_string(d) << "\n" << text;
    // Without a key only when the text is no JSON object, or a --set argument is no assignment.
    EXPECT_TRUE(!d.key.empty() || r.diagnostics.size() == 1 || d.source.starts_with("--set")) << to_string(d) << text;
  }
  if (!r.ok()) return false;
  const std::string resolved = resolved_json(r.config);
  const ConfigResult again = parse_config(resolved, "resolved", {}, 2, ConfigUse::Inspect);
  EXPECT_TRUE(again.ok()) << text << "\n" << again.message();
  EXPECT_EQ(resolved_json(again.config), resolved) << text;
  return true;
}

using Random = std::minstd_rand;
size_t below(Random& random, size_t n) { return static_cast<size_t>(random()) % std::max<size_t>(n, 1); }

// Damages bytes: flips, deletes, repeats and inserts runs of what JSON is made of.
std::string damage(std::string text, const std::vector<std::string>& texts, Random& random) {
  static const std::vector<std::string> kTokens = {"{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ",",
                                                   ":",
                                                   "\"",
                                                   "\\",
                                                   "//",
                                                   "/*",
                                                   "*/",
                                                   "null",
                                                   "true",
                                                   "auto",
                                                   "\"auto\"",
                                                   "-1",
                                                   "1e400",
                                                   "NaN",
                                                   "\xff",
                                                   "\xe2\x82",
                                                   std::string(1, '\0'),
                                                   "\n",
                                                   "\"stage\":",
                                                   "\"model\":",
                                                   "{\"type\":\"gpt2\"}",
                                                   "99999999999999999999",
                                                   std::string(200, '[')};
  for (size_t edits = 1 + below(random, 4); edits > 0; --edits) {
    const size_t at = below(random, text.size() + 1);
    const size_t n = std::min(1 + below(random, 12), text.size() - at);
    switch (below(random, 6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 1: text.erase(at, n); break;
      case 2: text.insert(at, text.substr(at, n)); break;
      case 3: text.insert(at, kTokens[below(random, kTokens.size())]); break;
      case 4: text.replace(at, n, kTokens[below(random, kTokens.size())]); break;
      case 5: {
        const std::string& other = texts[below(random, texts.size())];
        text.insert(at, other.substr(below(random, other.size()), 40));
      }
    }
  }
  return text;
}

// Replaces one value somewhere in a tree that stays JSON, so that the damage gets past the parser to the tables.
void disturb(Json& value, Random& random) {
  static const Json kValues = Json::parse(
      R"([null, true, false, 0, 1, -1, 2, 3, 7, 1.5, 1e-30, 1e300, -1e300, 9223372036854775807, 18446744073709551615, "", "auto",
          "none", "cpu", "gpt2", "yarn", "x", "1e-4", [], [1], [1, 2], ["a", "b"], {}, {"enabled": true}, {"a": {"b": [{}]}}])");
  if (value.is_structured() && !value.empty() && below(random, 8) != 0) {
    auto it = value.begin();
    std::advance(it, below(random, value.size()));
    return disturb(*it, random);
  }
  value = kValues[below(random, kValues.size())];
}

TEST(ConfigFuzz, TheCorpusIsReadAsExpected) {
  const std::vector<std::string> texts = corpus();
  ASSERT_GE(texts.size(), 6u);
  size_t accepted = 0;
  for (const std::string& t : texts) accepted += check(t);
  EXPECT_EQ(accepted, texts.size() - 1);  // all but wrong.json
}

TEST(ConfigFuzz, DamagedBytesAreRefusedWithReasons) {
  const std::vector<std::string> texts = corpus();
  Random random(1);
  size_t accepted = 0;
  for (int i = 0; i < testing::rounds(4000) && !HasFailure(); ++i)
    accepted += check(damage(texts[below(random, texts.size())], texts, random));
  EXPECT_GT(accepted, 25u);  // some damage hits comments and blanks
}

TEST(ConfigFuzz, DisturbedValuesAreRefusedOrRoundTrip) {
  std::vector<Json> trees;
  for (const std::string& t : corpus()) trees.push_back(parse_json(t, "corpus").root);
  Random random(2);
  size_t accepted = 0;
  for (int i = 0; i < testing::rounds(4000) && !HasFailure(); ++i) {
    Json tree = trees[below(random, trees.size())];
    for (size_t edits = 1 + below(random, 3); edits > 0; --edits) disturb(tree, random);
    accepted += check(tree.dump());
  }
  EXPECT_GT(accepted, 100u);
}

TEST(ConfigFuzz, DamagedSetArgumentsAreRefusedWithReasons) {
  const std::vector<std::string> good = {"zero_optimization.stage=2", "data.train[0]=x",
                                         "optimizer.params.betas[1]=0.5",
                                         "model.rope_scaling={\"type\": \"linear\", \"factor\": 2}", "steps=10"};
  const std::string text = R"({"train_batch_size": 4, "data": {"train": ["a"]}})";
  Random random(3);
  for (int i = 0; i < testing::rounds(2000) && !HasFailure(); ++i)
    check(text, {damage(good[below(random, good.size())], good, random)});
}

}  // namespace config_fuzz_test
}  // namespace ds
