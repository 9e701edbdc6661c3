// SPDX-License-Identifier: Apache-2.0
// How tokens are drawn: the probabilities that filters and penalties leave against transformers', and the share of each
// token among many draws against its probability. kernels agree bit for bit (parity/sample_test), so the CPU's best
// ones suffice.

#include "infer/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <set>
#include <span>
#include <vector>

#include "base/json.h"
#include "ds/kernels/thread_pool.h"
#include "test_data.h"

namespace ds::testing {
namespace sampler_test {

using infer::Sampling;

// The tokens of all draws from one row of logits.
std::vector<i32> sample(std::vector<float> logits, const std::vector<Draw>& draws, std::vector<LogitChange> changes) {
  const i64 n = std::ssize(draws), V = std::ssize(logits);
  std::vector<float> rows;
  for (i64 r = 0; r < n; ++r) rows.insert(rows.end(), logits.begin(), logits.end());
  std::vector<i32> tokens(draws.size()), most(draws.size());
  ThreadPool pool(1);
  Stream stream{.pool = &pool};
  const auto list = [&](std::vector<i32>& v) { return TensorView::of(v.data(), DType::I32, {n}); };
  cpu_ops()->sample(list(tokens), list(most), TensorView::of(rows.data(), DType::F32, {n, V}), draws.data(),
                    changes.data(), stream);
  return tokens;
}
i32 sample(const std::vector<float>& logits, const Sampling& o, std::span<const i32> text, i64 prompt) {
  std::vector<LogitChange> changes;
  const Draw draw = draw_of(o, text, prompt, changes);
  return sample(logits, {draw}, changes)[0];
}
// The tokens at the positions below `count` of a text.
std::vector<i32> sample_positions(const std::vector<float>& logits, const Sampling& o, size_t count) {
  const std::vector<i32> text(count);
  std::vector<Draw> draws;
  std::vector<LogitChange> changes;
  for (size_t n = 0; n < count; ++n)
    draws.push_back(draw_of(o, std::span(text).first(n), static_cast<i64>(n), changes));
  return sample(logits, draws, changes);
}

TEST(Sampler, TemperatureZeroTakesTheFirstOfTheMostLikely) {
  for (const auto& [logits, first] : {std::pair{std::vector<float>{1, 3, 2, 3, -1}, 1},
                                      {std::vector<float>{-4, -2, -3, -2}, 1},
                                      {std::vector<float>{-1, -0.0f, 0, -2}, 1}}) {
    for (const i32 token : sample_positions(logits, {.temperature = 0}, 20)) EXPECT_EQ(token, first);
  }
}

// ---- probabilities

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

// The probabilities with which tokens are really drawn. Tokens come in the order of their logits as the random number
// grows, so the number at which each one begins is found by bisection, for all tokens together.
std::vector<double> probabilities(const std::vector<float>& logits, const Sampling& o, std::span<const i32> text) {
  std::vector<LogitChange> changes;
  const Draw draw = draw_of(o, text, 0, changes);
  std::vector<float> z = logits;
  for (const LogitChange& c : changes) z[c.id] = z[c.id] < 0 ? z[c.id] * c.repetition : z[c.id] / c.repetition;
  std::vector<size_t> order(logits.size()), places(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return z[a] > z[b]; });
  for (size_t place = 0; place < order.size(); ++place) places[order[place]] = place;

  std::vector<Draw> draws(logits.size(), draw);
  std::vector<u64> begins(logits.size(), 0);  // by place: the largest number that draws an earlier one
  for (u64 bit = u64{1} << 63; bit != 0; bit >>= 1) {
    std::vector<LogitChange> all;  // each row has its own
    for (size_t place = 0; place < draws.size(); ++place) {
      draws[place].random = begins[place] | bit;
      draws[place].first_change = std::ssize(all);
      all.insert(all.end(), changes.begin(), changes.end());
    }
    const std::vector<i32> tokens = sample(logits, draws, all);
    for (size_t place = 0; place < draws.size(); ++place)
      if (places[static_cast<size_t>(tokens[place])] < place) begins[place] |= bit;
  }
  std::vector<double> p(logits.size());
  double end = 1;
  for (size_t place = p.size(); place-- > 0;) {
    const double begin = place == 0 ? 0 : std::ldexp(static_cast<double>(begins[place]), -64);
    p[order[place]] = end - begin;
    end = begin;
  }
  return p;
}

TEST(Sampler, ProbabilitiesAreThoseOfTransformers) {
  std::ifstream in(test_data("sampling") + "/expected.json");
  const Json expected = Json::parse(in);
  const auto text = expected["text"].get<std::vector<i32>>();
  for (const Json& one : expected["cases"]) {
    const Sampling o{.temperature = one.value("temperature", 1.0),
                     .top_k = one.value("top_k", 0),
                     .top_p = one.value("top_p", 1.0),
                     .min_p = one.value("min_p", 0.0),
                     .repetition_penalty = one.value("repetition_penalty", 1.0)};
    const auto logits = expected["logits"][one["row"].get<size_t>()].get<std::vector<float>>();
    const auto want = one["probabilities"].get<std::vector<double>>();
    const std::vector<double> got = probabilities(logits, o, text);
    for (size_t id = 0; id < want.size(); ++id) {
      EXPECT_NEAR(got[id], want[id], 1e-6 * want[id] + 1e-11) << one << " token " << id;
      EXPECT_EQ(got[id] > 1e-11, want[id] > 1e-11) << one << " token " << id;
    }
    if (HasFailure()) return;
  }
}

// ---- many draws

// Pearson's statistic of draws from the probabilities p, over tokens that are expected five times or more; the others
// count as one. Infinite if an impossible token was drawn.
struct ChiSquare {
  double value = 0;
  int degrees = -1;

  ChiSquare(const std::vector<i32>& tokens, const std::vector<double>& p) {
    std::vector<double> drawn(p.size());
    for (const i32 token : tokens) ++drawn[static_cast<size_t>(token)];
    double rare = 0, rare_drawn = 0;
    for (size_t id = 0; id < p.size(); ++id) {
      const double expected = p[id] * static_cast<double>(tokens.size());
      if (expected < 5) {
        rare += expected, rare_drawn += drawn[id];
        if (expected == 0 && drawn[id] > 0) value = HUGE_VAL;
      } else {
        add(drawn[id], expected);
      }
    }
    if (rare > 0) add(rare_drawn, rare);
  }
  // Above it are 10^-6 of all draws from p (Wilson and Hilferty, 1931).
  double bound() const {
    constexpr double kQuantile = 4.7534;
    const double k = std::max(degrees, 1), part = 2 / (9 * k);
    return k * std::pow(1 - part + kQuantile * std::sqrt(part), 3);
  }
  bool fits() const { return value <= bound(); }

 private:
  void add(double drawn, double expected) {
    value += (drawn - expected) * (drawn - expected) / expected;
    ++degrees;
  }
};

std::vector<float> some_logits(size_t n) {
  std::vector<float> logits(n);
  for (size_t i = 0; i < n; ++i) logits[i] = static_cast<float>((i * 29) % 61) / 10;  // no two are equal
  return logits;
}

// A correct sampler fails with a probability of 6e-6, and as the numbers are fixed, always or never. Draws by settings
// nearby do not pass for others, so a filter that is wrong would be noticed.
TEST(Sampler, DrawsByTheFilteredProbabilities) {
  constexpr size_t kDraws = 200000;
  const std::vector<float> logits = some_logits(50);
  struct Case {
    Sampling right;
    std::vector<Sampling> wrong;
  };
  const Case cases[] = {
      {{.seed = 1}, {{.temperature = 1.05}, {.top_k = 20}, {.top_p = 0.98}, {.min_p = 0.02}}},
      {{.temperature = 0.6, .seed = 2}, {{.temperature = 0.62}, {.temperature = 0.6, .top_k = 10}}},
      {{.temperature = 2.5, .top_k = 12, .seed = 3},
       {{.temperature = 2.5, .top_k = 11}, {.temperature = 2.5, .top_k = 13}, {.temperature = 4, .top_k = 12}}},
      {{.top_p = 0.8, .seed = 4}, {{.top_p = 0.75}, {.top_p = 0.85}, {.temperature = 1.1, .top_p = 0.8}}},
      {{.temperature = 1.5, .min_p = 0.1, .seed = 5},
       {{.temperature = 1.5, .min_p = 0.15}, {.temperature = 1.5, .min_p = 0.08}, {.temperature = 1.5}}},
      {{.temperature = 1.3, .top_k = 30, .top_p = 0.9, .min_p = 0.05, .seed = 6},
       {{.temperature = 1.3, .top_k = 30, .top_p = 0.9, .min_p = 0.3},
        {.temperature = 1.3, .top_k = 30, .top_p = 0.7, .min_p = 0.05},
        {.temperature = 1.3, .top_k = 8, .top_p = 0.9, .min_p = 0.05}}}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.right.seed);
    const std::vector<i32> tokens = sample_positions(logits, c.right, kDraws);
    const ChiSquare right(tokens, filtered(logits, c.right));
    EXPECT_TRUE(right.fits()) << right.value << ", bound " << right.bound();
    for (size_t i = 0; i < c.wrong.size(); ++i)
      EXPECT_FALSE(ChiSquare(tokens, filtered(logits, c.wrong[i])).fits()) << "wrong settings " << i;
  }
}

// Every combination of filters, with equal logits among them.
TEST(Sampler, FiltersCombine) {
  const std::vector<float> logits{0.5f, 2.0f, -1.0f, 2.0f, 1.0f, 0.0f};
  for (const double temperature : {0.7, 1.0, 2.5}) {
    for (const i64 top_k : {0, 1, 2, 3, 6, 99}) {
      for (const double top_p : {1.0, 0.9, 0.5, 0.01}) {
        for (const double min_p : {0.0, 0.2, 1.0}) {
          const Sampling o{.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = 9};
          const std::vector<double> want = filtered(logits, o), got = probabilities(logits, o, {});
          for (size_t id = 0; id < logits.size(); ++id)
            EXPECT_NEAR(got[id], want[id], 1e-6 * want[id] + 1e-11)
                << temperature << " " << top_k << " " << top_p << " " << min_p << " token " << id;
        }
      }
    }
  }
}

TEST(Sampler, PenaltiesChangeTheLogitsOfTokensThatAreThere) {
  const std::vector<float> logits{4, 3, -1, -2};
  const std::vector<i32> text{0, 2, 0};
  const auto greedy = [&](Sampling o, i64 prompt) {
    o.temperature = 0;
    return sample(logits, o, text, prompt);
  };
  EXPECT_EQ(greedy({.repetition_penalty = 1.3}, 3), 0);  // 4 / 1.3
  EXPECT_EQ(greedy({.repetition_penalty = 1.4}, 3), 1);
  EXPECT_EQ(greedy({.presence_penalty = 1.5}, 3), 0);  // of generated tokens only
  EXPECT_EQ(greedy({.presence_penalty = 1.5}, 2), 1);
  EXPECT_EQ(greedy({.frequency_penalty = 0.75}, 2), 0);
  EXPECT_EQ(greedy({.frequency_penalty = 0.75}, 0), 1);  // twice
  EXPECT_EQ(greedy({.banned = {0}, .banned_for = 1}, 3), 1);
  EXPECT_EQ(greedy({.banned = {0, 0}, .banned_for = 1}, 3), 1);
  EXPECT_EQ(greedy({.banned = {0}, .banned_for = 1}, 2), 0);  // one token has been written
  const std::vector<float> negative{-1, -1.2f};
  EXPECT_EQ(sample(negative, {.temperature = 0, .repetition_penalty = 1.3}, std::vector<i32>{0}, 1), 1);
}

TEST(Sampler, DependsOnSeedIndexAndPositionAlone) {
  std::vector<float> logits(1000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 37) / 10;
  const std::vector<i32> one = sample_positions(logits, {.seed = 1}, 50);
  std::vector<i32> text(50);
  for (size_t n = 0; n < text.size(); ++n) {
    EXPECT_EQ(sample(logits, {.seed = 1}, std::span(text).first(n), 0), one[n]);
    text[n] = 7;
  }
  EXPECT_NE(sample_positions(logits, {.seed = 2}, 50), one);
  EXPECT_NE(sample_positions(logits, {.seed = 1, .index = 1}, 50), one);
  EXPECT_GT(std::set<i32>(one.begin(), one.end()).size(), 30U);
}

}  // namespace sampler_test
}  // namespace ds::testing
