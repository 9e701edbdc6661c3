// SPDX-License-Identifier: Apache-2.0
// The router of experts: scores, choice, their gradients, and statistics for its losses.

#include <algorithm>
#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/isa/softmax.h"
#include "cpu/isa/tiling.h"
#include "cpu/vector_math.h"
#include "router.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

void fill_scores(float* s, const float* z, i64 E, bool sigmoids) noexcept {
  if (sigmoids) {
    return for_vectors(0, E, [=](i64 e, auto n) { store(s + e, sigmoid(load(z + e, n)), n); });
  }
  const float top = row_max(z, E), sum = row_sum(z, E, top);
  for_vectors(0, E, [=](i64 e, auto n) { store(s + e, exp(load(z + e, n) - broadcast(top)) / broadcast(sum), n); });
}

// The set of groups that are considered.
u64 choose_groups(const RouterParams& p, i64 width, const router::Biased& scores) noexcept {
  u64 chosen = 0;
  for (i64 count = 0; count < p.chosen_groups; ++count) {
    u64 best = 0;
    for (i64 g = 0; g < p.groups; ++g) {
      if ((chosen >> g & 1) == 0) best = std::max(best, router::rank_of_group(g, width, p.group_by_two, scores));
    }
    chosen |= u64{1} << router::expert_of(best);
  }
  return chosen;
}

void choose(i32* chosen, i64 k, const router::Biased& scores, const float* noisy, i64 E,
            const RouterParams& p) noexcept {
  const i64 width = E / p.groups;
  if (noisy != nullptr) {
    router::Biased by{noisy, nullptr};
    const i64 firsts = p.noisy_second ? 1 : 0;
    if (firsts != 0) {
      by.except = router::expert_of(router::best_below(~u64{0}, 1, E, 0, 1, E, scores));
      chosen[0] = static_cast<i32>(by.except);
    }
    u64 rank = ~u64{0};
    for (i64 j = firsts; j < k; ++j) {
      rank = router::best_below(rank, 1, E, 0, 1, E, by);
      chosen[j] = static_cast<i32>(router::expert_of(rank));
    }
    return;
  }
  const u64 groups = p.groups > 1 ? choose_groups(p, width, scores) : 1;
  u64 rank = ~u64{0};
  for (i64 j = 0; j < k; ++j) {
    rank = router::best_below(rank, groups, width, 0, 1, E, scores);
    chosen[j] = static_cast<i32>(router::expert_of(rank));
  }
}

// The sum of the chosen scores.
float sum_of(const float* scores, const i32* chosen, i64 k) noexcept {
  float sum = 0;
  for (i64 j = 0; j < k; ++j) sum += chosen[j] >= 0 ? scores[chosen[j]] : 0;
  return sum;
}
void weigh(float* weights, const float* scores, const i32* chosen, i64 k, const RouterParams& p) noexcept {
  const float divisor = router::divisor_of(sum_of(scores, chosen, k), p);
  for (i64 j = 0; j < k; ++j) weights[j] = chosen[j] >= 0 ? p.scale * (scores[chosen[j]] / divisor) : 0;
}

bool counts(const TensorView& targets, i64 r, const RouterLossParams& p) noexcept {
  return !targets || targets.as<i32>()[r] != p.ignore_index;
}

// sum of x[e] * y[e]
float dot(const float* x, const float* y, i64 E) noexcept {
  Vec sum = zero();
  for_vectors(0, E, [&](i64 e, auto n) { sum = fma(load(x + e, n), load(y + e, n), sum); });
  return reduce_add(sum);
}
float total(const float* x, i64 E) noexcept {
  Vec sum = zero();
  for_vectors(0, E, [&](i64 e, auto n) { sum = sum + load(x + e, n); });
  return reduce_add(sum);
}

// Rows of work that is worth claiming.
i64 rows_of_tile(i64 E) noexcept { return std::max<i64>(1, kTileElements / 8 / E); }

// The gradient of the losses with respect to the scores and logits of a token that counts.
struct LossGrad {
  const float* score_grad = nullptr;  // null: no balance
  float factor = 1;
  float z = 0;  // 2 * coefficient * factor / n
};

// ds += that of p
void add_balance(float* ds, const float* s, i64 E, const LossGrad& loss, bool sigmoids) noexcept {
  const float all = sigmoids ? total(s, E) : 1;
  const float mean = sigmoids ? dot(loss.score_grad, s, E) / all : 0;
  const Vec by = broadcast(loss.factor / all), from = broadcast(mean);
  for_vectors(0, E,
              [=](i64 e, auto n) { store(ds + e, fma(by, load(loss.score_grad + e, n) - from, load(ds + e, n)), n); });
}
void add_z(float* dz, const float* z, i64 E, float coefficient) noexcept {
  const float top = row_max(z, E), sum = row_sum(z, E, top), lse = top + std::log(sum);
  const Vec by = broadcast(coefficient * lse / sum);
  for_vectors(0, E,
              [=](i64 e, auto n) { store(dz + e, fma(by, exp(load(z + e, n) - broadcast(top)), load(dz + e, n)), n); });
}

// dz holds the gradient of the scores, which becomes that of the logits.
void to_logits(float* dz, const float* s, i64 E, bool sigmoids) noexcept {
  if (sigmoids) {
    return for_vectors(0, E, [=](i64 e, auto n) {
      const Vec x = load(s + e, n);
      store(dz + e, load(dz + e, n) * x * (broadcast(1.0f) - x), n);
    });
  }
  const Vec mean = broadcast(dot(dz, s, E));
  for_vectors(0, E, [=](i64 e, auto n) { store(dz + e, load(s + e, n) * (load(dz + e, n) - mean), n); });
}

}  // namespace

void route(TensorView chosen, TensorView weights, TensorView scores, TensorView logits, TensorView bias,
           TensorView noisy, const RouterParams& p, Stream& stream) noexcept {
  const i64 R = logits.dim(0), E = logits.dim(1), k = chosen.dim(1);
  const auto rows = [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; ++r) {
      float* const s = scores.as<float>() + r * E;
      i32* const c = chosen.as<i32>() + r * k;
      fill_scores(s, logits.as<float>() + r * E, E, p.sigmoid);
      choose(c, k, {s, bias.as<float>()}, noisy ? noisy.as<float>() + r * E : nullptr, E, p);
      weigh(weights.as<float>() + r * k, s, c, k, p);
    }
  };
  for_tiles(stream, R, rows, rows_of_tile(E));
}

void weigh_choices(TensorView weights, TensorView chosen, TensorView scores, const RouterParams& p,
                   Stream& stream) noexcept {
  const i64 E = scores.dim(1), k = chosen.dim(1);
  for_tiles(stream, scores.dim(0), [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; ++r)
      weigh(weights.as<float>() + r * k, scores.as<float>() + r * E, chosen.as<i32>() + r * k, k, p);
  });
}

void route_grad(TensorView dlogits, TensorView dweights, TensorView chosen, TensorView scores, TensorView logits,
                TensorView score_grad, TensorView stats, TensorView targets, TensorView factor, const RouterParams& p,
                const RouterLossParams& loss, Stream& stream) noexcept {
  const i64 R = scores.dim(0), E = scores.dim(1), k = chosen.dim(1);
  LossGrad of_loss{.score_grad = score_grad.as<float>(), .factor = factor ? *factor.as<float>() : 1.0f};
  if (stats && loss.z != 0) {
    const float n = total(stats.as<float>(), E) / static_cast<float>(k);
    of_loss.z = 2 * loss.z * of_loss.factor / n;
  }
  const auto rows = [=](i64 begin, i64 end) {
    for (i64 r = begin; r < end; ++r) {
      float* const dz = dlogits.as<float>() + r * E;
      const float *const s = scores.as<float>() + r * E, *const dw = dweights.as<float>() + r * k;
      const i32* const c = chosen.as<i32>() + r * k;
      const float sum = sum_of(s, c, k), divisor = router::divisor_of(sum, p);
      float mean = 0;
      for (i64 j = 0; router::divides(sum, p) && j < k; ++j) mean += c[j] >= 0 ? dw[j] * (s[c[j]] / divisor) : 0;
      std::fill_n(dz, E, 0.0f);
      for (i64 j = 0; j < k; ++j) {
        if (c[j] >= 0) dz[c[j]] = p.scale * (dw[j] - mean) / divisor;
      }
      const bool counted = stats && counts(targets, r, loss);
      if (counted && of_loss.score_grad != nullptr) add_balance(dz, s, E, of_loss, p.sigmoid);
      to_logits(dz, s, E, p.sigmoid);
      if (counted && of_loss.z != 0) add_z(dz, logits.as<float>() + r * E, E, of_loss.z);
    }
  };
  for_tiles(stream, R, rows, rows_of_tile(E));
}

namespace {

// Partial sums of statistics: of so many tokens each, in fp64.
struct StatsTiles {
  i64 rows, count;
  explicit StatsTiles(i64 R) noexcept : rows(std::max<i64>(32, ceil_div(R, 64))), count(ceil_div(R, rows)) {}
  static i64 width(i64 E) noexcept { return RouterStats{E}.size() - 1; }
  size_t bytes(i64 E) const noexcept { return static_cast<size_t>(count * width(E)) * sizeof(double); }
};

// The entropy of a token's probabilities, in the unit in which entropies are added.
double entropy_of(const float* s, const float* z, i64 E, double all, double lse, bool sigmoids) noexcept {
  double entropy = sigmoids ? 0 : lse;
  for (i64 e = 0; e < E; ++e) {
    const double share = static_cast<double>(s[e]) / all;
    if (share != 0) entropy -= share * (sigmoids ? std::log(share) : static_cast<double>(z[e]));
  }
  return std::nearbyint(entropy * RouterStats::kFraction);
}

}  // namespace

void router_stats(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                  TensorView targets, const RouterParams& p, const RouterLossParams& loss, Stream& stream) noexcept {
  const i64 R = scores.dim(0), E = scores.dim(1), k = chosen.dim(1), width = StatsTiles::width(E);
  const RouterStats places{E};
  const StatsTiles tiles(R);
  double* const partial = static_cast<double*>(stream.pool->reserve_scratch(tiles.bytes(E)));
  stream.pool->parallel_for(tiles.count, [=](i64 tile, int) {
    double* const sums = partial + tile * width;
    std::fill_n(sums, width, 0.0);
    for (i64 r = tile * tiles.rows; r < std::min(R, (tile + 1) * tiles.rows); ++r) {
      if (!counts(targets, r, loss)) continue;
      const float *const s = scores.as<float>() + r * E, *const z = logits.as<float>() + r * E;
      const i32* const c = chosen.as<i32>() + r * k;
      for (i64 j = 0; j < k; ++j) {
        sums[c[j]] += 1;
        if (kept && kept.as<i32>()[r * k + j] < 0) sums[places.report() + 1] += 1;
      }
      sums[places.firsts() + c[0]] += 1;
      double all = p.sigmoid ? 0 : 1;
      for (i64 e = 0; p.sigmoid && e < E; ++e) all += static_cast<double>(s[e]);
      for (i64 e = 0; e < E; ++e) sums[places.probs() + e] += static_cast<double>(s[e]) / all;
      const float top = row_max(z, E);
      const double lse = static_cast<double>(top) + std::log(static_cast<double>(row_sum(z, E, top)));
      sums[places.squares()] += lse * lse;
      sums[places.report()] += entropy_of(s, z, E, all, lse, p.sigmoid);
    }
  });
  float* const to = stats.as<float>();
  for (i64 i = 0; i < width; ++i) {
    double sum = 0;
    for (i64 tile = 0; tile < tiles.count; ++tile) sum += partial[tile * width + i];
    if (i == places.report()) {
      const double nats = std::floor(sum / RouterStats::kFraction);
      to[i] = static_cast<float>(nats);
      to[i + 1] = static_cast<float>(sum - nats * RouterStats::kFraction);
    } else {
      to[i > places.report() ? i + 1 : i] = static_cast<float>(sum);
    }
  }
}

void router_stats_scratch(TensorView, TensorView, TensorView, TensorView scores, TensorView, TensorView,
                          const RouterParams&, const RouterLossParams&, Stream& stream) noexcept {
  note_scratch(stream, StatsTiles(scores.dim(0)).bytes(scores.dim(1)));
}

void router_loss(TensorView loss, TensorView score_grad, TensorView stats, TensorView counts, i64 k,
                 const RouterLossParams& p, Stream&) noexcept {
  const i64 E = score_grad.numel();
  const float* const own = stats.as<float>() + (p.first_choices ? RouterStats{E}.firsts() : 0);
  const float* const count = counts ? counts.as<float>() : own;
  const float* const prob = stats.as<float>() + E;
  double choices = 0, compared = 0, products = 0;
  for (i64 e = 0; e < E; ++e) {
    choices += static_cast<double>(own[e]);
    compared += static_cast<double>(count[e]);
    products += static_cast<double>(count[e]) * static_cast<double>(prob[e]);
  }
  const double n = p.first_choices ? choices : choices / static_cast<double>(k);
  const double each = n > 0 ? static_cast<double>(p.balance) * static_cast<double>(E) / (compared * n) : 0;
  const double z = n > 0 ? static_cast<double>(p.z) * static_cast<double>(prob[E]) / n : 0;
  *loss.as<float>() = static_cast<float>(each * products + z);
  for (i64 e = 0; e < E; ++e) score_grad.as<float>()[e] = static_cast<float>(each * static_cast<double>(count[e]));
}

void balance_experts(TensorView bias, TensorView counts, float rate, const GradVerdict* verdict, Stream&) noexcept {
  if (verdict->finite == 0) return;
  const i64 E = bias.numel();
  const float* const count = counts.as<float>();
  double all = 0;
  for (i64 e = 0; e < E; ++e) all += static_cast<double>(count[e]);
  for (i64 e = 0; e < E; ++e) {
    const double above = static_cast<double>(E) * static_cast<double>(count[e]) - all;
    bias.as<float>()[e] -= above > 0 ? rate : above < 0 ? -rate : 0.0f;
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
