// SPDX-License-Identifier: Apache-2.0
// The ops of experts against the oracle and by their promises: the router, its gradients by finite differences and its
// losses, the order of choices, sums of rows.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "parity/finite_difference.h"
#include "parity/parity.h"

namespace ds::testing {
namespace experts_test {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

struct Routed {
  Tensor chosen, weights, scores;
};
Routed route(const OpTable& ops, const Tensor& logits, const Tensor* bias, i64 k, const RouterParams& p, int threads) {
  const i64 R = logits.view().dim(0), E = logits.view().dim(1);
  Routed out{Tensor(DType::I32, {R, k}), Tensor(DType::F32, {R, k}), Tensor(DType::F32, {R, E})};
  ThreadPool pool(threads);
  Stream stream{.pool = &pool};
  ops.route(out.chosen, out.weights, out.scores, logits, bias != nullptr ? bias->view() : TensorView{}, {}, p, stream);
  return out;
}

struct RouterCase {
  i64 R, E, k;
  RouterParams p{};
  bool bias = false;
  std::string name() const {
    return std::to_string(R) + " tokens " + std::to_string(k) + " of " + std::to_string(E) +
           (p.sigmoid ? " sigmoid" : "") + (p.normalise ? " normalised" : "") + (bias ? " bias" : "") + " groups " +
           std::to_string(p.chosen_groups) + "/" + std::to_string(p.groups) + (p.group_by_two ? " by two" : "");
  }
};
std::vector<RouterCase> router_cases() {
  std::vector<RouterCase> cases;
  for (const bool sigmoid : {false, true}) {
    for (const bool normalise : {false, true}) {
      const RouterParams p{.sigmoid = sigmoid, .normalise = normalise, .scale = 2.5f};
      cases.push_back({1, 1, 1, p});
      cases.push_back({1, 64, 8, p, true});
      cases.push_back({37, 7, 7, p});
      cases.push_back({70, 100, 3, p, true});
      for (const bool by_two : {false, true}) {
        RouterParams grouped = p;
        grouped.groups = 8, grouped.chosen_groups = 3, grouped.group_by_two = by_two;
        cases.push_back({33, 64, 6, grouped, true});
        grouped.groups = 33, grouped.chosen_groups = 5;
        cases.push_back({9, 66, 10, grouped});
        grouped.groups = grouped.chosen_groups = 5;
        cases.push_back({9, 5, 2, grouped});
      }
    }
  }
  return cases;
}

TEST(Experts, RoutesAsTheOracle) {
  for (const RouterCase& c : router_cases()) {
    const Tensor logits = Tensor(DType::F32, {c.R, c.E}).randomize(1, 2), bias = Tensor(DType::F32, {c.E}).randomize(2);
    const Routed want = route(ref_ops(), logits, c.bias ? &bias : nullptr, c.k, c.p, 1);
    for (const OpTable* ops : backends()) {
      const std::string what = std::string(ops->name) + " " + c.name();
      const Routed got = route(*ops, logits, c.bias ? &bias : nullptr, c.k, c.p, 2);
      expect_close(got.scores, want.scores, 16, what + ": scores");
      expect_same_bits(got.chosen, want.chosen, what + ": chosen");
      expect_close(got.weights, want.weights, 32, what + ": weights");
      if (HasFatalFailure()) return;
    }
  }
}

// Expected choices of one token, in order.
void expect_choice(const std::vector<float>& logits, const std::vector<float>& bias, const RouterParams& p,
                   const std::vector<i32>& want, const std::string& what) {
  const i64 E = static_cast<i64>(logits.size()), k = static_cast<i64>(want.size());
  Tensor z(DType::F32, {1, E}), b(DType::F32, {E});
  for (i64 e = 0; e < E; ++e) z.set(e, logits[static_cast<size_t>(e)]);
  for (i64 e = 0; e < E && !bias.empty(); ++e) b.set(e, bias[static_cast<size_t>(e)]);
  std::vector<const OpTable*> all = backends();
  all.push_back(&ref_ops());
  for (const OpTable* ops : all) {
    const Routed got = route(*ops, z, bias.empty() ? nullptr : &b, k, p, 1);
    for (i64 j = 0; j < k; ++j)
      EXPECT_EQ(got.chosen.view().as<i32>()[j], want[static_cast<size_t>(j)]) << ops->name << " " << what << " " << j;
  }
}

TEST(Experts, EqualScoresGoToTheLowestExpertAndNanIsTheLowestScore) {
  const RouterParams softmax, sigmoid{.sigmoid = true};
  for (const RouterParams& p : {softmax, sigmoid}) {
    expect_choice({1, 1, 1, 1, 1}, {}, p, {0, 1, 2}, "all equal");
    expect_choice({0, 3, 1, 3, 1, -2}, {}, p, {1, 3, 2, 4, 0, 5}, "pairs");
    expect_choice({0, 0, 0}, {0.0f, -0.0f, 0.0f}, p, {0, 1, 2}, "zeros of either sign");
    expect_choice({0, 1, 2, 3}, {kInf, 0, -kInf, 1}, p, {0, 3, 1, 2}, "infinite biases");
    expect_choice({0, 1, 2, 3}, {-kInf, kNan, -kInf, -kInf}, p, {0, 2, 3, 1}, "NaN is below -inf");
  }
  expect_choice({kNan, 2, kNan, -kInf, 5}, {}, sigmoid, {4, 1, 3, 0, 2}, "NaN logits, sigmoids");
  expect_choice({1, kNan, 2, 3}, {}, softmax, {0, 1, 2}, "NaN logits, softmax");
  expect_choice({kNan, kNan, kNan}, {}, sigmoid, {0, 1, 2}, "only NaN");
  expect_choice({-kInf, -kInf, 0, kInf}, {}, sigmoid, {3, 2, 0, 1}, "infinite logits");
  // Two groups of two, of which one counts: by its best score, or by the sum of two.
  RouterParams grouped{.sigmoid = true, .groups = 2, .chosen_groups = 1};
  expect_choice({3, -9, 2, 2}, {}, grouped, {0, 1}, "best group by one");
  expect_choice({2, 2, 2, 2}, {}, grouped, {0, 1}, "equal groups");
  grouped.group_by_two = true;
  expect_choice({3, -9, 2, 2}, {}, grouped, {2, 3}, "best group by two");
  expect_choice({9, kNan, 2, -9}, {}, grouped, {2, 3}, "a group with NaN");
}

// ---- gradients and losses

struct GradCase {
  RouterCase route;
  RouterLossParams loss{};
  bool stats = false, score_grad = false, targets = false, factor = false, counts = false;
};
std::vector<GradCase> grad_cases() {
  std::vector<GradCase> cases;
  for (const RouterCase& r : router_cases()) {
    cases.push_back({r});
    cases.push_back({r, {.balance = 0.3f}, true, true, true, true});
    cases.push_back({r, {.balance = 0.3f, .z = 0.2f}, true, true, true, true, true});
    cases.push_back({r, {.balance = 0.3f, .first_choices = true}, true, true, false, true, true});
    cases.push_back({r, {.z = 0.2f}, true, false, false, true});
    cases.push_back({r, {.balance = 0.3f, .z = 0.2f, .ignore_index = 7}, true, true, true, false});
  }
  return cases;
}
Tensor targets_of(i64 R, i32 ignored) {
  Tensor t(DType::I32, {R});
  for (i64 r = 0; r < R; ++r) t.view().as<i32>()[r] = r % 3 == 1 ? ignored : static_cast<i32>(r + 100);
  return t;
}

TEST(Experts, GradientsOfTheRouterAgreeWithTheOracle) {
  for (const GradCase& c : grad_cases()) {
    const i64 R = c.route.R, E = c.route.E, k = c.route.k;
    const Tensor logits = Tensor(DType::F32, {R, E}).randomize(3, 2),
                 dweights = Tensor(DType::F32, {R, k}).randomize(4),
                 score_grad = Tensor(DType::F32, {E}).randomize(5, 0.1f), targets = targets_of(R, c.loss.ignore_index);
    Tensor stats(DType::F32, {RouterStats{E}.size()}), factor(DType::F32, {1});
    for (i64 i = 0; i < stats.numel(); ++i) stats.set(i, i < E ? static_cast<float>(i % 5 + 1) : kNan);
    factor.fill(0.75f);
    const Routed routed = route(ref_ops(), logits, nullptr, k, c.route.p, 1);
    const auto gradient = [&](const OpTable& ops, int threads) {
      Tensor dlogits(DType::F32, {R, E});
      ThreadPool pool(threads);
      Stream s{.pool = &pool};
      const auto some = [](bool wanted, const Tensor& t) { return wanted ? t.view() : TensorView{}; };
      ops.route_grad(dlogits, dweights, routed.chosen, routed.scores, logits, some(c.score_grad, score_grad),
                     some(c.stats, stats), some(c.targets, targets), some(c.factor, factor), c.route.p, c.loss, s);
      return dlogits;
    };
    const Tensor want = gradient(ref_ops(), 1);
    for (const OpTable* ops : backends()) {
      // Sigmoids that are nearly 1 lose digits in 1 - s.
      expect_close(gradient(*ops, 2), want, 64, std::string(ops->name) + " " + c.route.name(), 0.05);
      if (HasFatalFailure()) return;
    }
  }
}

// The sum of dweights * weights and factor * losses, with the choice held; all in fp64.
TEST(Experts, GradientsOfTheRouterAreThoseOfFiniteDifferences) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const GradCase& c : grad_cases()) {
    const i64 R = std::min<i64>(c.route.R, 5), E = c.route.E, k = c.route.k;
    Doubles logits({R, E}), scores({R, E}), weights({R, k}), dweights({R, k}), dlogits({R, E}),
        stats({RouterStats{E}.size()}), loss({1}), score_grad({E}), factor({1}), bias({E}), more({E});
    logits.randomize(6, 2), dweights.randomize(7), bias.randomize(8);
    for (i64 e = 0; e < E; ++e) more.value[static_cast<size_t>(e)] = static_cast<double>(100 + e * e % 37);
    factor.value[0] = 0.75;
    Tensor chosen(DType::I32, {R, k});
    const Tensor targets = targets_of(R, c.loss.ignore_index);
    const TensorView counted = c.targets ? targets.view() : TensorView{},
                     on_choice = c.route.bias ? bias.view : TensorView{};
    const bool losses = c.loss.balance != 0 || c.loss.z != 0;
    const auto total = [&] {
      ref_ops().route(chosen, weights.view, scores.view, logits.view, on_choice, {}, c.route.p, s);
      if (!losses) return weights.dot(dweights);
      ref_ops().router_stats(stats.view, chosen, {}, scores.view, logits.view, counted, c.route.p, c.loss, s);
      ref_ops().router_loss(loss.view, score_grad.view, stats.view, c.counts ? more.view : TensorView{}, k, c.loss, s);
      return weights.dot(dweights) + 0.75 * loss.value[0];
    };
    total();
    ref_ops().route_grad(dlogits.view, dweights.view, chosen, scores.view, logits.view,
                         losses ? score_grad.view : TensorView{}, losses ? stats.view : TensorView{}, counted,
                         factor.view, c.route.p, c.loss, s);
    expect_gradient(logits, dlogits, total, c.route.name());
    if (HasFatalFailure()) return;
  }
}

TEST(Experts, StatisticsAndLossesAgreeWithTheOracle) {
  for (const i64 R : {0, 1, 31, 32, 33, 700, 9000}) {
    for (const bool sigmoid : {false, true}) {
      const i64 E = R > 1000 ? 12 : 70, k = 3;
      const RouterParams p{.sigmoid = sigmoid};
      const Tensor logits = Tensor(DType::F32, {R, E}).randomize(9, 2), targets = targets_of(R, -100);
      const Routed routed = route(ref_ops(), logits, nullptr, k, p, 1);
      Tensor more(DType::F32, {E});
      for (i64 e = 0; e < E; ++e) more.set(e, static_cast<float>(10000 + 7 * e));
      for (const auto& [all, counts] : {std::pair{false, TensorView{}}, {true, {}}, {false, more.view()}}) {
        struct Result {
          Tensor stats, loss, score_grad;
        };
        const RouterLossParams params{.balance = 0.01f, .z = 0.001f};
        const auto run = [&](const OpTable& ops, Stream& s) {
          Result out{Tensor(DType::F32, {RouterStats{E}.size()}), Tensor(DType::F32, {1}), Tensor(DType::F32, {E})};
          ops.router_stats(out.stats, routed.chosen, {}, routed.scores, logits, all ? TensorView{} : targets.view(), p,
                           params, s);
          ops.router_loss(out.loss, out.score_grad, out.stats, counts, k, params, s);
          return out;
        };
        ThreadPool one(1);
        Stream alone{.pool = &one};
        const Result want = run(ref_ops(), alone);
        for (const OpTable* ops : backends()) {
          const std::string what = std::string(ops->name) + " " + std::to_string(R) + (sigmoid ? " sigmoids" : "");
          const Result got = run(*ops, alone);
          for (const Tensor* t : {&got.stats, &want.stats}) {  // gating_test compares the report
            const TensorView report = t->view().rows(RouterStats{E}.report(), RouterStats::kReport);
            std::fill_n(report.as<float>(), RouterStats::kReport, 0.0f);
          }
          expect_close(got.stats, want.stats, 16, what + ": stats");
          expect_close(got.loss, want.loss, 16, what + ": loss");
          expect_close(got.score_grad, want.score_grad, 16, what + ": score_grad");
          expect_same_for_any_threads(
              [&](Stream& s) {
                const Result r = run(*ops, s);
                return std::vector{r.stats, r.loss, r.score_grad};
              },
              what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Tokens that spread evenly have the loss 1 times its coefficient, whatever k is; ln(E)^2 is the other.
TEST(Experts, LossesAtBalance) {
  constexpr i64 R = 8, E = 4;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const i64 k : {1, 2}) {
    Tensor logits(DType::F32, {R, E}), chosen(DType::I32, {R, k}), scores(DType::F32, {R, E}),
        stats(DType::F32, {RouterStats{E}.size()}), loss(DType::F32, {1}), score_grad(DType::F32, {E});
    logits.fill(0), scores.fill(0.25f);
    for (i64 i = 0; i < R * k; ++i) chosen.view().as<i32>()[i] = static_cast<i32>(i % E);
    for (const OpTable* ops : backends()) {
      const auto loss_of = [&](const RouterLossParams& p) {
        ops->router_stats(stats, chosen, {}, scores, logits, {}, {}, p, s);
        ops->router_loss(loss, score_grad, stats, {}, k, p, s);
        return loss.at(0);
      };
      EXPECT_FLOAT_EQ(loss_of({.balance = 0.5f}), 0.5f) << ops->name;
      EXPECT_FLOAT_EQ(score_grad.at(0), 0.5f / R) << ops->name;
      EXPECT_FLOAT_EQ(loss_of({.z = 1}), std::log(4.0f) * std::log(4.0f)) << ops->name;
    }
  }
}

// Counts of more tokens stand for the shares of experts: doubled ones change nothing.
TEST(Experts, TheBalanceLossComparesSharesOfTheCounts) {
  constexpr i64 R = 6, E = 3, k = 2;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  Tensor logits(DType::F32, {R, E}), chosen(DType::I32, {R, k}), stats(DType::F32, {RouterStats{E}.size()}),
      loss(DType::F32, {1}), score_grad(DType::F32, {E}), counts(DType::F32, {E});
  logits.randomize(9, 2);
  Tensor scores(DType::F32, {R, E});
  scores.randomize(10);
  for (i64 i = 0; i < R * k; ++i) chosen.view().as<i32>()[i] = static_cast<i32>(i % k == 0 ? 0 : 1 + i / k % 2);
  for (const OpTable* ops : backends()) {
    const auto loss_over = [&](const TensorView& more) {
      ops->router_stats(stats, chosen, {}, scores, logits, {}, {}, {}, s);
      ops->router_loss(loss, score_grad, stats, more, k, {.balance = 0.5f}, s);
      return loss.at(0);
    };
    const float own = loss_over({});
    for (i64 e = 0; e < E; ++e) counts.set(e, 2 * stats.at(e));
    EXPECT_FLOAT_EQ(loss_over(counts), own) << ops->name;
    const float some[E] = {7, 1, 2};
    double want = 0;
    for (i64 e = 0; e < E; ++e) {
      counts.set(e, some[e]);
      want += 0.5 * E / R * static_cast<double>(some[e]) / 10 * static_cast<double>(stats.at(E + e));
    }
    EXPECT_NEAR(loss_over(counts), want, 1e-6) << ops->name;
    for (i64 e = 0; e < E; ++e) EXPECT_FLOAT_EQ(score_grad.at(e), 0.5f * E / R * some[e] / 10) << ops->name;
  }
}

// ---- the balancing bias

// Counts of one expert may be the mean itself; large ones differ from it by one.
TEST(Experts, BiasesMoveByTheSignOfTheirDistanceFromTheMean) {
  constexpr float kRate = 0.001f;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  const RngKey key{17, 3, 0};
  u64 draw = 0;
  for (const i64 E : {1, 2, 5, 64, 257}) {
    for (const i64 most : {i64{3}, i64{1} << 24}) {
      Tensor counts(DType::F32, {E});
      i64 all = 0;
      for (i64 e = 0; e < E; ++e) {
        const i64 n = most > 3 && e > 0 ? most / 2 + static_cast<i64>(key.bits(draw++) % 3)
                                        : static_cast<i64>(key.bits(draw++)) % most;
        all += n;
        counts.set(e, static_cast<float>(n));
      }
      for (const i64 finite : {1, 0}) {
        for (const OpTable* ops : backends()) {
          Tensor bias(DType::F32, {E});
          for (i64 e = 0; e < E; ++e) bias.set(e, 0.25f * static_cast<float>(e % 7) - 0.5f);
          const GradVerdict verdict{.finite = finite};
          ops->balance_experts(bias, counts, kRate, &verdict, s);
          for (i64 e = 0; e < E; ++e) {
            const float before = 0.25f * static_cast<float>(e % 7) - 0.5f;
            const i64 above = E * static_cast<i64>(counts.at(e)) - all;
            const float want = finite == 0 || above == 0 ? before : above > 0 ? before - kRate : before + kRate;
            ASSERT_EQ(bias.at(e), want) << ops->name << " " << E << " " << e;
          }
        }
      }
    }
  }
}

// ---- the order of choices

struct Sorted {
  Tensor offsets, places, tokens, choices;
};
Sorted sort(const OpTable& ops, const Tensor& chosen, i64 E, i64 first, Stream& s) {
  const i64 R = chosen.view().dim(0), k = chosen.view().dim(1);
  Sorted out{Tensor(DType::I32, {E + 1}), Tensor(DType::I32, {R, k}), Tensor(DType::I32, {R * k}),
             Tensor(DType::I32, {R * k})};
  ops.sort_choices(out.offsets, out.places, out.tokens, out.choices, chosen, first, s);
  return out;
}

TEST(Experts, NoTokenIsLostOrDoubled) {
  const std::vector<const OpTable*> all = backends();
  const i64 routings = test_device() != nullptr ? 200 : 100000;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const RngKey key{11, 1, 0};
  for (i64 n = 0; n < routings; ++n) {
    u64 draw = static_cast<u64>(n) << 16;
    const auto below = [&](i64 limit) { return static_cast<i64>(key.bits(draw++) >> 3) % limit; };
    const i64 R = below(10), k = 1 + below(4), E = 1 + below(7), first = below(3), experts = first + E + below(3);
    Tensor chosen(DType::I32, {R, k});
    for (i64 i = 0; i < R * k; ++i) chosen.view().as<i32>()[i] = static_cast<i32>(below(experts + 1) - 1);
    const OpTable& ops = *all[static_cast<size_t>(n) % all.size()];
    const Sorted got = sort(ops, chosen, E, first, s);
    const auto at = [](const Tensor& t, i64 i) { return i64{t.view().as<i32>()[i]}; };
    ASSERT_EQ(at(got.offsets, 0), 0);
    i64 placed = 0;
    for (i64 i = 0; i < R * k; ++i) {
      const i64 e = at(chosen, i) - first, place = at(got.places, i);
      if (e < 0 || e >= E) {
        ASSERT_EQ(place, -1);
        continue;
      }
      ++placed;
      ASSERT_TRUE(at(got.offsets, e) <= place && place < at(got.offsets, e + 1)) << ops.name << " " << n;
      ASSERT_EQ(at(got.choices, place), i);
      ASSERT_EQ(at(got.tokens, place), i / k);
      if (place > at(got.offsets, e)) {
        ASSERT_LT(at(got.choices, place - 1), i) << "not in the order of tokens";
      }
    }
    ASSERT_EQ(at(got.offsets, E), placed) << ops.name << " " << n;
    for (i64 i = placed; i < R * k; ++i) ASSERT_TRUE(at(got.tokens, i) == -1 && at(got.choices, i) == -1);
  }
}

TEST(Experts, SortsManyChoices) {
  for (const auto& [R, E, k] : {std::array<i64, 3>{3000, 64, 8}, {4096, 1, 1}, {2731, 300, 3}}) {
    Tensor chosen(DType::I32, {R, k});
    const RngKey key{12, 1, 0};
    for (i64 i = 0; i < R * k; ++i)
      chosen.view().as<i32>()[i] = static_cast<i32>(static_cast<i64>(key.bits(static_cast<u64>(i)) >> 3) % (E + 1));
    ThreadPool pool(2);
    Stream s{.pool = &pool};
    const Sorted want = sort(ref_ops(), chosen, E, 0, s);
    for (const OpTable* ops : backends()) {
      const Sorted got = sort(*ops, chosen, E, 0, s);
      expect_same_bits(got.offsets, want.offsets, std::string(ops->name) + ": offsets");
      expect_same_bits(got.places, want.places, std::string(ops->name) + ": places");
      expect_same_bits(got.tokens, want.tokens, std::string(ops->name) + ": tokens");
      expect_same_bits(got.choices, want.choices, std::string(ops->name) + ": choices");
      if (HasFatalFailure()) return;
    }
  }
}

// ---- sums of rows

// Rows `gap` elements apart, which must keep what is between them.
struct SpacedRows {
  Tensor all;
  i64 columns;
  SpacedRows(DType t, i64 rows, i64 n, i64 gap, u32 seed) : all(t, {rows, n + gap}), columns(n) { all.randomize(seed); }
  TensorView view() const {
    TensorView v = all.view();
    v.shape[1] = columns;
    return v;
  }
};

// Places of R k choices among M rows, each at most once, some -1.
Tensor some_places(i64 R, i64 k, i64 M, u32 seed) {
  std::vector<i32> rows(static_cast<size_t>(M));
  std::iota(rows.begin(), rows.end(), 0);
  const RngKey key{seed, 3, 0};
  for (size_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[key.bits(i) % i]);
  Tensor places(DType::I32, {R, k});
  for (i64 i = 0; i < R * k; ++i) places.view().as<i32>()[i] = i % 5 == 3 || i >= M ? -1 : rows[static_cast<size_t>(i)];
  return places;
}

struct CombineCase {
  i64 R, k, C, gap;
  bool places, weights, residual, in_place;
};

TEST(Experts, CombinesRowsAsTheOracle) {
  const CombineCase cases[] = {{1, 1, 1, 0, true, true, true, false},     {7, 2, 33, 3, true, true, false, false},
                               {20, 8, 64, 8, true, true, true, true},    {5, 3, 130, 1, true, false, true, false},
                               {9, 2, 256, 0, false, true, false, false}, {9, 1, 100, 0, false, true, false, true},
                               {40, 4, 1000, 8, true, true, true, false}, {3, 2, 16, 0, false, false, true, true}};
  for (const DType t : kWorkDTypes) {
    for (const CombineCase& c : cases) {
      const i64 M = c.R * c.k + (c.places ? 4 : 0);
      const SpacedRows x(t, M, c.C, c.gap, 1);
      const Tensor places = some_places(c.R, c.k, M, 2), weights = Tensor(DType::F32, {c.R, c.k}).randomize(3);
      const auto some = [](bool wanted, const Tensor& v) { return wanted ? v.view() : TensorView{}; };
      const auto run = [&](const OpTable& ops, Stream& s) {
        const SpacedRows y(t, c.R, c.C, 2 * c.gap, 4), residual(t, c.R, c.C, c.gap, 5);
        const bool onto_x = c.in_place && !c.places && c.k == 1;
        const SpacedRows copy(x);
        ops.combine_rows(onto_x ? copy.view() : y.view(), onto_x ? copy.view() : x.view(), some(c.places, places),
                         some(c.weights, weights),
                         !c.residual  ? TensorView{}
                         : c.in_place ? y.view()
                                      : residual.view(),
                         s);
        return std::vector{onto_x ? copy.all : y.all};
      };
      ThreadPool one(1);
      Stream alone{.pool = &one};
      const std::vector<Tensor> want = run(ref_ops(), alone);
      for (const OpTable* ops : backends()) {
        const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(c.R) +
                                 "x" + std::to_string(c.k) + "x" + std::to_string(c.C);
        expect_close(run(*ops, alone)[0], want[0], t == DType::F32 ? 16 : 2.1, what);
        expect_same_for_any_threads([&](Stream& s) { return run(*ops, s); }, what);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Experts, GradientsOfCombinedRowsAgreeWithTheOracle) {
  const CombineCase cases[] = {{1, 1, 1, 0, true, true, false, false},   {7, 2, 33, 3, true, true, false, true},
                               {20, 8, 64, 8, true, true, false, false}, {5, 3, 130, 1, true, false, false, false},
                               {9, 2, 256, 0, false, true, false, true}, {11, 4, 1000, 8, true, true, false, true},
                               {9, 1, 100, 0, false, true, false, true}};
  for (const DType t : kWorkDTypes) {
    for (const CombineCase& c : cases) {
      const i64 M = c.R * c.k + (c.places ? 4 : 0);
      const SpacedRows dy(t, c.R, c.C, c.gap, 6);
      const Tensor places = some_places(c.R, c.k, M, 7), weights = Tensor(DType::F32, {c.R, c.k}).randomize(8);
      const auto run = [&](const OpTable& ops, Stream& s) {
        const SpacedRows x(t, M, c.C, c.gap, 9), dx(t, M, c.C, 2 * c.gap, 10);
        Tensor dweights(DType::F32, {c.R, c.k});
        ops.combine_rows_grad(c.in_place ? x.view() : dx.view(), c.weights ? dweights.view() : TensorView{}, dy.view(),
                              x.view(), c.places ? places.view() : TensorView{},
                              c.weights ? weights.view() : TensorView{}, s);
        return std::vector{c.in_place ? x.all : dx.all, c.weights ? dweights : weights};
      };
      ThreadPool one(1);
      Stream alone{.pool = &one};
      const std::vector<Tensor> want = run(ref_ops(), alone);
      for (const OpTable* ops : backends()) {
        const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(c.R) +
                                 "x" + std::to_string(c.k) + "x" + std::to_string(c.C);
        const std::vector<Tensor> got = run(*ops, alone);
        expect_close(got[0], want[0], t == DType::F32 ? 4 : 1.1, what);
        expect_close(got[1], want[1], 64, what + ": dweights", std::sqrt(static_cast<double>(c.C)));
        expect_same_for_any_threads([&](Stream& s) { return run(*ops, s); }, what);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The combined row of a token does not depend on the tokens beside it.
TEST(Experts, ACombinedRowHasTheSameBitsAmongAnyNumber) {
  constexpr i64 k = 4, C = 300;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const DType t : kWorkDTypes) {
    const Tensor terms = Tensor(t, {k, C}).randomize(1), weight = Tensor(DType::F32, {k}).randomize(2);
    for (const OpTable* ops : backends()) {
      std::vector<u8> want;
      for (const i64 R : {1, 2, 17, 200, 1000}) {
        if (R > 100 && test_device() != nullptr) continue;
        const i64 row = R / 2;
        Tensor x = Tensor(t, {R * k, C}).randomize(3), weights = Tensor(DType::F32, {R, k}).randomize(4), y(t, {R, C}),
               places(DType::I32, {R, k});
        std::memcpy(x.view().rows(row * k, k).data, terms.view().data, static_cast<size_t>(terms.view().bytes()));
        for (i64 i = 0; i < R * k; ++i) places.view().as<i32>()[i] = static_cast<i32>(i);
        for (i64 j = 0; j < k; ++j) weights.set(row * k + j, weight.at(j));
        ops->combine_rows(y, x, places, weights, {}, s);
        const TensorView out = y.view().rows(row, 1);
        const std::vector<u8> got(out.as<u8>(), out.as<u8>() + out.bytes());
        if (want.empty()) want = got;
        ASSERT_EQ(got, want) << ops->name << " " << dtype_name(t) << " " << R;
      }
    }
  }
}

}  // namespace experts_test
}  // namespace ds::testing
