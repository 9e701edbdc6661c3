// SPDX-License-Identifier: Apache-2.0
#include "data/text_stream.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "data/tokenizer/unicode.h"
#include "test_data.h"

namespace ds::testing {
namespace text_stream_test {

// The text that each token adds, found by decoding all tokens again.
std::vector<std::string> by_decoding_all(const Tokenizer& tokenizer, std::vector<i32> ids, std::span<const i32> more) {
  std::vector<std::string> added;
  size_t known = tokenizer.decode(ids).size();
  const auto take = [&](std::string_view text) {
    added.emplace_back(text.substr(std::min(known, text.size())));
    known = text.size();
  };
  for (const i32 id : more) {
    ids.push_back(id);
    take(tokenizer::whole_characters(tokenizer.decode(ids)));
  }
  take(tokenizer.decode(ids));
  return added;
}

TEST(TextStream, AddsWhatDecodingAllTokensAgainWould) {
  std::vector<std::string> paths{"bytes"};
  for (const auto& entry : std::filesystem::directory_iterator(test_data("tokenizers")))
    if (entry.is_directory()) paths.push_back(entry.path());
  EXPECT_GT(paths.size(), 5u);
  for (const std::string& path : paths) {
    const auto tokenizer = open_tokenizer(path);
    std::mt19937 random(3);
    for (const bool words : {false, true}) {
      // Random tokens, whose bytes are most often no characters; and those of a text.
      std::vector<i32> ids;
      if (words) {
        tokenizer->encode(
            "The quick brown fox — über 12 Füße, naïve;  twice   spaced.\n\n日本語のテキスト 🙂🙂 "
            "don't "
            "it's",
            ids);
        for (const std::vector<i32> once = ids; ids.size() < 300;) ids.insert(ids.end(), once.begin(), once.end());
      } else {
        for (int i = 0; i < 300; ++i)
          ids.push_back(static_cast<i32>(random() % static_cast<u32>(tokenizer->vocab_size() + 1)));
      }
      for (const size_t length : {size_t{0}, size_t{1}, size_t{100}}) {
        const std::span<const i32> prompt = std::span(ids).first(length), more = std::span(ids).subspan(length);
        const auto want = by_decoding_all(*tokenizer, {prompt.begin(), prompt.end()}, more);
        TextStream stream(*tokenizer, prompt);
        for (size_t i = 0; i < more.size(); ++i)
          ASSERT_EQ(stream.push(more[i]), want[i]) << path << " token " << i << " behind " << length;
        EXPECT_EQ(stream.end(), want.back()) << path;
      }
    }
  }
}

}  // namespace text_stream_test
}  // namespace ds::testing
