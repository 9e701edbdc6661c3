// SPDX-License-Identifier: Apache-2.0
// Masked language modelling: the contents of a sample, the number of chosen positions and their new values, that draws
// depend on seed, epoch and sample alone, and the source of the ids of the special tokens.
#include "data/objective.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "temp_directory.h"

namespace ds {
namespace objective_test {

using testing::TempDirectory;
using testing::write_file;

constexpr i64 kVocab = 1000;
constexpr i32 kCls = 1, kSep = 2, kMask = 3;
MlmConfig mlm(double probability = 0.15) {
  return {.probability = probability, .mask_token = kMask, .cls_token = kCls, .sep_token = kSep};
}

std::string bytes_of(const std::vector<u16>& tokens) {
  std::string bytes(tokens.size() * 2, '\0');
  std::memcpy(bytes.data(), tokens.data(), bytes.size());
  return bytes;
}

struct Sample {
  std::vector<i32> inputs, targets;
  explicit Sample(i64 n) : inputs(static_cast<size_t>(n), -7), targets(static_cast<size_t>(n), -7) {}
  bool operator==(const Sample&) const = default;
};

class MaskedTokens : public ::testing::Test {
 protected:
  // n tokens 10, 11, ...: none is special.
  TokenStream stream(i64 n) {
    std::vector<u16> tokens(static_cast<size_t>(n));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<u16>(10 + i % 900);
    return stream(tokens);
  }
  TokenStream stream(const std::vector<u16>& tokens) {
    write_file(dir / "tokens.bin", bytes_of(tokens));
    const std::string file = dir / "tokens.bin";
    return TokenStream(std::span(&file, 1), {.format = DataFormat::Bin});
  }
  static Sample make(const Objective& objective, const TokenStream& tokens, i64 sample, i64 T, RngKey key = {7, 1, 0}) {
    Sample s(T);
    objective.make_sample(tokens, sample, key, kVocab, s.inputs, s.targets);
    return s;
  }
  TempDirectory dir;
};

TEST_F(MaskedTokens, ASampleIsClsTextSepAndSharesNothing) {
  constexpr i64 T = 12;
  const auto objective = masked_tokens(mlm());
  EXPECT_EQ(objective->num_samples(29, T), 2);
  EXPECT_EQ(objective->num_samples(30, T), 3);
  EXPECT_EQ(objective->num_samples(9, T), 0);
  const TokenStream tokens = stream(30);
  for (i64 k = 0; k < 3; ++k) {
    const Sample s = make(*objective, tokens, k, T);
    EXPECT_EQ(s.inputs.front(), kCls);
    EXPECT_EQ(s.inputs.back(), kSep);
    EXPECT_EQ(s.targets.front(), -100);
    EXPECT_EQ(s.targets.back(), -100);
    i64 chosen = 0;
    for (i64 t = 1; t + 1 < T; ++t) {
      const i32 own = static_cast<i32>(10 + k * (T - 2) + t - 1), target = s.targets[t];
      if (target == -100) {
        EXPECT_EQ(s.inputs[t], own);
      } else {
        EXPECT_EQ(target, own);
        ++chosen;
      }
    }
    EXPECT_EQ(chosen, 2);  // 15 % of 10, rounded
  }
}

TEST_F(MaskedTokens, TheShareIsExactAndOneAtLeast) {
  const TokenStream tokens = stream(1000);
  const auto chosen = [&](double probability, i64 T) {
    const Sample s = make(*masked_tokens(mlm(probability)), tokens, 0, T);
    return T - std::count(s.targets.begin(), s.targets.end(), -100);
  };
  EXPECT_EQ(chosen(0.15, 3), 1);
  EXPECT_EQ(chosen(0.15, 5), 1);
  EXPECT_EQ(chosen(0.15, 102), 15);
  EXPECT_EQ(chosen(0.5, 102), 50);
  EXPECT_EQ(chosen(1, 102), 100);
}

// Over 20,000 chosen of 133,333 positions: 80, 10 and 10 %, every place as often, random tokens from the whole
// vocabulary.
TEST_F(MaskedTokens, FatesAndPlacesHaveTheirProbabilities) {
  constexpr i64 T = 22, kSamples = 6667;
  const auto objective = masked_tokens(mlm());
  const TokenStream tokens = stream(T - 2);
  i64 masked = 0, kept = 0, replaced = 0, below_half = 0;
  std::vector<i64> places(T);
  for (i64 k = 0; k < kSamples; ++k) {
    const Sample s = make(*objective, tokens, 0, T, {7, 1, static_cast<u32>(k)});
    for (size_t t = 0; t < s.targets.size(); ++t) {
      if (s.targets[t] == -100) continue;
      ++places[t];
      if (s.inputs[t] == kMask) {
        ++masked;
      } else if (s.inputs[t] == s.targets[t]) {
        ++kept;
      } else {
        ++replaced;
        below_half += s.inputs[t] < kVocab / 2;
      }
    }
  }
  const i64 all = 3 * kSamples;
  ASSERT_EQ(masked + kept + replaced, all);
  const auto near = [](i64 count, i64 of, double p) {  // within five standard deviations
    const double n = static_cast<double>(of);
    EXPECT_NEAR(static_cast<double>(count), p * n, 5 * std::sqrt(p * (1 - p) * n));
  };
  near(masked, all, 0.8);
  near(kept, all, 0.1);
  near(replaced, all, 0.1);
  near(below_half, replaced, 0.5);
  for (size_t t = 1; t + 1 < places.size(); ++t) near(places[t], kSamples, 0.15);
}

TEST_F(MaskedTokens, SpecialTokensOfTheTextAreNotChosen) {
  std::vector<u16> text(20, static_cast<u16>(kSep));
  text[4] = kMask, text[5] = 500, text[6] = kCls;
  const TokenStream tokens = stream(text);
  const Sample s = make(*masked_tokens(mlm(1)), tokens, 0, 22);
  for (size_t t = 0; t < s.targets.size(); ++t) EXPECT_EQ(s.targets[t], t == 6 ? 500 : -100);
  const Sample none = make(*masked_tokens(mlm()), stream(std::vector<u16>(20, static_cast<u16>(kSep))), 0, 22);
  EXPECT_EQ(std::count(none.targets.begin(), none.targets.end(), -100), 22);
}

TEST_F(MaskedTokens, DrawsAreThoseOfSeedEpochAndSample) {
  constexpr i64 T = 66;
  const auto objective = masked_tokens(mlm());
  const TokenStream tokens = stream(10 * (T - 2));
  const Sample one = make(*objective, tokens, 3, T);
  EXPECT_EQ(make(*objective, tokens, 3, T), one);
  EXPECT_NE(make(*objective, tokens, 3, T, {8, 1, 0}).targets, one.targets);
  EXPECT_NE(make(*objective, tokens, 3, T, {7, 1, 1}).targets, one.targets);
  const auto places = [](const Sample& s) {
    std::vector<bool> p;
    for (i32 t : s.targets) p.push_back(t != -100);
    return p;
  };
  EXPECT_NE(places(make(*objective, tokens, 4, T)), places(one));
}

// Masks are part of every run: a change of them would make resumed runs see other samples.
TEST_F(MaskedTokens, DrawsAreFrozen) {
  const Sample s = make(*masked_tokens(mlm(0.3)), stream(10), 0, 12, {1234, 1, 2});
  EXPECT_EQ(s.inputs, (std::vector<i32>{1, 10, 182, 12, 3, 14, 15, 16, 3, 18, 19, 2}));
  EXPECT_EQ(s.targets, (std::vector<i32>{-100, -100, 11, -100, 13, -100, -100, -100, 17, -100, -100, -100}));
}

// The batches of four steps of 12 samples from `consumed` on, in the canonical order (micro-batch, rank).
std::vector<i32> global_batches(const std::string& file, i64 micro, i64 ranks, i64 consumed, int steps) {
  constexpr i64 T = 22;
  const BatchLoader loader(TokenStream(std::span(&file, 1), {.format = DataFormat::Bin}), {micro, ranks, T}, 42, kVocab,
                           masked_tokens(mlm()));
  std::vector<i32> all, inputs(static_cast<size_t>(micro * T)), targets(inputs.size());
  for (int step = 0; step < steps; ++step, consumed += 12) {
    for (i64 j = 0; j < 12 / (micro * ranks); ++j) {
      for (i64 r = 0; r < ranks; ++r) {
        loader.load(consumed, j, r, inputs, targets);
        for (i64 row = 0; row < micro; ++row) {
          for (const auto* part : {&inputs, &targets})
            all.insert(all.end(), part->begin() + row * T, part->begin() + (row + 1) * T);
        }
      }
    }
  }
  return all;
}

TEST_F(MaskedTokens, AnyCutOfTheGlobalBatchIsMaskedAlikeAndResumesExactly) {
  stream(30 * 20);  // 30 samples: epochs end inside a step
  const std::string file = dir / "tokens.bin";
  const std::vector<i32> want = global_batches(file, 1, 1, 0, 8);
  for (const auto& [micro, ranks] : {std::pair{12, 1}, {2, 3}, {3, 4}, {1, 12}})
    EXPECT_EQ(global_batches(file, micro, ranks, 0, 8), want) << micro << " x " << ranks;
  std::vector<i32> parts = global_batches(file, 2, 2, 0, 3);
  const std::vector<i32> rest = global_batches(file, 3, 4, 36, 5);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, want);
}

TEST_F(MaskedTokens, AnotherEpochMasksAnewAndValidationNever) {
  constexpr i64 T = 66;
  const BatchLoader loader(stream(T - 2), {1, 1, T}, 42, kVocab, masked_tokens(mlm()));
  ASSERT_EQ(loader.num_samples(), 1);
  Sample first(T), second(T), validation(T), again(T);
  loader.load(0, 0, 0, first.inputs, first.targets);
  loader.load(1, 0, 0, second.inputs, second.targets);
  EXPECT_NE(first.targets, second.targets);
  loader.load_sequential(0, 0, validation.inputs, validation.targets);
  loader.load(5, 0, 0, again.inputs, again.targets);
  loader.load_sequential(0, 0, again.inputs, again.targets);
  EXPECT_EQ(validation, again);
  EXPECT_NE(validation.targets, first.targets);
}

// A tokenizer of which only the special tokens matter here.
class FakeTokenizer final : public Tokenizer {
 public:
  void encode(std::string_view, std::vector<i32>&) const override {}
  std::string decode(std::span<const i32>) const override { return ""; }
  std::string piece(i32) const override { return ""; }
  i64 vocab_size() const noexcept override { return kVocab; }
  std::optional<i32> special(SpecialToken t) const noexcept override {
    if (t == SpecialToken::Cls) return 101;
    if (t == SpecialToken::Sep) return 102;
    return std::nullopt;
  }
  std::string identity() const override { return "fake"; }
};

TEST(Objectives, IdsComeFromTheConfigurationAndElseFromTheTokenizer) {
  ModelConfig bert;
  bert.family = Family::Bert;
  bert.vocab_size = 500;
  DataConfig data;
  data.tokenizer = "vocab.txt";
  const FakeTokenizer tokenizer;
  EXPECT_ERROR(make_objective(bert, data, nullptr), Errc::Config, "data.mlm.mask_token is missing");
  EXPECT_ERROR(make_objective(bert, data, &tokenizer), Errc::Config, "the tokenizer 'vocab.txt' has none");
  data.mlm.mask_token = 103;
  EXPECT_EQ(make_objective(bert, data, &tokenizer)->description(),
            "masked tokens, probability 0.15, mask 103, cls 101, sep 102");
  data.mlm.sep_token = 7;
  EXPECT_EQ(make_objective(bert, data, &tokenizer)->description(),
            "masked tokens, probability 0.15, mask 103, cls 101, sep 7");
  data.mlm.mask_token = 500;
  EXPECT_ERROR(make_objective(bert, data, &tokenizer), Errc::Config, "500 is outside the model's vocabulary of 500");
  data.mlm.mask_token = 101;
  EXPECT_ERROR(make_objective(bert, data, &tokenizer), Errc::Config, "101 is also the token");
  EXPECT_EQ(make_objective(ModelConfig{}, data, nullptr)->description(), "next token");
}

}  // namespace objective_test
}  // namespace ds
