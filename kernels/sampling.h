// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a token is drawn from a row of logits, for all back ends alike. Weights of tokens are integers, so that sums of
// them do not depend on an order; each operation is rounded for itself. CPUs and CUDA also share the steps of a draw,
// and differ in how they run through a row. Static functions, since files compiled for several instruction sets must
// not share symbols.

#include <bit>
#include <cmath>
#include <limits>

#include "ds/kernels/ops.h"

namespace ds::sampling {

inline constexpr float kBanned = -std::numeric_limits<float>::infinity();
inline constexpr float kLargest = std::numeric_limits<float>::max();
inline constexpr u64 kOne = u64{1} << 40;  // the weight of the most likely token

DS_HOST_DEVICE constexpr static bool is_finite(float z) noexcept {
  return (std::bit_cast<u32>(z) & 0x7F800000u) != 0x7F800000u;
}

// Orders numbers but for NaN. Both zeros are equal.
DS_HOST_DEVICE constexpr static u32 order_of(float z) noexcept {
  const u32 bits = std::bit_cast<u32>(z + 0.0f);  // -0 becomes 0
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}
DS_HOST_DEVICE constexpr static float number_of(u32 order) noexcept {
  return std::bit_cast<float>(order ^ (((order >> 31) - 1) | 0x80000000u));
}

// Finite, or banned.
[[maybe_unused]] DS_HOST_DEVICE static float changed(float z, const LogitChange& c) noexcept {
  if (c.less == -kBanned) return kBanned;
  const float y = (z < 0 ? z * c.repetition : z / c.repetition) - c.less;
  return y > kLargest ? kLargest : y < -kLargest ? -kLargest : y;
}

// The weight of a token: floor(2^40 e^((z - most) / temperature)), within the rounding of fp32. `most` is the largest
// z.
struct Weights {
  float most;
  float scale;  // log2(e) / temperature

  DS_HOST_DEVICE static Weights of(float most, double temperature) noexcept {
    const double scale = 1.4426950408889634 / temperature;
    return {most, scale < double{kLargest} ? static_cast<float>(scale) : kLargest};
  }
  DS_HOST_DEVICE u64 operator()(float z) const noexcept {
    constexpr float kToInteger = 0x1.8p23f;  // sums with it have an integer in their last bits
    const float x = (z - most) * scale, y = x > -62.0f ? x : -62.0f;
    const float sum = y + kToInteger, r = y - (sum - kToInteger);
    // 2^r for |r| <= 1/2, within 1e-7: minimax coefficients, and exactly 1 at 0.
    float p = 1.5461447765119374e-4f;
    p = p * r + 1.3390866806730628e-3f;
    p = p * r + 9.618056938052177e-3f;
    p = p * r + 5.5503569543361664e-2f;
    p = p * r + 0.24022650718688965f;
    p = p * r + 0.6931471824645996f;
    p = p * r + 1.0f;
    const u32 bits = std::bit_cast<u32>(p) + (std::bit_cast<u32>(sum) << 23);
    const u64 weight = u64{(bits & 0x7FFFFFu) | 0x800000u} << 17 >> (127 - (bits >> 23));
    return z > kBanned ? weight : 0;
  }
};

// The part of a total that the most likely tokens with probability p need.
[[maybe_unused]] DS_HOST_DEVICE static u64 share_of(double p, u64 total) noexcept {
  const double share = std::ceil(p * static_cast<double>(total));
  return share >= static_cast<double>(total) ? total : share < 1 ? 1 : static_cast<u64>(share);
}
// random / 2^64 * total, rounded down.
[[maybe_unused]] DS_HOST_DEVICE constexpr static u64 place_of(u64 random, u64 total) noexcept {
  constexpr u64 kLow = 0xFFFFFFFFu;
  const u64 a = random >> 32, b = random & kLow, c = total >> 32, d = total & kLow;
  const u64 middle = a * d + (b * d >> 32), other = b * c + (middle & kLow);
  return a * c + (middle >> 32) + (other >> 32);
}

// The tokens that filters leave.
struct Kept {
  // The first ones in the order of logits: those above `order`, and of those equal to it the ones up to id `last`.
  u32 order = 0;
  i32 last = std::numeric_limits<i32>::max();
  u64 least = 0;  // of these, the ones with at least this weight

  DS_HOST_DEVICE bool operator()(float z, i32 id, u64 weight) const noexcept {
    const u32 mine = order_of(z);
    return ((mine > order) | ((mine == order) & (id <= last))) & (weight >= least);  // without branches, for vectors
  }
};

// Tokens in the order of logits up to those that complete a measure.
struct Border {
  u32 order;   // the logits of the last ones
  u64 before;  // the measure of all with larger logits
};

// A row of logits as `draw` needs it. A measure is called with a logit and its id, gives a u64, and has an exact total.
//   size                     the number of logits
//   largest()                the largest order_of
//   border(measure, need)    the place in the order of logits where the measure reaches need(total), 0 < need <= total
//   nth(order, n)            the id of a logit with this order, of which n have lower ids
#ifdef __CUDACC__
#define DS_OF_ROW __device__
#else
#define DS_OF_ROW
#endif

// The first tokens that together measure need(total). `each` gives the measure of one of them by its logit.
template <class Row, class Measure, class Each, class Need>
[[maybe_unused]] DS_OF_ROW static Kept first_of(Row& row, const Measure& measure, const Each& each, const Need& need) {
  u64 needed = 0;
  const Border border = row.border(measure, [&](u64 total) { return needed = need(total); });
  const u64 one = each(number_of(border.order)), ties = (needed - border.before + one - 1) / one;
  return {border.order, row.nth(border.order, ties - 1)};
}

[[maybe_unused]] DS_HOST_DEVICE static bool is_greedy(const Draw& d) noexcept {
  return d.temperature == 0 || d.top_k == 1;
}

// The token that is drawn, of a row whose largest logit has the order `top`. All logits are finite, or banned.
template <class Row>
[[maybe_unused]] DS_OF_ROW static i32 draw(Row& row, const Draw& d, u32 top) {
  if (is_greedy(d) || top == order_of(kBanned)) return row.nth(top, 0);
  const Weights weight = Weights::of(number_of(top), d.temperature);
  Kept kept;
  const auto measure = [&] {  // of what is kept so far
    return [weight, kept](float z, i32 id) {
      const u64 mine = weight(z);
      return kept(z, id, mine) ? mine : 0;
    };
  };
  if (d.top_k > 0 && d.top_k < row.size) {
    const auto one = [](float, i32 = 0) { return u64{1}; };
    kept = first_of(row, one, one, [&](u64) { return static_cast<u64>(d.top_k); });
  }
  if (d.top_p < 1) kept = first_of(row, measure(), weight, [&](u64 total) { return share_of(d.top_p, total); });
  if (d.min_p > 0) kept.least = share_of(d.min_p, kOne);
  // The one that completes a random part of the total.
  return first_of(row, measure(), weight, [&](u64 total) { return place_of(d.random, total) + 1; }).last;
}

#undef DS_OF_ROW

}  // namespace ds::sampling
