// SPDX-License-Identifier: Apache-2.0
// A prompt as tokens: one that cannot be continued is refused, with the reason.

#include <gtest/gtest.h>

#include "ds/train.h"

namespace ds {
namespace generate_test {

Config config_of(Family family, i64 vocab) {
  Config config;
  config.model.family = family;
  config.model.vocab_size = vocab;
  config.model.max_positions = 24;
  config.data.tokenizer = "bytes";
  return config;
}

std::string refusal(const Config& config, std::string_view prompt, i64 max_tokens, Errc code) {
  try {
    encode_prompt(config, prompt, {.max_tokens = max_tokens});
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    return e.what();
  }
  return "";
}

TEST(Prompt, OneThatCannotBeContinuedIsRefused) {
  Config config = config_of(Family::Gpt2, 256);
  EXPECT_EQ(refusal(config, "", 3, Errc::Config), "the prompt is empty");
  EXPECT_EQ(refusal(config, "a", 23, Errc::Config), "");
  EXPECT_EQ(refusal(config, "ab", 23, Errc::Config),
            "the prompt (2 tokens by bytes) and 23 new tokens exceed the model's 24 positions");
  config.sparse_attention.mode = SparseAttentionMode::Fixed;
  config.data.seq_length = 16;
  EXPECT_EQ(refusal(config, "ab", 14, Errc::Config), "");
  EXPECT_EQ(refusal(config, "ab", 15, Errc::Config),
            "the prompt (2 tokens by bytes) and 15 new tokens exceed the 16 tokens (data.seq_length) that "
            "sparse_attention has a layout of");
  EXPECT_EQ(refusal(config_of(Family::Gpt2, 100), "xyz", 3, Errc::Mismatch),
            "the prompt has the token 120 (bytes), which is outside the model's vocabulary of 100");
  EXPECT_NE(refusal(config_of(Family::Bert, 256), "a", 3, Errc::Unavailable), "");
}

TEST(Prompt, ItsSessionHasRoomForTheCompletion) {
  const EncodedPrompt prompt = encode_prompt(config_of(Family::Gpt2, 256), "abc", {.max_tokens = 7});
  EXPECT_EQ(prompt.ids, (std::vector<i32>{97, 98, 99}));
  const SessionSizes sizes = session_sizes(prompt);
  EXPECT_EQ(sizes.at_once, 1);
  EXPECT_EQ(sizes.context, 10);
  EXPECT_EQ(sizes.chunk, 3);
  EXPECT_EQ(sizes.cached, 64);
}

}  // namespace generate_test
}  // namespace ds
