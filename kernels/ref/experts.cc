// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: routing, sorting, combining, products of groups of rows.

#include <algorithm>
#include <cmath>
#include <vector>

#include "ref/element.h"
#include "ref/product.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

// A row of scores or logits in fp64.
std::vector<double> row_of(const TensorView& x, i64 r) {
  std::vector<double> row(static_cast<size_t>(x.dim(1)));
  for (size_t e = 0; e < row.size(); ++e) row[e] = get(x, r * x.dim(1) + static_cast<i64>(e));
  return row;
}
double sum_of(const std::vector<double>& x) noexcept {
  double sum = 0;
  for (const double a : x) sum += a;
  return sum;
}
// ln of the sum of e^x.
double lse_of(const std::vector<double>& x) noexcept {
  double top = -INFINITY, sum = 0;
  for (const double a : x) top = std::max(top, a);
  for (const double a : x) sum += std::exp(a - top);
  return top + std::log(sum);
}

bool better(double a, double b) noexcept { return a > b || (std::isnan(b) && !std::isnan(a)); }
// The places of the n best numbers, best first; of equal ones the first.
std::vector<size_t> best_of(const std::vector<double>& x, i64 n) {
  std::vector<size_t> places(x.size());
  for (size_t i = 0; i < x.size(); ++i) places[i] = i;
  std::stable_sort(places.begin(), places.end(), [&](size_t a, size_t b) { return better(x[a], x[b]); });
  places.resize(static_cast<size_t>(n));
  return places;
}

// Experts by their biased scores, best first.
std::vector<size_t> choose(const std::vector<double>& biased, const RouterParams& p, i64 k) {
  const size_t groups = static_cast<size_t>(p.groups), width = biased.size() / groups;
  std::vector<double> of_group;
  for (size_t g = 0; g < groups; ++g) {
    const std::vector<double> scores(biased.begin() + static_cast<i64>(g * width),
                                     biased.begin() + static_cast<i64>((g + 1) * width));
    double value = 0;
    for (const size_t i : best_of(scores, p.group_by_two && width > 1 ? 2 : 1)) value += scores[i];
    of_group.push_back(value);
  }
  const std::vector<size_t> chosen_groups = best_of(of_group, p.chosen_groups);
  std::vector<size_t> chosen;
  for (const size_t e : best_of(biased, static_cast<i64>(biased.size()))) {
    const bool there = std::find(chosen_groups.begin(), chosen_groups.end(), e / width) != chosen_groups.end();
    if (there && static_cast<i64>(chosen.size()) < k) chosen.push_back(e);
  }
  return chosen;
}

constexpr double kLeastSum = 0x1p-23;
double divisor_of(double sum, const RouterParams& p) noexcept {
  if (!p.normalise) return 1;
  return p.sigmoid ? sum + 1e-20 : sum < kLeastSum ? kLeastSum : sum;
}
// Whether the divisor depends on the scores.
bool divides(double sum, const RouterParams& p) noexcept { return p.normalise && (p.sigmoid || !(sum < kLeastSum)); }
bool counts(const TensorView& targets, i64 r, const RouterLossParams& p) noexcept {
  return !targets || targets.as<i32>()[r] != p.ignore_index;
}

}  // namespace

void route(TensorView chosen, TensorView weights, TensorView scores, TensorView logits, TensorView bias,
           TensorView noisy, const RouterParams& p, Stream& stream) noexcept {
  const i64 R = logits.dim(0), E = logits.dim(1), k = chosen.dim(1);
  for (i64 r = 0; r < R; ++r) {
    const std::vector<double> z = row_of(logits, r);
    const double lse = lse_of(z);
    for (i64 e = 0; e < E; ++e) {
      const double x = z[static_cast<size_t>(e)];
      put(scores, r * E + e, p.sigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - lse));
    }
    // The choice is that of the scores as they are stored.
    std::vector<double> biased = row_of(scores, r);
    for (i64 e = 0; bias && e < E; ++e) {
      double& x = biased[static_cast<size_t>(e)];
      x += get(bias, e);
      if (scores.dtype == DType::F32) x = static_cast<double>(static_cast<float>(x));
    }
    std::vector<size_t> best = choose(biased, p, k);
    if (noisy) {
      std::vector<size_t> by_noise = best_of(row_of(noisy, r), E);
      if (p.noisy_second) {
        std::erase(by_noise, best[0]);
        by_noise.insert(by_noise.begin(), best[0]);
      }
      best.assign(by_noise.begin(), by_noise.begin() + k);
    }
    for (i64 j = 0; j < k; ++j) chosen.as<i32>()[r * k + j] = static_cast<i32>(best[static_cast<size_t>(j)]);
  }
  weigh_choices(weights, chosen, scores, p, stream);
}

void weigh_choices(TensorView weights, TensorView chosen, TensorView scores, const RouterParams& p, Stream&) noexcept {
  const i64 R = scores.dim(0), E = scores.dim(1), k = chosen.dim(1);
  for (i64 r = 0; r < R; ++r) {
    const i32* const of_row = chosen.as<i32>() + r * k;
    double sum = 0;
    for (i64 j = 0; j < k; ++j) sum += of_row[j] >= 0 ? get(scores, r * E + of_row[j]) : 0;
    for (i64 j = 0; j < k; ++j) {
      const double score = of_row[j] >= 0 ? get(scores, r * E + of_row[j]) : 0;
      put(weights, r * k + j, static_cast<double>(p.scale) * score / divisor_of(sum, p));
    }
  }
}

void route_grad(TensorView dlogits, TensorView dweights, TensorView chosen, TensorView scores, TensorView logits,
                TensorView score_grad, TensorView stats, TensorView targets, TensorView factor, const RouterParams& p,
                const RouterLossParams& loss, Stream&) noexcept {
  const i64 R = scores.dim(0), E = scores.dim(1), k = chosen.dim(1);
  const double by = factor ? get(factor, 0) : 1;
  double n = 0;
  for (i64 e = 0; stats && e < E; ++e) n += get(stats, e) / static_cast<double>(k);
  for (i64 r = 0; r < R; ++r) {
    const std::vector<double> s = row_of(scores, r);
    struct Choice {
      size_t expert;
      double dweight;
    };
    std::vector<Choice> kept;
    double sum = 0, mean = 0;
    for (i64 j = 0; j < k; ++j) {
      if (const i32 e = chosen.as<i32>()[r * k + j]; e >= 0)
        kept.push_back({static_cast<size_t>(e), get(dweights, r * k + j)});
    }
    for (const Choice& c : kept) sum += s[c.expert];
    const double divisor = divisor_of(sum, p);
    for (const Choice& c : kept) mean += divides(sum, p) ? c.dweight * s[c.expert] / divisor : 0;
    std::vector<double> ds(s.size());
    for (const Choice& c : kept) ds[c.expert] += static_cast<double>(p.scale) * (c.dweight - mean) / divisor;

    const bool counted = stats && counts(targets, r, loss);
    if (counted && score_grad) {
      const double all = p.sigmoid ? sum_of(s) : 1;
      double average = 0;
      for (i64 e = 0; e < E; ++e) average += get(score_grad, e) * s[static_cast<size_t>(e)] / all;
      for (i64 e = 0; e < E; ++e)
        ds[static_cast<size_t>(e)] += by * (get(score_grad, e) - (p.sigmoid ? average : 0)) / all;
    }
    double average = 0;
    for (size_t e = 0; e < s.size(); ++e) average += ds[e] * s[e];
    const bool has_z = counted && loss.z != 0;
    const std::vector<double> z = has_z ? row_of(logits, r) : std::vector<double>();
    const double lse = has_z ? lse_of(z) : 0;
    for (size_t e = 0; e < s.size(); ++e) {
      double x = p.sigmoid ? ds[e] * s[e] * (1 - s[e]) : s[e] * (ds[e] - average);
      if (has_z) x += by * static_cast<double>(loss.z) * 2 * lse / n * std::exp(z[e] - lse);
      put(dlogits, r * E + static_cast<i64>(e), x);
    }
  }
}

void router_stats(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                  TensorView targets, const RouterParams& p, const RouterLossParams& loss, Stream&) noexcept {
  const i64 R = scores.dim(0), E = scores.dim(1), k = chosen.dim(1);
  const RouterStats places{E};
  const auto at = [](i64 place) { return static_cast<size_t>(place); };
  std::vector<double> sums(at(places.size()));
  double entropies = 0;  // in units
  for (i64 r = 0; r < R; ++r) {
    if (!counts(targets, r, loss)) continue;
    const std::vector<double> s = row_of(scores, r);
    const double all = p.sigmoid ? sum_of(s) : 1, lse = lse_of(row_of(logits, r));
    for (i64 j = 0; j < k; ++j) {
      const i64 e = chosen.as<i32>()[r * k + j];
      sums[at(e)] += 1;
      if (j == 0) sums[at(places.firsts() + e)] += 1;
      if (kept && kept.as<i32>()[r * k + j] < 0) sums.back() += 1;
    }
    double entropy = 0;
    for (size_t e = 0; e < s.size(); ++e) {
      const double share = s[e] / all;
      sums[at(places.probs()) + e] += share;
      entropy -= share == 0 ? 0 : share * std::log(share);
    }
    entropies += std::nearbyint(entropy * RouterStats::kFraction);
    sums[at(places.squares())] += lse * lse;
  }
  const double nats = std::floor(entropies / RouterStats::kFraction);
  sums[at(places.report())] = nats;
  sums[at(places.report() + 1)] = entropies - nats * RouterStats::kFraction;
  for (size_t i = 0; i < sums.size(); ++i) put(stats, static_cast<i64>(i), sums[i]);
}

void router_loss(TensorView loss, TensorView score_grad, TensorView stats, TensorView counts, i64 k,
                 const RouterLossParams& p, Stream&) noexcept {
  const i64 E = score_grad.numel();
  const i64 first = p.first_choices ? RouterStats{E}.firsts() : 0;
  const auto count = [&](i64 e) { return counts ? get(counts, e) : get(stats, first + e); };
  double choices = 0, compared = 0, products = 0;
  for (i64 e = 0; e < E; ++e) {
    choices += get(stats, first + e);
    compared += count(e);
    products += count(e) * get(stats, E + e);
  }
  const double n = p.first_choices ? choices : choices / static_cast<double>(k);
  const double each = n > 0 ? static_cast<double>(p.balance) * static_cast<double>(E) / (compared * n) : 0;
  put(loss, 0, n > 0 ? each * products + static_cast<double>(p.z) * get(stats, 2 * E) / n : 0);
  for (i64 e = 0; e < E; ++e) put(score_grad, e, each * count(e));
}

void drop_choices(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams& p, Stream&) noexcept {
  const i64 N = chosen.dim(0), k = chosen.dim(1);
  for (i64 e = 0; e < p.experts; ++e) {
    std::vector<i64> choices;  // those of e, first come first
    for (i64 i = 0; i < N * k; ++i) {
      const i64 choice = p.by_rank ? i % N * k + i / N : i;
      if (chosen.as<i32>()[choice] == e) choices.push_back(choice);
    }
    if (priority) {
      std::stable_sort(choices.begin(), choices.end(),
                       [&](i64 a, i64 b) { return better(get(priority, a), get(priority, b)); });
    }
    for (size_t i = 0; i < choices.size(); ++i)
      kept.as<i32>()[choices[i]] = static_cast<i64>(i) < p.capacity ? static_cast<i32>(e) : -1;
  }
}

void balance_experts(TensorView bias, TensorView counts, float rate, const GradVerdict* verdict, Stream&) noexcept {
  if (verdict->finite == 0) return;
  const i64 E = bias.numel();
  double all = 0;
  for (i64 e = 0; e < E; ++e) all += get(counts, e);
  for (i64 e = 0; e < E; ++e) {
    const double above = static_cast<double>(E) * get(counts, e) - all;
    put(bias, e, get(bias, e) - static_cast<double>(rate) * ((above > 0) - (above < 0)));
  }
}

void sort_choices(TensorView offsets, TensorView places, TensorView tokens, TensorView choices, TensorView chosen,
                  i64 first, Stream&) noexcept {
  const i64 n = chosen.numel(), k = chosen.dim(1), E = offsets.numel() - 1;
  for (const TensorView& x : {places, tokens, choices}) std::fill_n(x.as<i32>(), n, -1);
  i32 place = 0;
  for (i64 e = 0; e < E; ++e) {
    offsets.as<i32>()[e] = place;
    for (i64 i = 0; i < n; ++i) {
      if (chosen.as<i32>()[i] != first + e) continue;
      tokens.as<i32>()[place] = static_cast<i32>(i / k);
      choices.as<i32>()[place] = static_cast<i32>(i);
      places.as<i32>()[i] = place++;
    }
  }
  offsets.as<i32>()[E] = place;
}

namespace {

// The number of choices of a row, and the place of each.
struct Places {
  const i32* places;
  i64 k;

  Places(const TensorView& view, const TensorView& x, i64 R)
      : places(view.as<i32>()),
        k(view    ? view.dim(1)
          : R > 0 ? x.dim(0) / R
                  : 0) {}
  i64 operator()(i64 i) const noexcept { return places == nullptr ? i : places[i]; }
};

}  // namespace

void combine_rows(TensorView y, TensorView x, TensorView places, TensorView weights, TensorView residual,
                  Stream&) noexcept {
  const i64 R = y.dim(0), C = y.dim(1);
  const Places place(places, x, R);
  for (i64 r = 0; r < R; ++r) {
    for (i64 c = 0; c < C; ++c) {
      double sum = residual ? get(residual, r * residual.stride[0] + c) : 0;
      for (i64 i = r * place.k; i < (r + 1) * place.k; ++i) {
        if (place(i) >= 0) sum += (weights ? get(weights, i) : 1) * get(x, place(i) * x.stride[0] + c);
      }
      put(y, r * y.stride[0] + c, sum);
    }
  }
}

void combine_rows_grad(TensorView dx, TensorView dweights, TensorView dy, TensorView x, TensorView places,
                       TensorView weights, Stream&) noexcept {
  const i64 R = dy.dim(0), C = dy.dim(1);
  const Places place(places, dx, R);
  for (i64 i = 0; i < R * place.k; ++i) {
    const i64 p = place(i), row = i / place.k * dy.stride[0];
    double dot = 0;
    for (i64 c = 0; p >= 0 && c < C; ++c) {
      const double g = get(dy, row + c);
      if (dweights) dot += g * get(x, p * x.stride[0] + c);
      put(dx, p * dx.stride[0] + c, (weights ? get(weights, i) : 1) * g);
    }
    if (dweights) put(dweights, i, dot);
  }
}

namespace {

// Rows [begin, end) of a group; without offsets all M are one.
struct Group {
  i64 begin, end;
  Group(const TensorView& offsets, i64 g, i64 M) noexcept
      : begin(offsets ? offsets.as<i32>()[g] : 0), end(offsets ? offsets.as<i32>()[g + 1] : M) {}
};
i64 num_groups(const TensorView& offsets) noexcept { return offsets ? offsets.numel() - 1 : 1; }

}  // namespace

void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b, Stream&) noexcept {
  const i64 E = b.dim(0), N = c.dim(1), K = a.dim(1);
  for (i64 g = 0; g < num_groups(offsets); ++g) {
    const Group rows(offsets, g, a.dim(0));
    for (i64 i = rows.begin; i < rows.end; ++i) {
      for (i64 n = 0; n < N; ++n) {
        double x = 0;
        for (i64 k = 0; k < K && !b.codes; ++k) {
          x += get(a, i * a.stride[0] + k) *
               get(b, g % E * b.stride[0] + (trans_b ? n * b.stride[1] + k : k * b.stride[1] + n));
        }
        put(c, i * c.stride[0] + n, b.codes ? product_of_rows(a, i, coded_matrix(b, g % E), n) : x);
      }
    }
  }
}

void grouped_matmul_grad(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                         Stream&) noexcept {
  const i64 E = c.dim(0), N = a.dim(1), K = b.dim(1);
  for (i64 i = 0; i < c.numel(); ++i) {
    const i64 e = i / (N * K), n = i / K % N, k = i % K, at = e * c.stride[0] + n * c.stride[1] + k;
    double x = accumulate ? get(c, at) : 0;
    for (i64 g = e; g < num_groups(offsets); g += E) {
      const Group rows(offsets, g, a.dim(0));
      for (i64 r = rows.begin; r < rows.end; ++r) x += get(a, r * a.stride[0] + n) * get(b, r * b.stride[0] + k);
    }
    put(c, at, x);
  }
}

void grouped_bias(TensorView y, TensorView bias, TensorView offsets, Stream&) noexcept {
  for (i64 g = 0; g < num_groups(offsets); ++g) {
    const Group rows(offsets, g, y.dim(0));
    for (i64 i = rows.begin; i < rows.end; ++i) {
      for (i64 n = 0; n < y.dim(1); ++n) {
        const i64 at = i * y.stride[0] + n;
        put(y, at, get(y, at) + get(bias, g % bias.dim(0) * bias.dim(1) + n));
      }
    }
  }
}

void grouped_bias_grad(TensorView dbias, TensorView dy, TensorView weights, TensorView offsets, bool accumulate,
                       Stream&) noexcept {
  const i64 E = dbias.dim(0), N = dbias.dim(1);
  for (i64 at = 0; at < E * N; ++at) {
    double x = accumulate ? get(dbias, at) : 0;
    for (i64 g = at / N; g < num_groups(offsets); g += E) {
      const Group rows(offsets, g, dy.dim(0));
      for (i64 i = rows.begin; i < rows.end; ++i)
        x += (weights ? get(weights, i) : 1) * get(dy, i * dy.stride[0] + at % N);
    }
    put(dbias, at, x);
  }
}

}  // namespace ds::ref
