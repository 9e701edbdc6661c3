// SPDX-License-Identifier: Apache-2.0
#include "infer/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace ds::testing {
namespace sampler_test {

using infer::Sampler;
using infer::Sampling;

constexpr int kDraws = 20000;

// A text of so many tokens, all of which were given.
std::span<const i32> text_of(i64 length) {
  static const std::vector<i32> zeros(kDraws);
  return {zeros.data(), static_cast<size_t>(length)};
}

TEST(Sampler, TemperatureZeroTakesTheFirstOfTheMostLikely) {
  Sampler sampler;
  for (const auto& [logits, first] : {std::pair{std::vector<float>{1, 3, 2, 3, -1}, 1},
                                      {std::vector<float>{-4, -2, -3, -2}, 1},
                                      {std::vector<float>{-1, -0.0f, 0, -2}, 1}}) {
    for (i64 position = 0; position < 20; ++position)
      EXPECT_EQ(sampler.sample(logits, {.temperature = 0}, text_of(position), position), first);
  }
}

// The filters of transformers one after the other, each on the normalised probabilities that the others have left.
std::vector<double> filtered(const std::vector<float>& logits, const Sampling& o) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(logits.size(), 0);
  const auto normalise = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  for (size_t i = 0; i < order.size(); ++i) {
    if (o.top_k == 0 || static_cast<i64>(i) < o.top_k)
      p[order[i]] = std::exp(static_cast<double>(logits[order[i]]) / o.temperature);
  }
  normalise();
  double before = 0;
  for (const size_t id : order) {
    const double mine = p[id];
    if (before >= o.top_p) p[id] = 0;
    before += mine;
  }
  normalise();
  const double least = o.min_p * *std::ranges::max_element(p);
  for (double& x : p) x = x < least ? 0 : x;
  normalise();
  return p;
}

TEST(Sampler, DrawsByTheFilteredProbabilities) {
  const std::vector<float> logits{0.5f, 2.0f, -1.0f, 2.0f, 1.0f, 0.0f};
  Sampler sampler;
  for (const double temperature : {0.7, 1.0, 2.5}) {
    for (const i64 top_k : {0, 1, 2, 3, 6, 99}) {
      for (const double top_p : {1.0, 0.9, 0.5, 0.01}) {
        for (const double min_p : {0.0, 0.2, 1.0}) {
          const Sampling o{.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = 9};
          const std::vector<double> want = filtered(logits, o);
          std::vector<int> drawn(logits.size());
          for (i64 position = 0; position < kDraws; ++position)
            ++drawn[static_cast<size_t>(sampler.sample(logits, o, text_of(position), position))];
          // Chi-square over the tokens that are left, beyond its 1 - 1e-9 quantile for 5 degrees of freedom.
          double chi = 0;
          for (size_t id = 0; id < logits.size(); ++id) {
            const double expected = want[id] * kDraws;
            ASSERT_TRUE(expected > 0 || drawn[id] == 0) << id;
            if (expected > 0) chi += (drawn[id] - expected) * (drawn[id] - expected) / expected;
          }
          EXPECT_LT(chi, 51) << temperature << " " << top_k << " " << top_p << " " << min_p;
        }
      }
    }
  }
}

TEST(Sampler, PenaltiesChangeTheLogitsOfTokensThatAreThere) {
  Sampler sampler;
  const std::vector<float> logits{4, 3, -1, -2};
  const std::vector<i32> text{0, 2, 0};
  const auto greedy = [&](Sampling o, i64 prompt) {
    o.temperature = 0;
    return sampler.sample(logits, o, text, prompt);
  };
  EXPECT_EQ(greedy({.repetition_penalty = 1.3}, 3), 0);  // 4 / 1.3
  EXPECT_EQ(greedy({.repetition_penalty = 1.4}, 3), 1);
  EXPECT_EQ(greedy({.presence_penalty = 1.5}, 3), 0);  // of generated tokens only
  EXPECT_EQ(greedy({.presence_penalty = 1.5}, 2), 1);
  EXPECT_EQ(greedy({.frequency_penalty = 0.75}, 2), 0);
  EXPECT_EQ(greedy({.frequency_penalty = 0.75}, 0), 1);  // twice
  EXPECT_EQ(greedy({.banned = {0}, .banned_for = 1}, 3), 1);
  EXPECT_EQ(greedy({.banned = {0}, .banned_for = 1}, 2), 0);  // one token has been written
  const std::vector<float> negative{-1, -1.2f};
  EXPECT_EQ(sampler.sample(negative, {.temperature = 0, .repetition_penalty = 1.3}, std::vector<i32>{0}, 1), 1);
}

TEST(Sampler, DependsOnSeedIndexAndPositionAlone) {
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 37) / 10;
  Sampler sampler, other;
  bool seeds_differ = false, indices_differ = false;
  for (i64 position = 0; position < 50; ++position) {
    const i32 id = sampler.sample(logits, {.seed = 1}, text_of(position), 0);
    EXPECT_EQ(id, other.sample(logits, {.seed = 1}, text_of(position), position));
    seeds_differ |= id != sampler.sample(logits, {.seed = 2}, text_of(position), 0);
    indices_differ |= id != sampler.sample(logits, {.seed = 1, .index = 1}, text_of(position), 0);
  }
  EXPECT_TRUE(seeds_differ);
  EXPECT_TRUE(indices_differ);
}

}  // namespace sampler_test
}  // namespace ds::testing
