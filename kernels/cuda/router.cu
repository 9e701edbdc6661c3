// SPDX-License-Identifier: Apache-2.0
// The router of experts. A warp has a token, its lanes every 32nd expert. Statistics are sums of slices of tokens in
// fp64, added in their order.

#include <cmath>

#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/scratch_plan.h"
#include "cuda/vectors.h"
#include "router.h"

namespace ds::cuda {
namespace {

using scratch::RouterSlices;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

DS_DEVICE int warp_of() { return thread_index() / kWarp; }
DS_DEVICE int lane_of() { return thread_index() % kWarp; }
// Calls f(r) for the rows of this warp.
template <class F>
DS_DEVICE void for_rows(i64 R, F&& f) {
  for (i64 r = i64{block_index().x} * kWarps + warp_of(); r < R; r += i64{grid_size().x} * kWarps) f(r);
}
Launch over_rows(i64 R) { return {dim3(static_cast<unsigned>(ceil_div(R, kWarps))), kThreads, 0}; }

DS_DEVICE u64 warp_best(u64 rank) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const u64 other = warp_shuffle_xor(rank, mask);
    rank = rank > other ? rank : other;
  }
  return rank;
}
DS_DEVICE double warp_total(double x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += warp_shuffle_xor(x, mask);
  return x;
}

// The largest logit of a row, ignoring NaN, and the sum of e^(z - top).
struct Softmax {
  float top, sum;
};
DS_DEVICE Softmax softmax_of(const float* z, i64 E) {
  float top = -INFINITY, sum = 0;
  for (i64 e = lane_of(); e < E; e += kWarp) top = z[e] > top ? z[e] : top;
  top = warp_max(top);
  for (i64 e = lane_of(); e < E; e += kWarp) sum += std::exp(z[e] - top);
  return {top, warp_sum(sum)};
}

// ---- choice

DS_DEVICE u64 choose_groups(const RouterParams& p, i64 width, const router::Biased& scores) {
  u64 chosen = 0, bound = ~u64{0};
  for (i64 count = 0; count < p.chosen_groups; ++count) {
    u64 best = 0;
    for (i64 g = lane_of(); g < p.groups; g += kWarp) {
      const u64 rank = router::rank_of_group(g, width, p.group_by_two, scores);
      if (rank < bound && rank > best) best = rank;
    }
    bound = warp_best(best);
    chosen |= u64{1} << router::expert_of(bound);
  }
  return chosen;
}

DS_DEVICE float sum_of(const float* s, const i32* chosen, i64 k) {
  float sum = 0;
  for (i64 j = 0; j < k; ++j) sum += chosen[j] >= 0 ? s[chosen[j]] : 0.0f;
  return sum;
}
DS_DEVICE void weigh(float* weights, const float* s, const i32* chosen, i64 k, const RouterParams& p) {
  const float divisor = router::divisor_of(sum_of(s, chosen, k), p);
  for (i64 j = lane_of(); j < k; j += kWarp) weights[j] = chosen[j] >= 0 ? p.scale * (s[chosen[j]] / divisor) : 0.0f;
}

DS_DEVICE void choose(i32* chosen, i64 first, i64 k, u64 groups, i64 width, i64 E, const router::Biased& scores) {
  u64 rank = ~u64{0};
  for (i64 j = first; j < k; ++j) {
    rank = warp_best(router::best_below(rank, groups, width, lane_of(), kWarp, E, scores));
    if (lane_of() == 0) chosen[j] = static_cast<i32>(router::expert_of(rank));
  }
}

__global__ void route_kernel(i32* chosen, float* weights, float* scores, const float* logits, const float* bias,
                             const float* noisy, i64 R, i64 E, i64 k, RouterParams p) {
  for_rows(R, [&](i64 r) {
    const float* const z = logits + r * E;
    float* const s = scores + r * E;
    i32* const c = chosen + r * k;
    if (p.sigmoid) {
      for (i64 e = lane_of(); e < E; e += kWarp) s[e] = 1.0f / (1.0f + std::exp(-z[e]));
    } else {
      const Softmax of = softmax_of(z, E);
      for (i64 e = lane_of(); e < E; e += kWarp) s[e] = std::exp(z[e] - of.top) / of.sum;
    }
    sync_warp();
    const router::Biased biased{s, bias};
    if (noisy == nullptr) {
      const i64 width = E / p.groups;
      choose(c, 0, k, p.groups > 1 ? choose_groups(p, width, biased) : 1, width, E, biased);
    } else if (p.noisy_second) {
      choose(c, 0, 1, 1, E, E, biased);
      sync_warp();
      choose(c, 1, k, 1, E, E, {noisy + r * E, nullptr, c[0]});
    } else {
      choose(c, 0, k, 1, E, E, {noisy + r * E, nullptr});
    }
    sync_warp();
    weigh(weights + r * k, s, c, k, p);
  });
}

__global__ void weigh_choices_kernel(float* weights, const i32* chosen, const float* scores, i64 R, i64 E, i64 k,
                                     RouterParams p) {
  for_rows(R, [&](i64 r) { weigh(weights + r * k, scores + r * E, chosen + r * k, k, p); });
}

// ---- gradient

struct RouteGradArgs {
  float* dlogits;
  const float* dweights;
  const i32* chosen;
  const float *scores, *logits, *score_grad, *stats;
  const i32* targets;
  const float* factor;
  i64 R, E, k;
  RouterParams p;
  RouterLossParams loss;
};

__global__ void route_grad_kernel(RouteGradArgs a) {
  const i64 E = a.E, k = a.k;
  const bool sigmoids = a.p.sigmoid;
  const float factor = a.factor != nullptr ? *a.factor : 1.0f;
  float choices = 0;
  for (i64 e = lane_of(); a.stats != nullptr && e < E; e += kWarp) choices += a.stats[e];
  const float of_z = 2 * a.loss.z * factor / (warp_sum(choices) / static_cast<float>(k));
  for_rows(a.R, [&](i64 r) {
    float* const dz = a.dlogits + r * E;
    const float *const s = a.scores + r * E, *const z = a.logits + r * E, *const dw = a.dweights + r * k;
    const i32* const c = a.chosen + r * k;
    const float sum = sum_of(s, c, k), divisor = router::divisor_of(sum, a.p);
    float mean = 0;
    for (i64 j = 0; router::divides(sum, a.p) && j < k; ++j) mean += c[j] >= 0 ? dw[j] * (s[c[j]] / divisor) : 0.0f;
    const bool counted = a.stats != nullptr && (a.targets == nullptr || a.targets[r] != a.loss.ignore_index);
    const bool balanced = counted && a.score_grad != nullptr;
    float all = 0, average = 0;
    for (i64 e = lane_of(); balanced && sigmoids && e < E; e += kWarp) {
      all += s[e];
      average += a.score_grad[e] * s[e];
    }
    all = sigmoids ? warp_sum(all) : 1.0f;
    average = warp_sum(average) / all;

    float product = 0;  // of the scores and their gradient
    for (i64 e = lane_of(); e < E; e += kWarp) {
      float ds = 0;
      for (i64 j = 0; j < k; ++j) {
        if (c[j] == e) ds = a.p.scale * (dw[j] - mean) / divisor;
      }
      if (balanced) ds += factor / all * (a.score_grad[e] - average);
      dz[e] = ds;
      product += ds * s[e];
    }
    product = warp_sum(product);
    const bool has_z = counted && a.loss.z != 0;
    const Softmax of = has_z ? softmax_of(z, E) : Softmax{0, 1};
    const float lse = of.top + std::log(of.sum);
    for (i64 e = lane_of(); e < E; e += kWarp) {
      float x = sigmoids ? dz[e] * s[e] * (1.0f - s[e]) : s[e] * (dz[e] - product);
      if (has_z) x += of_z * lse / of.sum * std::exp(z[e] - of.top);
      dz[e] = x;
    }
  });
}

// ---- statistics

struct StatsShared {
  double all[RouterSlices::kStep], squared_lse[RouterSlices::kStep], entropy[RouterSlices::kStep];
  bool counts[RouterSlices::kStep];
};

// The entropy of a token's probabilities, in the unit in which entropies are added.
DS_DEVICE double entropy_of(const float* s, const float* z, i64 E, double all, double lse, bool sigmoids) {
  double sum = 0;
  for (i64 e = lane_of(); e < E; e += kWarp) {
    const double share = static_cast<double>(s[e]) / all;
    if (share != 0) sum += share * (sigmoids ? std::log(share) : static_cast<double>(z[e]));
  }
  return std::rint(((sigmoids ? 0.0 : lse) - warp_total(sum)) * static_cast<double>(RouterStats::kFraction));
}

// partials[slice][router_sums(E)]
__global__ void router_partials_kernel(double* partials, const i32* chosen, const i32* kept, const float* scores,
                                       const float* logits, const i32* targets, i64 R, i64 E, i64 k, i64 slice_rows,
                                       bool sigmoids, i32 ignore_index) {
  constexpr int kStep = RouterSlices::kStep;
  StatsShared& shared = block_shared<StatsShared>();
  const i64 begin = i64{block_index().x} * slice_rows, end = begin + slice_rows < R ? begin + slice_rows : R;
  const RouterStats places{E};
  double* const sums = partials + i64{block_index().x} * scratch::router_sums(E);
  for (i64 i = thread_index(); i < scratch::router_sums(E); i += kThreads) sums[i] = 0;
  sync_block();
  for (i64 first = begin; first < end; first += kStep) {
    const int rows = static_cast<int>(end - first < kStep ? end - first : kStep);
    for (int i = warp_of(); i < rows; i += kWarps) {
      const i64 r = first + i;
      double all = 0;
      for (i64 e = lane_of(); sigmoids && e < E; e += kWarp) all += static_cast<double>(scores[r * E + e]);
      all = sigmoids ? warp_total(all) : 1.0;
      const Softmax of = softmax_of(logits + r * E, E);
      const double lse = static_cast<double>(of.top) + std::log(static_cast<double>(of.sum));
      const double entropy = entropy_of(scores + r * E, logits + r * E, E, all, lse, sigmoids);
      if (lane_of() == 0) {
        shared.all[i] = all;
        shared.entropy[i] = entropy;
        shared.squared_lse[i] = lse * lse;
        shared.counts[i] = targets == nullptr || targets[r] != ignore_index;
      }
    }
    sync_block();
    for (i64 e = thread_index(); e < E; e += kThreads) {
      double prob = 0;
      i32 count = 0, firsts = 0;
      for (int i = 0; i < rows; ++i) {
        if (!shared.counts[i]) continue;
        prob += static_cast<double>(scores[(first + i) * E + e]) / shared.all[i];
        for (i64 j = 0; j < k; ++j) count += chosen[(first + i) * k + j] == e ? 1 : 0;
        firsts += chosen[(first + i) * k] == e ? 1 : 0;
      }
      sums[e] += static_cast<double>(count);
      sums[places.probs() + e] += prob;
      sums[places.firsts() + e] += static_cast<double>(firsts);
    }
    if (thread_index() == 0) {
      double squares = 0, entropy = 0;
      i32 dropped = 0;
      for (int i = 0; i < rows; ++i) {
        if (!shared.counts[i]) continue;
        squares += shared.squared_lse[i];
        entropy += shared.entropy[i];
        for (i64 j = 0; kept != nullptr && j < k; ++j) dropped += kept[(first + i) * k + j] < 0 ? 1 : 0;
      }
      sums[places.squares()] += squares;
      sums[places.report()] += entropy;
      sums[places.report() + 1] += static_cast<double>(dropped);
    }
    sync_block();
  }
}
__global__ void router_totals_kernel(float* stats, const double* partials, i64 slices, i64 E) {
  const i64 i = i64{block_index().x} * kThreads + thread_index(), width = scratch::router_sums(E);
  if (i >= width) return;
  double sum = 0;
  for (i64 s = 0; s < slices; ++s) sum += partials[s * width + i];
  const i64 entropy = RouterStats{E}.report();
  if (i == entropy) {
    const double unit = static_cast<double>(RouterStats::kFraction), nats = std::floor(sum / unit);
    stats[i] = static_cast<float>(nats);
    stats[i + 1] = static_cast<float>(sum - nats * unit);
  } else {
    stats[i > entropy ? i + 1 : i] = static_cast<float>(sum);
  }
}

__global__ void router_loss_kernel(float* loss, float* score_grad, const float* stats, const float* counts, i64 E,
                                   i64 k, RouterLossParams p) {
  const float* const own = stats + (p.first_choices ? RouterStats{E}.firsts() : 0);
  const float* const count = counts != nullptr ? counts : own;
  double choices = 0, compared = 0, products = 0;
  for (i64 e = lane_of(); e < E; e += kWarp) {
    choices += static_cast<double>(own[e]);
    compared += static_cast<double>(count[e]);
    products += static_cast<double>(count[e]) * static_cast<double>(stats[E + e]);
  }
  choices = warp_total(choices);
  compared = warp_total(compared);
  products = warp_total(products);
  const double n = p.first_choices ? choices : choices / static_cast<double>(k);
  const double each = n > 0 ? static_cast<double>(p.balance) * static_cast<double>(E) / (compared * n) : 0.0;
  const double z = n > 0 ? static_cast<double>(p.z) * static_cast<double>(stats[2 * E]) / n : 0.0;
  if (lane_of() == 0) *loss = static_cast<float>(each * products + z);
  for (i64 e = lane_of(); e < E; e += kWarp) score_grad[e] = static_cast<float>(each * static_cast<double>(count[e]));
}

// Sums of integers are exact in any order.
__global__ void balance_experts_kernel(float* bias, const float* counts, i64 E, float rate,
                                       const GradVerdict* verdict) {
  if (verdict->finite == 0) return;
  double all = 0;
  for (i64 e = lane_of(); e < E; e += kWarp) all += static_cast<double>(counts[e]);
  all = warp_total(all);
  for (i64 e = lane_of(); e < E; e += kWarp) {
    const double above = static_cast<double>(E) * static_cast<double>(counts[e]) - all;
    bias[e] -= above > 0 ? rate : above < 0 ? -rate : 0.0f;
  }
}

}  // namespace

void route(TensorView chosen, TensorView weights, TensorView scores, TensorView logits, TensorView bias,
           TensorView noisy, const RouterParams& p, Stream& s) noexcept {
  Context& c = context(s);
  launch(route_kernel, over_rows(logits.dim(0)), c.stream(), chosen.as<i32>(), weights.as<float>(), scores.as<float>(),
         logits.as<float>(), bias.as<float>(), noisy.as<float>(), logits.dim(0), logits.dim(1), chosen.dim(1), p);
  c.check(cudaGetLastError(), "route");
}

void weigh_choices(TensorView weights, TensorView chosen, TensorView scores, const RouterParams& p,
                   Stream& s) noexcept {
  Context& c = context(s);
  launch(weigh_choices_kernel, over_rows(scores.dim(0)), c.stream(), weights.as<float>(), chosen.as<i32>(),
         scores.as<float>(), scores.dim(0), scores.dim(1), chosen.dim(1), p);
  c.check(cudaGetLastError(), "weigh_choices");
}

void route_grad(TensorView dlogits, TensorView dweights, TensorView chosen, TensorView scores, TensorView logits,
                TensorView score_grad, TensorView stats, TensorView targets, TensorView factor, const RouterParams& p,
                const RouterLossParams& loss, Stream& s) noexcept {
  Context& c = context(s);
  const RouteGradArgs args{.dlogits = dlogits.as<float>(),
                           .dweights = dweights.as<float>(),
                           .chosen = chosen.as<i32>(),
                           .scores = scores.as<float>(),
                           .logits = logits.as<float>(),
                           .score_grad = score_grad.as<float>(),
                           .stats = stats.as<float>(),
                           .targets = targets.as<i32>(),
                           .factor = factor.as<float>(),
                           .R = scores.dim(0),
                           .E = scores.dim(1),
                           .k = chosen.dim(1),
                           .p = p,
                           .loss = loss};
  launch(route_grad_kernel, over_rows(args.R), c.stream(), args);
  c.check(cudaGetLastError(), "route_grad");
}

void router_stats(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                  TensorView targets, const RouterParams& p, const RouterLossParams& loss, Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = scores.dim(0), E = scores.dim(1), width = scratch::router_sums(E);
  const RouterSlices slices = RouterSlices::of(R);
  auto* const partials = static_cast<double*>(c.scratch(static_cast<size_t>(slices.bytes(E))));
  if (partials == nullptr) return;
  launch(router_partials_kernel, {dim3(static_cast<unsigned>(slices.count)), kThreads, sizeof(StatsShared)}, c.stream(),
         partials, chosen.as<i32>(), kept.as<i32>(), scores.as<float>(), logits.as<float>(), targets.as<i32>(), R, E,
         chosen.dim(1), slices.rows, p.sigmoid, loss.ignore_index);
  c.check(cudaGetLastError(), "router_stats");
  launch(router_totals_kernel, {dim3(static_cast<unsigned>(ceil_div(width, kThreads))), kThreads, 0}, c.stream(),
         stats.as<float>(), partials, slices.count, E);
  c.check(cudaGetLastError(), "router_stats, totals");
}

void router_loss(TensorView loss, TensorView score_grad, TensorView stats, TensorView counts, i64 k,
                 const RouterLossParams& p, Stream& s) noexcept {
  Context& c = context(s);
  launch(router_loss_kernel, {dim3(1), kWarp, 0}, c.stream(), loss.as<float>(), score_grad.as<float>(),
         stats.as<float>(), counts.as<float>(), score_grad.numel(), k, p);
  c.check(cudaGetLastError(), "router_loss");
}

void balance_experts(TensorView bias, TensorView counts, float rate, const GradVerdict* verdict, Stream& s) noexcept {
  Context& c = context(s);
  launch(balance_experts_kernel, {dim3(1), kWarp, 0}, c.stream(), bias.as<float>(), counts.as<float>(), bias.numel(),
         rate, verdict);
  c.check(cudaGetLastError(), "balance_experts");
}

}  // namespace ds::cuda
