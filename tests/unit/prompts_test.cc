// SPDX-License-Identifier: Apache-2.0
// Prompts as tokens: all that cannot be continued are named, with their places.

#include "infer/prompts.h"

#include <gtest/gtest.h>

namespace ds {
namespace prompts_test {

ModelConfig model_of(Family family, i64 vocab) {
  ModelConfig model;
  model.family = family;
  model.vocab_size = vocab;
  model.max_positions = 24;
  return model;
}

std::string refusal(const ModelConfig& model, const std::vector<Prompt>& prompts, i64 max_tokens, Errc code) {
  try {
    infer::tokens_of(model, *open_tokenizer("bytes"), prompts, max_tokens);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    return e.what();
  }
  return "";
}

TEST(Prompts, AllThatCannotBeContinuedAreNamed) {
  const ModelConfig model = model_of(Family::Gpt2, 256), small = model_of(Family::Gpt2, 100);
  EXPECT_EQ(refusal(model, {{"a"}, {""}}, 3, Errc::Config), "prompt 2 is empty");
  EXPECT_EQ(refusal(model, {{""}}, 3, Errc::Config), "the prompt is empty");
  EXPECT_EQ(refusal(model, {{"a", "", "f:1"}, {"ab", "", "f:2"}, {"", "", "f:3"}}, 23, Errc::Config),
            "f:2: the prompt (2 tokens by bytes) and 23 new tokens exceed the model's 24 positions\n  f:3: the prompt "
            "is empty");
  EXPECT_EQ(refusal(small, {{"abc"}, {"xyz", "", "f:2"}}, 3, Errc::Mismatch),
            "f:2: the prompt has the token 120 (bytes), which is outside the model's vocabulary of 100");
  EXPECT_EQ(refusal(model, {}, 3, Errc::Config), "");
  const std::string many = refusal(model, std::vector<Prompt>(1000, Prompt{}), 3, Errc::Config);
  EXPECT_TRUE(many.ends_with("prompt 20 is empty\n  and 980 more")) << many;
  EXPECT_NE(refusal(model_of(Family::Bert, 256), {{"a"}}, 3, Errc::Unavailable), "");
}

}  // namespace prompts_test
}  // namespace ds
