// SPDX-License-Identifier: Apache-2.0
// Ids and texts of the reference implementations: small tokenizers with the pipelines of published models, on texts of
// many scripts, and every code point through every normalizer (tests/golden/tokenizers, made by make_fixtures.py).
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "data/tokenizer.h"
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/unicode.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace tokenizer_reference_test {

using testing::read_file;
using testing::test_data;

std::vector<std::string> records() {
  return nlohmann::json::parse(read_file(test_data("tokenizers/records.json"))).get<std::vector<std::string>>();
}

class Reference : public ::testing::TestWithParam<const char*> {};

TEST_P(Reference, IdsAndTextsAreEqual) {
  const std::string folder = test_data(std::string("tokenizers/") + GetParam());
  const auto tokenizer = open_tokenizer(folder);
  std::ifstream expected(folder + "/expected.txt");
  const auto texts = records();
  ASSERT_GT(texts.size(), 70u);
  for (const std::string& text : texts) {
    std::string line;
    ASSERT_TRUE(std::getline(expected, line));
    std::istringstream numbers(line);
    const std::vector<i32> wanted{std::istream_iterator<i32>(numbers), {}};
    std::vector<i32> ids;
    tokenizer->encode(text, ids);
    EXPECT_EQ(ids, wanted) << text;
    for (const i32 id : ids) EXPECT_LT(id, tokenizer->vocab_size());
    ASSERT_TRUE(std::getline(expected, line));
    EXPECT_EQ(tokenizer->decode(wanted), nlohmann::json::parse(line).get<std::string>()) << text;
  }
  std::string more;
  EXPECT_FALSE(std::getline(expected, more));
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, Reference,
                         ::testing::Values("gpt2", "gpt2-files", "llama3", "qwen2", "o200k", "deepseek3", "llama2",
                                           "llama2-sp", "bert-cased", "bert-files", "bert-uncased", "mixed",
                                           "whitespace"),
                         [](const auto& p) {
                           std::string name = p.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

u32 crc32(std::string_view bytes) {
  u32 crc = ~0u;
  for (const char b : bytes) {
    crc ^= static_cast<u8>(b);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

// "a" + character + "\u0301b" for these characters of a block of 256.
std::string block_text(const tokenizer::Normalizer* normalizer, const std::vector<char32_t>& characters) {
  std::string all;
  for (const char32_t c : characters) {
    std::string text = "a";
    tokenizer::append_char(text, c);
    text += "\u0301b";
    if (normalizer != nullptr) normalizer->apply(text);
    all += text;
  }
  return all;
}

TEST(Unicode, EveryCharacterOfUnicode8IsNormalizedAsTheReferenceDoes) {
  std::map<u32, std::vector<char32_t>> known;  // by block
  std::map<std::string, std::map<u32, u32>> changed;
  std::ifstream in(test_data("tokenizers/unicode.txt"));
  std::string name;
  for (u32 a, b; in >> name >> std::hex >> a >> b;) {
    if (name != "known") changed[name][a] = b;
    for (u32 c = a; name == "known" && c <= b; ++c) known[c / 256].push_back(c);
  }
  ASSERT_EQ(changed.size(), 7u);
  ASSERT_GT(known.size(), 500u);
  for (const auto& [kind, blocks] : changed) {
    nlohmann::json part = {{"type", kind}};
    if (kind == "Bert")
      part = {{"type", "BertNormalizer"}, {"clean_text", true}, {"handle_chinese_chars", true}, {"lowercase", true}};
    const auto normalizer = tokenizer::make_normalizer(part, {"test", "normalizer"});
    for (const auto& [block, characters] : known) {
      const auto wanted = blocks.find(block);
      const u32 crc = wanted == blocks.end() ? crc32(block_text(nullptr, characters)) : wanted->second;
      EXPECT_EQ(crc32(block_text(normalizer.get(), characters)), crc) << kind << " of U+" << std::hex << block << "00";
    }
  }
}

}  // namespace tokenizer_reference_test
}  // namespace ds
