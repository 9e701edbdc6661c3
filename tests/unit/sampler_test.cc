// SPDX-License-Identifier: Apache-2.0
#include "infer/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace ds::testing {
namespace sampler_test {

using infer::sample;

TEST(Sampler, TemperatureZeroTakesTheFirstOfTheMostLikely) {
  std::vector<i32> order;
  const std::vector<float> logits{1, 3, 2, 3, -1};
  for (i64 position = 0; position < 20; ++position) EXPECT_EQ(sample(logits, {.temperature = 0}, position, order), 1);
}

TEST(Sampler, DrawsBySoftmaxAmongTheTopK) {
  const std::vector<float> logits{0.5f, 2.0f, -1.0f, 2.0f, 1.0f, 0.0f};
  std::vector<i32> order;
  for (const double temperature : {0.7, 1.0, 2.5}) {
    for (const i64 top_k : {0, 1, 2, 3, 6, 99}) {
      std::vector<double> weight(logits.size(), 0);
      const std::vector<size_t> ranked{1, 3, 4, 0, 5, 2};  // of equal ones the first
      const size_t n = top_k == 0 ? 6 : static_cast<size_t>(std::min<i64>(top_k, 6));
      double total = 0;
      for (size_t i = 0; i < n; ++i)
        total += weight[ranked[i]] = std::exp(static_cast<double>(logits[ranked[i]]) / temperature);
      std::map<i32, int> drawn;
      constexpr int kDraws = 20000;
      for (i64 position = 0; position < kDraws; ++position)
        ++drawn[sample(logits, {.temperature = temperature, .top_k = top_k, .seed = 9}, position, order)];
      for (size_t id = 0; id < logits.size(); ++id) {
        const double p = weight[id] / total, sigma = std::sqrt(p * (1 - p) / kDraws);
        EXPECT_NEAR(static_cast<double>(drawn[static_cast<i32>(id)]) / kDraws, p, 5 * sigma + 1e-12)
            << "id " << id << " temperature " << temperature << " k " << top_k;
      }
    }
  }
}

TEST(Sampler, DependsOnSeedAndPositionAlone) {
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 37) / 10;
  std::vector<i32> order, other;
  bool seeds_differ = false;
  for (i64 position = 0; position < 50; ++position) {
    const i32 id = sample(logits, {.seed = 1}, position, order);
    EXPECT_EQ(id, sample(logits, {.seed = 1}, position, other));
    seeds_differ |= id != sample(logits, {.seed = 2}, position, order);
  }
  EXPECT_TRUE(seeds_differ);
}

}  // namespace sampler_test
}  // namespace ds::testing
