// SPDX-License-Identifier: Apache-2.0
// Tokens drawn from rows of logits: all back ends draw the oracle's, and leave logits as they were.

#include <array>
#include <functional>
#include <limits>
#include <random>

#include "parity/parity.h"

namespace ds::testing {
namespace sample_test {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr float kLeast = std::numeric_limits<float>::denorm_min();

class Rows {
 public:
  Rows(i64 n, i64 V, u32 seed) : logits(DType::F32, {n, V}), draws(static_cast<size_t>(n)), random_(seed) {}

  template <size_t N>
  double one_of(const std::array<double, N>& all) {
    return all[static_cast<size_t>(random_() % N)];
  }
  u64 number() { return random_(); }
  float normal() { return normal_(random_); }

  // Filters of every strength, each of them in about half of the rows.
  void randomize_draws() {
    const auto V = static_cast<double>(logits.view().dim(1));
    for (Draw& d : draws) {
      d.temperature = one_of(std::array{0.0, 1e-3, 0.7, 1.0, 1.0, 2.0, 1e3, 1e300});
      d.top_k = static_cast<i64>(one_of(std::array{0.0, 0.0, 0.0, 1.0, 2.0, V / 2, V - 1, V, V + 5}));
      d.top_p = one_of(std::array{1.0, 1.0, 1.0, 1e-9, 0.3, 0.9, 0.999999});
      d.min_p = one_of(std::array{0.0, 0.0, 0.0, 0.05, 1.0});
      d.random = one_of(std::array{0.0, 1.0, 1.0, 1.0, 1.0, 2.0}) == 1 ? number() : number() % 2 - 1;
    }
  }
  // Penalties and bans of some ids of every other row, and now and then of all.
  void randomize_changes() {
    const i64 V = logits.view().dim(1);
    for (size_t r = 0; r < draws.size(); r += 2) {
      const bool all = number() % 8 == 0;
      const i64 step = all ? 1 : V / 6 + 1;
      draws[r].first_change = std::ssize(changes);
      for (i64 id = all ? 0 : static_cast<i64>(number() % static_cast<u64>(step)); id < V; id += step) {
        changes.push_back({.id = static_cast<i32>(id),
                           .repetition = static_cast<float>(one_of(std::array{1.0, 0.5, 1.3, 1e-30})),
                           .less = static_cast<float>(one_of(std::array{0.0, 0.5, -2.0, double{kInf}}))});
        if (all && r % 4 == 0) changes.back().less = kInf;
      }
      draws[r].num_changes = std::ssize(changes) - draws[r].first_change;
    }
  }

  Tensor logits;
  std::vector<Draw> draws;
  std::vector<LogitChange> changes;

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

std::vector<Tensor> draw(const OpTable& ops, Rows rows, Stream& s) {
  const Tensor before = rows.logits;
  const i64 n = before.view().dim(0);
  Tensor tokens(DType::I32, {n}), most_likely(DType::I32, {n});
  ops.sample(tokens, most_likely, rows.logits, rows.draws.data(), rows.changes.data(), s);
  expect_same_bits(rows.logits, before, "logits after a draw");
  return {tokens, most_likely};
}

void expect_the_oracles(const Rows& rows, const std::string& what) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const std::vector<Tensor> want = draw(ref_ops(), rows, s);
  for (const OpTable* ops : backends()) {
    const std::vector<Tensor> got = draw(*ops, rows, s);
    for (size_t r = 0; r < rows.draws.size(); ++r) {
      const Draw& d = rows.draws[r];
      const auto at = static_cast<i64>(r);
      ASSERT_EQ(got[0].at(at), want[0].at(at))
          << ops->name << " " << what << " row " << r << ": temperature " << d.temperature << " top_k " << d.top_k
          << " top_p " << d.top_p << " min_p " << d.min_p << " changes " << d.num_changes;
      ASSERT_EQ(got[1].at(at), want[1].at(at)) << ops->name << " " << what << " row " << r;
    }
  }
}

// Logits of a kind: x is a normal number, i counts.
struct Kind {
  const char* name;
  float (*logit)(float x, i64 i);
};
constexpr Kind kKinds[] = {
    {"normal", [](float x, i64) { return 3 * x; }},
    {"ties", [](float x, i64) { return std::round(2 * x) / 2; }},
    {"equal", [](float, i64) { return -1.5f; }},
    {"zeros", [](float, i64 i) { return i % 3 == 0 ? -0.0f : 0.0f; }},
    {"close", [](float x, i64) { return 20 + x * 1e-5f; }},
    {"far apart", [](float x, i64 i) { return i % 5 == 0    ? 50 * x
                                              : i % 7 == 0  ? -kMost
                                              : i % 11 == 0 ? kLeast
                                                            : x; }},
    {"largest", [](float x, i64 i) { return i % 9 == 4 ? kMost : x * 1e38f / 8; }},
};

Rows rows_of(const Kind& kind, i64 n, i64 V, u32 seed) {
  Rows rows(n, V, seed);
  for (i64 i = 0; i < n * V; ++i) rows.logits.set(i, kind.logit(rows.normal(), i));
  rows.randomize_draws();
  rows.randomize_changes();
  return rows;
}

TEST(Sample, DrawsAsTheOracle) {
  for (const i64 V : {1, 2, 33, 1000, 50257, 151936}) {
    const i64 n = V > 1000 ? 4 : test_device() != nullptr ? 40 : 300;
    for (const Kind& kind : kKinds) {
      expect_the_oracles(rows_of(kind, n, V, static_cast<u32>(V)), std::string(kind.name) + " " + std::to_string(V));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Sample, DoesNotDependOnThreadsOrOtherRows) {
  const Rows rows = rows_of(kKinds[0], 12, 700, 5);
  for (const OpTable* ops : backends()) {
    expect_same_for_any_threads([&](Stream& s) { return draw(*ops, rows, s); }, std::string(ops->name));
    ThreadPool pool(1);
    Stream s{.pool = &pool};
    const std::vector<Tensor> together = draw(*ops, rows, s);
    for (i64 r = 0; r < 12; ++r) {
      Rows one(1, 700, 0);
      for (i64 i = 0; i < 700; ++i) one.logits.set(i, rows.logits.at(r * 700 + i));
      one.draws = {rows.draws[static_cast<size_t>(r)]};
      one.changes = rows.changes;
      EXPECT_EQ(draw(*ops, one, s)[0].at(0), together[0].at(r)) << ops->name << " row " << r;
    }
  }
}

TEST(Sample, ARowThatIsNotFiniteHasNoToken) {
  for (const i64 V : {1, 33, 1500}) {
    for (const i64 at : {i64{0}, V / 2, V - 1}) {
      Rows rows = rows_of(kKinds[0], 7, V, 3);
      rows.logits.set(1 * V + at, kInf);
      rows.logits.set(3 * V + at, -kInf);
      rows.logits.set(4 * V + at, std::numeric_limits<float>::quiet_NaN());
      rows.logits.set(6 * V + at, -std::numeric_limits<float>::quiet_NaN());
      expect_the_oracles(rows, std::to_string(V));
      ThreadPool pool(1);
      Stream s{.pool = &pool};
      for (const OpTable* ops : backends()) {
        const std::vector<Tensor> got = draw(*ops, rows, s);
        for (const i64 r : {0, 1, 2, 3, 4, 5, 6}) {
          const bool sound = r == 0 || r == 2 || r == 5;
          for (const Tensor& t : got) EXPECT_EQ(t.at(r) >= 0, sound) << ops->name << " " << V << " row " << r;
        }
      }
    }
  }
}

// By hand: tokens come in the order of their probabilities, among equal ones the lowest ids first.
TEST(Sample, TheOrderIsThatOfProbabilities) {
  constexpr u64 kHalf = u64{1} << 63;
  for (const OpTable* ops : backends()) {
    ThreadPool pool(1);
    Stream s{.pool = &pool};
    const auto token = [&](const std::vector<float>& z, const Draw& d, const std::vector<LogitChange>& changes = {}) {
      Rows rows(1, std::ssize(z), 0);
      for (i64 i = 0; i < std::ssize(z); ++i) rows.logits.set(i, z[static_cast<size_t>(i)]);
      rows.draws = {d};
      rows.draws[0].num_changes = std::ssize(changes);
      rows.changes = changes;
      return draw(*ops, rows, s)[0].at(0);
    };
    const std::vector<float> z{1, 2, 2, 2, 2, 0};
    EXPECT_EQ(token(z, {.top_k = 2, .random = kHalf - 1}), 1) << ops->name;
    EXPECT_EQ(token(z, {.top_k = 2, .random = kHalf}), 2) << ops->name;
    EXPECT_EQ(token(z, {.top_k = 2, .random = ~u64{0}}), 2) << ops->name;
    EXPECT_EQ(token(z, {.top_k = 4, .top_p = 0.5, .random = ~u64{0}}), 2) << ops->name;
    EXPECT_EQ(token(z, {.top_k = 4, .top_p = 0.51, .random = ~u64{0}}), 3) << ops->name;
    EXPECT_EQ(token(z, {.min_p = 0.9, .random = ~u64{0}}), 4) << ops->name;
    EXPECT_EQ(token(z, {.random = 0}), 1) << ops->name;
    EXPECT_EQ(token(z, {.random = kHalf}), 3) << ops->name;
    EXPECT_EQ(token(z, {.random = kHalf / 8 * 15}), 0) << ops->name;
    EXPECT_EQ(token(z, {.random = ~u64{0}}), 5) << ops->name;
    EXPECT_EQ(token(z, {.temperature = 1e-3, .random = ~u64{0}}), 4) << ops->name;
    EXPECT_EQ(token(z, {.temperature = 0}, {{.id = 1, .less = 0.5f}, {.id = 2, .less = kInf}}), 3) << ops->name;
    EXPECT_EQ(token(z, {.random = ~u64{0}}, {{.id = 5, .less = kInf}}), 0) << ops->name;
  }
}

}  // namespace sample_test
}  // namespace ds::testing
