// SPDX-License-Identifier: Apache-2.0
#pragma once
// The order in which a router prefers experts, for CPUs and CUDA alike: by biased score, NaN below every number, and
// equal ones by their number, the lowest first. Static functions, since files compiled for several instruction sets
// must not share symbols.

#include <bit>

#include "ds/kernels/ops.h"

namespace ds::router {

// Larger is better, never 0, and different for any two experts.
DS_HOST_DEVICE static constexpr u64 rank_of(float score, i64 expert) noexcept {
  u32 key = 0;
  if (score == score) {
    const u32 bits = std::bit_cast<u32>(score + 0.0f);  // -0 becomes 0
    key = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  }
  return u64{key} << 32 | (0xFFFFFFFFu - static_cast<u32>(expert));
}
DS_HOST_DEVICE static constexpr i64 expert_of(u64 rank) noexcept {
  return static_cast<i64>(0xFFFFFFFFu - static_cast<u32>(rank & 0xFFFFFFFFu));
}

// The scores of a token, the bias on the choice, or null, and an expert that is not to be chosen, or -1.
struct Biased {
  const float *scores, *bias;
  i64 except = -1;
};
DS_HOST_DEVICE static float score_of(const Biased& x, i64 expert) noexcept {
  return x.bias != nullptr ? x.scores[expert] + x.bias[expert] : x.scores[expert];
}

// The best rank below `bound` among experts first, first + step, ... of E, or 0. Groups have `width` experts, and only
// those in the set `groups` count.
[[maybe_unused]] DS_HOST_DEVICE static u64 best_below(u64 bound, u64 groups, i64 width, i64 first, i64 step, i64 E,
                                                      const Biased& x) noexcept {
  u64 best = 0;
  for (i64 e = first; e < E; e += step) {
    if ((groups >> (e / width) & 1) == 0 || e == x.except) continue;
    const u64 rank = rank_of(score_of(x, e), e);
    if (rank < bound && rank > best) best = rank;
  }
  return best;
}

// The rank of a group: by its best score, or by the sum of its two best.
[[maybe_unused]] DS_HOST_DEVICE static u64 rank_of_group(i64 group, i64 width, bool by_two, const Biased& x) noexcept {
  u64 first = 0, second = 0;
  for (i64 e = group * width; e < (group + 1) * width; ++e) {
    const u64 rank = rank_of(score_of(x, e), e);
    if (rank > first) {
      second = first, first = rank;
    } else if (rank > second) {
      second = rank;
    }
  }
  float value = score_of(x, expert_of(first));
  if (by_two && second != 0) value += score_of(x, expert_of(second));
  return rank_of(value, group);
}

// The divisor of the weights of chosen scores with this sum, and whether it depends on them.
inline constexpr float kLeastSum = 0x1p-23f;
[[maybe_unused]] DS_HOST_DEVICE static float divisor_of(float sum, const RouterParams& p) noexcept {
  if (!p.normalise) return 1;
  return p.sigmoid ? sum + 1e-20f : sum < kLeastSum ? kLeastSum : sum;
}
[[maybe_unused]] DS_HOST_DEVICE static bool divides(float sum, const RouterParams& p) noexcept {
  return p.normalise && (p.sigmoid || !(sum < kLeastSum));
}

// The order in which choices of an expert are kept: larger is better, and different for any two choices.
struct Priorities {
  const float* of_choice;  // or null
  i64 N, k;
  bool by_rank;

  DS_HOST_DEVICE u64 operator()(i64 i) const noexcept {
    return rank_of(of_choice != nullptr ? of_choice[i] : 0.0f, by_rank ? i % k * N + i / k : i);
  }
};

}  // namespace ds::router
