// SPDX-License-Identifier: Apache-2.0
// Choices of experts that are dropped or made with noise, and biases of experts: ops against the oracle, by their
// promises, and against DeepSpeed's gates.

#include <algorithm>
#include <cmath>
#include <limits>

#include "parity/finite_difference.h"
#include "parity/torch_fixture.h"

namespace ds::testing {
namespace gating_test {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<const OpTable*> all_backends() {
  std::vector<const OpTable*> all = backends();
  all.push_back(&ref_ops());
  return all;
}

i32 at(const Tensor& t, i64 i) { return t.view().as<i32>()[i]; }

// k different experts for each token, in any order.
Tensor random_choices(i64 N, i64 k, i64 E, u32 seed) {
  const Tensor numbers = Tensor(DType::F32, {N, E}).randomize(seed);
  Tensor chosen(DType::I32, {N, k}), weights(DType::F32, {N, k}), scores(DType::F32, {N, E});
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  ref_ops().route(chosen, weights, scores, numbers, {}, {}, {}, s);
  return chosen;
}

struct Dropping {
  i64 N, k;
  CapacityParams p;
  bool priority;
  std::string name() const {
    return std::to_string(N) + " tokens " + std::to_string(k) + " of " + std::to_string(p.experts) + " capacity " +
           std::to_string(p.capacity) + (p.by_rank ? " by rank" : "") + (priority ? " priorities" : "");
  }
};
Tensor drop(const OpTable& ops, const Dropping& d, const Tensor& chosen, const Tensor& priority, Stream& s) {
  Tensor kept(DType::I32, {d.N, d.k});
  ops.drop_choices(kept, chosen, d.priority ? priority.view() : TensorView{}, d.p, s);
  return kept;
}

TEST(Gating, DropsAsTheOracle) {
  for (const auto& [N, k, E] :
       {std::array<i64, 3>{0, 1, 3}, {1, 1, 1}, {40, 2, 4}, {33, 5, 5}, {700, 3, 8}, {2000, 8, 64}}) {
    const Tensor chosen = random_choices(N, k, E, 1);
    Tensor priority = Tensor(DType::F32, {N, k}).randomize(2);
    for (i64 i = 0; i < N * k; ++i) {  // many equal ones, zeros of either sign, and NaN
      if (i % 3 == 0) priority.set(i, static_cast<float>(i % 4) - 1);
      if (i % 7 == 0) priority.set(i, -0.0f);
      if (i % 11 == 0) priority.set(i, kNan);
    }
    for (const i64 capacity : {i64{0}, i64{1}, N * k / E - 1, N * k / E, N * k / E + 3, N}) {
      for (const bool by_rank : {false, true}) {
        for (const bool has_priority : {false, true}) {
          const Dropping d{N, k, {.experts = E, .capacity = capacity, .by_rank = by_rank}, has_priority};
          ThreadPool pool(2);
          Stream s{.pool = &pool};
          const Tensor want = drop(ref_ops(), d, chosen, priority, s);
          for (const OpTable* ops : backends()) {
            const std::string what = std::string(ops->name) + " " + d.name();
            expect_same_bits(drop(*ops, d, chosen, priority, s), want, what);
            expect_same_for_any_threads([&](Stream& t) { return std::vector{drop(*ops, d, chosen, priority, t)}; },
                                        what);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Every expert keeps as many choices as it has room for, and none of a lower priority than one that was dropped.
TEST(Gating, KeepsNothingOverCapacityAndLosesNothingBelowIt) {
  const std::vector<const OpTable*> all = all_backends();
  const i64 routings = test_device() != nullptr ? 100 : 100000;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  const RngKey key{21, 1, 0};
  for (i64 n = 0; n < routings; ++n) {
    u64 draw = static_cast<u64>(n) << 16;
    const auto below = [&](i64 limit) { return static_cast<i64>(key.bits(draw++) >> 3) % limit; };
    const i64 N = below(12), E = 1 + below(6), k = 1 + below(E);
    Dropping d{N, k, {.experts = E, .capacity = below(6), .by_rank = below(2) != 0}, below(2) != 0};
    Tensor chosen(DType::I32, {N, k}), priority(DType::F32, {N, k});
    for (i64 r = 0; r < N; ++r) {
      const i64 first = below(E);
      for (i64 j = 0; j < k; ++j) chosen.view().as<i32>()[r * k + j] = static_cast<i32>((first + j) % E);
    }
    for (i64 i = 0; i < N * k; ++i) priority.set(i, static_cast<float>(below(4)));
    const OpTable& ops = *all[static_cast<size_t>(n) % all.size()];
    const Tensor kept = drop(ops, d, chosen, priority, s);
    const auto order = [&](i64 i) {
      return std::tuple(d.priority ? -priority.at(i) : 0.0f, d.p.by_rank ? i % k : 0, i);
    };
    for (i64 e = 0; e < E; ++e) {
      i64 choices = 0, left = 0;
      auto last_kept = std::tuple(-1e30f, i64{-1}, i64{-1}), first_dropped = std::tuple(1e30f, i64{0}, i64{0});
      for (i64 i = 0; i < N * k; ++i) {
        if (at(chosen, i) != e) continue;
        ++choices;
        if (at(kept, i) == e) {
          ++left;
          last_kept = std::max(last_kept, order(i));
        } else {
          ASSERT_EQ(at(kept, i), -1);
          first_dropped = std::min(first_dropped, order(i));
        }
      }
      ASSERT_EQ(left, std::min(choices, d.p.capacity)) << ops.name << " " << n << " " << d.name();
      ASSERT_LT(last_kept, first_dropped) << ops.name << " " << n << " " << d.name();
    }
  }
}

// ---- weights and gradients of what is left

struct LeftCase {
  RouterParams p;
  i64 R, E, k, capacity;
  float spread;  // of logits: with a large one, sums of what is left are below 2^-23
};
std::vector<LeftCase> left_cases() {
  std::vector<LeftCase> cases;
  for (const bool sigmoid : {false, true}) {
    for (const bool normalise : {false, true}) {
      const RouterParams p{.sigmoid = sigmoid, .normalise = normalise, .scale = 1.5f};
      for (const i64 capacity : {0, 1, 4}) {
        cases.push_back({p, 9, 5, 2, capacity, 2});
        cases.push_back({p, 30, 8, 3, capacity, 2});
        cases.push_back({p, 6, 3, 1, capacity, 2});
      }
    }
  }
  cases.push_back({{.normalise = true}, 20, 4, 2, 3, 30});
  return cases;
}

TEST(Gating, WeightsAndGradientsOfWhatIsLeftAgreeWithTheOracle) {
  for (const LeftCase& c : left_cases()) {
    const Tensor logits = Tensor(DType::F32, {c.R, c.E}).randomize(3, c.spread),
                 dweights = Tensor(DType::F32, {c.R, c.k}).randomize(4);
    Tensor chosen(DType::I32, {c.R, c.k}), scores(DType::F32, {c.R, c.E}), unused(DType::F32, {c.R, c.k});
    ThreadPool pool(2);
    Stream s{.pool = &pool};
    ref_ops().route(chosen, unused, scores, logits, {}, {}, c.p, s);
    const Tensor kept = drop(ref_ops(), {c.R, c.k, {.experts = c.E, .capacity = c.capacity}, false}, chosen, {}, s);
    const auto run = [&](const OpTable& ops) {
      std::vector<Tensor> out = {Tensor(DType::F32, {c.R, c.k}), Tensor(DType::F32, {c.R, c.E})};
      ops.weigh_choices(out[0], kept, scores, c.p, s);
      ops.route_grad(out[1], dweights, kept, scores, logits, {}, {}, {}, {}, c.p, {}, s);
      return out;
    };
    const std::vector<Tensor> want = run(ref_ops());
    for (i64 i = 0; i < c.R * c.k; ++i) EXPECT_EQ(want[0].at(i) == 0, at(kept, i) < 0 || want[0].at(i) == 0);
    for (const OpTable* ops : backends()) {
      const std::vector<Tensor> got = run(*ops);
      expect_close(got[0], want[0], 32, std::string(ops->name) + ": weights");
      expect_close(got[1], want[1], 64, std::string(ops->name) + ": gradient", 0.05);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Gating, GradientsOfWhatIsLeftAreThoseOfFiniteDifferences) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const LeftCase& c : left_cases()) {
    Doubles logits({c.R, c.E}), scores({c.R, c.E}), weights({c.R, c.k}), dweights({c.R, c.k}), dlogits({c.R, c.E});
    logits.randomize(6, c.spread), dweights.randomize(7);
    Tensor chosen(DType::I32, {c.R, c.k}), kept(chosen), again(chosen);
    ref_ops().route(kept, weights.view, scores.view, logits.view, {}, {}, c.p, s);
    kept = drop(ref_ops(), {c.R, c.k, {.experts = c.E, .capacity = c.capacity}, false}, kept, {}, s);
    const auto total = [&] {
      ref_ops().route(again, weights.view, scores.view, logits.view, {}, {}, c.p, s);
      ref_ops().weigh_choices(weights.view, kept, scores.view, c.p, s);
      return weights.dot(dweights);
    };
    total();
    ref_ops().route_grad(dlogits.view, dweights.view, kept, scores.view, logits.view, {}, {}, {}, {}, c.p, {}, s);
    expect_gradient(logits, dlogits, total, "capacity " + std::to_string(c.capacity));
    if (HasFatalFailure()) return;
  }
}

// ---- statistics

TEST(Gating, StatisticsReportEntropiesAndDroppedChoices) {
  for (const i64 R : {0, 1, 33, 700}) {
    for (const bool sigmoid : {false, true}) {
      const i64 E = 9, k = 2;
      const RouterStats places{E};
      const RouterParams p{.sigmoid = sigmoid};
      const RouterLossParams loss{.balance = 0.5f, .first_choices = true};
      const Tensor logits = Tensor(DType::F32, {R, E}).randomize(9, 2);
      Tensor chosen(DType::I32, {R, k}), weights(DType::F32, {R, k}), scores(DType::F32, {R, E}),
          targets(DType::I32, {R});
      for (i64 r = 0; r < R; ++r) targets.set(r, r % 3 == 1 ? -100.0f : 5.0f);
      ThreadPool pool(2);
      Stream s{.pool = &pool};
      ref_ops().route(chosen, weights, scores, logits, {}, {}, p, s);
      const Tensor kept = drop(ref_ops(), {R, k, {.experts = E, .capacity = 3}, false}, chosen, {}, s);
      double entropy = 0;
      i64 dropped = 0;
      std::vector<float> firsts(static_cast<size_t>(E));
      for (i64 r = 0; r < R; ++r) {
        if (r % 3 == 1) continue;
        double sum = 0;
        for (i64 e = 0; e < E; ++e) sum += static_cast<double>(scores.at(r * E + e));
        for (i64 e = 0; e < E; ++e) {
          const double share = static_cast<double>(scores.at(r * E + e)) / sum;
          entropy -= share * std::log(share);
        }
        for (i64 j = 0; j < k; ++j) dropped += at(kept, r * k + j) < 0;
        firsts[static_cast<size_t>(at(chosen, r * k))] += 1;
      }
      for (const OpTable* ops : all_backends()) {
        Tensor stats(DType::F32, {places.size()}), result(DType::F32, {1}), score_grad(DType::F32, {E});
        ops->router_stats(stats, chosen, kept, scores, logits, targets, p, loss, s);
        const float nats = stats.at(places.report()), rest = stats.at(places.report() + 1);
        EXPECT_EQ(nats, std::floor(nats)) << ops->name;
        EXPECT_TRUE(rest == std::floor(rest) && rest >= 0 && rest < RouterStats::kFraction) << ops->name;
        EXPECT_NEAR(nats + rest / RouterStats::kFraction, entropy,
                    static_cast<double>(R) * 0.51 / RouterStats::kFraction)
            << ops->name;
        EXPECT_EQ(stats.at(places.report() + 2), static_cast<float>(dropped)) << ops->name;
        for (i64 e = 0; e < E; ++e) EXPECT_EQ(stats.at(places.firsts() + e), firsts[static_cast<size_t>(e)]);
        ops->router_loss(result, score_grad, stats, {}, k, loss, s);
        double want = 0, n = 0;
        for (i64 e = 0; e < E; ++e) n += static_cast<double>(firsts[static_cast<size_t>(e)]);
        for (i64 e = 0; e < E && n > 0; ++e)
          want += 0.5 * E / (n * n) * static_cast<double>(firsts[static_cast<size_t>(e)]) *
                  static_cast<double>(stats.at(places.probs() + e));
        EXPECT_NEAR(result.at(0), want, 1e-5) << ops->name;
        ops->router_stats(stats, chosen, {}, scores, logits, targets, p, loss, s);
        EXPECT_EQ(stats.at(places.report() + 2), 0) << ops->name;
      }
    }
  }
}

// The parts of a batch add up to the whole, exactly.
TEST(Gating, EntropiesOfPartsAddUp) {
  constexpr i64 R = 500, E = 6, k = 1;
  const Tensor logits = Tensor(DType::F32, {R, E}).randomize(10, 2);
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const OpTable* ops : all_backends()) {
    Tensor chosen(DType::I32, {R, k}), weights(DType::F32, {R, k}), scores(DType::F32, {R, E});
    ops->route(chosen, weights, scores, logits, {}, {}, {}, s);
    const auto units = [&](i64 first, i64 count) {
      const RouterStats places{E};
      Tensor stats(DType::F32, {places.size()});
      ops->router_stats(stats, chosen.view().rows(first, count), {}, scores.view().rows(first, count),
                        logits.view().rows(first, count), {}, {}, {}, s);
      return static_cast<i64>(stats.at(places.report())) * RouterStats::kFraction +
             static_cast<i64>(stats.at(places.report() + 1));
    };
    EXPECT_EQ(units(0, R), units(0, 123) + units(123, 300) + units(423, R - 423)) << ops->name;
  }
}

// ---- noise

Tensor noise(const OpTable& ops, DType t, i64 n, NoiseKind kind, float amount, i64 offset, Stream& s) {
  const Tensor x = Tensor(t, {n}).randomize(5, 1, 2);
  Tensor y(t, {n});
  ops.add_noise(y, kind == NoiseKind::Uniform ? TensorView{} : x.view(), kind, amount, {31, 4, 2}, offset, s);
  return y;
}

TEST(Gating, NoiseAgreesWithTheOracleAndDependsOnTheElementAlone) {
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const DType t : kWorkDTypes) {
    for (const NoiseKind kind : {NoiseKind::Uniform, NoiseKind::Jitter, NoiseKind::Gumbel}) {
      for (const auto& [n, offset] : {std::pair<i64, i64>{1, 0}, {7, 3}, {130, 1}, {3000, 4}, {40000, 1002}}) {
        const Tensor want = noise(ref_ops(), t, n, kind, 0.25f, offset, s);
        for (const OpTable* ops : backends()) {
          const std::string what = std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(n);
          const Tensor got = noise(*ops, t, n, kind, 0.25f, offset, s);
          expect_close(got, want, t == DType::F32 ? 8 : 2.1, what);
          // In two calls, and in place.
          const i64 half = n / 3;
          Tensor parts = Tensor(t, {n}).randomize(5, 1, 2);
          const auto part = [&](i64 first, i64 count) {
            const TensorView v = parts.view().rows(first, count);
            ops->add_noise(v, kind == NoiseKind::Uniform ? TensorView{} : v, kind, 0.25f, {31, 4, 2}, offset + first,
                           s);
          };
          part(0, half);
          part(half, n - half);
          expect_same_bits(parts, got, what + " in parts");
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The largest of logits with Gumbel noise is a draw from their softmax.
TEST(Gating, GumbelNoiseDrawsFromTheSoftmax) {
  constexpr i64 R = 20000, E = 3;
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  Tensor logits(DType::F32, {R, E}), noisy(DType::F32, {R, E});
  const double share[] = {0.6, 0.3, 0.1};
  for (i64 i = 0; i < R * E; ++i) logits.set(i, static_cast<float>(std::log(share[i % E])));
  for (const OpTable* ops : backends()) {
    ops->add_noise(noisy, logits, NoiseKind::Gumbel, 1, {3, 1, 1}, 0, s);
    Tensor chosen(DType::I32, {R, 1}), weights(DType::F32, {R, 1}), scores(DType::F32, {R, E});
    ops->route(chosen, weights, scores, logits, {}, noisy, {}, s);
    double counts[E] = {};
    for (i64 r = 0; r < R; ++r) {
      counts[at(chosen, r)] += 1.0 / R;
      ASSERT_EQ(weights.at(r), scores.at(r * E + at(chosen, r)));  // without noise
    }
    for (i64 e = 0; e < E; ++e) EXPECT_NEAR(counts[e], share[e], 0.015) << ops->name;
  }
}

TEST(Gating, NoiseDecidesOnTheSecondChoiceAlone) {
  constexpr i64 R = 300, E = 7;
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  const Tensor logits = Tensor(DType::F32, {R, E}).randomize(1);
  Tensor noisy = Tensor(DType::F32, {R, E}).randomize(2, 3);
  for (i64 r = 0; r < R; r += 5) {
    for (i64 e = 0; e < E; ++e) noisy.set(r * E + e, kNan);  // then the lowest of the others
  }
  const RouterParams p{.normalise = true, .noisy_second = true};
  const auto run = [&](const OpTable& ops, bool with_noise, i64 k) {
    Tensor chosen(DType::I32, {R, k}), weights(DType::F32, {R, k}), scores(DType::F32, {R, E});
    ops.route(chosen, weights, scores, logits, {}, with_noise ? noisy.view() : TensorView{}, p, s);
    return std::pair(chosen, weights);
  };
  const auto [firsts, alone] = run(ref_ops(), false, 1);
  const auto [want, want_weights] = run(ref_ops(), true, 2);
  for (const OpTable* ops : all_backends()) {
    const auto [got, weights] = run(*ops, true, 2);
    for (i64 r = 0; r < R; ++r) {
      i32 second = -1;
      for (i32 e = 0; e < E; ++e) {
        if (e == at(firsts, r)) continue;
        if (second < 0 || noisy.at(r * E + e) > noisy.at(r * E + second)) second = e;
      }
      ASSERT_EQ(at(got, 2 * r), at(firsts, r)) << ops->name;
      ASSERT_EQ(at(got, 2 * r + 1), second) << ops->name << " " << r;
    }
    expect_close(weights, want_weights, 32, std::string(ops->name));
  }
}

// ---- biases of groups

TEST(Gating, BiasesOfGroupsAgreeWithTheOracle) {
  struct Case {
    i64 E, M;
    std::vector<i32> offsets;
  };
  for (const Case& c : {Case{1, 5, {}},
                        {3, 20, {0, 7, 7, 20}},
                        {2, 40, {0, 9, 20, 20, 33}},
                        {2, 6, {2, 2, 5}},
                        {4, 600, {0, 1, 300, 470, 599}},
                        {3, 4, {0, 0, 0, 0}}}) {
    for (const i64 N : {1, 33, 300}) {
      for (const DType t : kWorkDTypes) {
        const TensorView offsets =
            c.offsets.empty() ? TensorView{}
                              : TensorView::of(const_cast<i32*>(c.offsets.data()), DType::I32, {std::ssize(c.offsets)});
        const Tensor bias = Tensor(t, {c.E, N}).randomize(1), dy = Tensor(t, {c.M, N + 5}).randomize(2),
                     weights = Tensor(DType::F32, {c.M, 1}).randomize(3);
        const auto columns = [&](const Tensor& x) {
          TensorView v = x.view();
          v.shape[1] = N;
          return v;
        };
        const auto run = [&](const OpTable& ops, Stream& s) {
          std::vector<Tensor> out = {Tensor(t, {c.M, N + 5}).randomize(4)};
          ops.grouped_bias(columns(out[0]), bias, offsets, s);
          for (const DType to : {t, DType::F32}) {
            for (const bool accumulate : {false, true}) {
              out.push_back(Tensor(to, {c.E, N}).randomize(6));
              ops.grouped_bias_grad(out.back(), columns(dy), accumulate ? weights.view() : TensorView{}, offsets,
                                    accumulate, s);
            }
          }
          return out;
        };
        ThreadPool one(1);
        Stream alone{.pool = &one};
        const std::vector<Tensor> want = run(ref_ops(), alone);
        for (const OpTable* ops : backends()) {
          const std::string what =
              std::string(ops->name) + " " + std::string(dtype_name(t)) + " " + std::to_string(c.M);
          const std::vector<Tensor> got = run(*ops, alone);
          for (size_t i = 0; i < got.size(); ++i) {
            expect_close(got[i], want[i], got[i].view().dtype == DType::F32 ? 64 : 1.1, what + " " + std::to_string(i),
                         i == 0 ? 0 : std::sqrt(static_cast<double>(c.M)));
          }
          expect_same_for_any_threads([&](Stream& s) { return run(*ops, s); }, what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// ---- DeepSpeed's gates: tests/golden/make_gating.py

class DeepSpeedGates : public ::testing::Test {
 protected:
  DeepSpeedGates() : tensors_(open_source(test_data("gating/cases.safetensors"))) {
    std::ifstream in(test_data("gating/cases.json"));
    std::stringstream text;
    text << in.rdbuf();
    cases_ = parse_json(text.str(), "cases.json").root;
  }
  Tensor read(const std::string& name, DType dtype) const {
    const TensorInfo& info = tensors_->at(name);
    Tensor x(dtype, {info.shape[0], info.shape[1]});
    tensors_->read(name, 0, info.numel(), x.view().data);
    return x;
  }
  std::unique_ptr<TensorSource> tensors_;
  Json cases_;
};

TEST_F(DeepSpeedGates, KeepAndWeighTheSameChoices) {
  ASSERT_GE(cases_.size(), 100u);
  ThreadPool pool(2);
  Stream s{.pool = &pool};
  for (const Json& c : cases_) {
    const std::string name = c.at("name").get<std::string>();
    const Tensor logits = read(name + ".logits", DType::F32), want = read(name + ".kept", DType::I32),
                 want_weights = read(name + ".weights", DType::F32);
    const i64 R = logits.view().dim(0), E = logits.view().dim(1), k = want.view().dim(1);
    const bool has_noise = c.at("noise").get<bool>();
    const Tensor noisy = has_noise ? read(name + ".noisy", DType::F32) : Tensor();
    const RouterParams p{.normalise = k > 1, .noisy_second = k == 2};
    const std::string policy = c.at("policy").get<std::string>();
    // As model/gating.cc computes it.
    const auto each = static_cast<float>(static_cast<double>(R) / static_cast<double>(E));
    const auto factor = static_cast<float>(c.at("factor").get<double>() * static_cast<double>(k));
    const i64 capacity = std::max(static_cast<i64>(std::ceil(each * factor)), c.at("min_capacity").get<i64>());
    ASSERT_EQ(capacity, c.at("capacity").get<i64>()) << name;
    for (const OpTable* ops : backends()) {
      Tensor chosen(DType::I32, {R, k}), weights(DType::F32, {R, k}), scores(DType::F32, {R, E}), priority(weights),
          stats(DType::F32, {RouterStats{E}.size()}), loss(DType::F32, {1}), score_grad(DType::F32, {E});
      RouterParams raw = p;
      raw.normalise = false;
      ops->route(chosen, priority, scores, logits, {}, has_noise ? noisy.view() : TensorView{}, raw, s);
      if (policy == "random") priority = read(name + ".uniform", DType::F32);
      const Dropping d{
          R, k, {.experts = E, .capacity = capacity, .by_rank = policy == "position" && k == 2}, policy != "position"};
      const Tensor kept = drop(*ops, d, chosen, priority, s);
      ops->weigh_choices(weights, kept, scores, p, s);
      for (i64 i = 0; i < R * k; ++i) ASSERT_EQ(at(kept, i), at(want, i)) << ops->name << " " << name << " " << i;
      expect_close(weights, want_weights, 32, std::string(ops->name) + " " + name);
      const RouterLossParams params{.balance = 1, .first_choices = k == 2};
      ops->router_stats(stats, chosen, kept, scores, logits, {}, p, params, s);
      ops->router_loss(loss, score_grad, stats, {}, k, params, s);
      EXPECT_NEAR(loss.at(0), c.at("loss").get<double>(), 1e-5 * std::abs(c.at("loss").get<double>())) << name;
      for (i64 e = 0; e < E; ++e)
        EXPECT_EQ(stats.at(e), c.at("counts").at(static_cast<size_t>(e)).get<float>()) << name;
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace gating_test
}  // namespace ds::testing
