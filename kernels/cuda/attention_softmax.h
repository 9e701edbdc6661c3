// SPDX-License-Identifier: Apache-2.0
#pragma once
// One step of flash attention on the tensor core, for the rows of a warp: scores, their softmax, and the sums of
// values.

#include "cuda/attention_steps.h"

namespace ds::cuda::attention {

template <bool kGeneral, int kD>
using ForwardSteps = Steps<kGeneral, ForwardPlan<kD>::kStep>;

template <class E, int kD, bool kGeneral>
struct ForwardShared : ForwardSteps<kGeneral, kD>::Shared {
  using Plan = ForwardPlan<kD>;
  alignas(128) E q[Plan::kOwn * kD];
  E k[2][Plan::kStep * kD], v[2][Plan::kStep * kD];
};

// The running maximum and sum of a lane's two rows; the sum is this lane's part only.
struct Rows {
  float top[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
};

// Turns scores (times log2(e)) into weights 2^(score - top) with the row's new maximum; x contains the earlier sums.
template <int kN, int kColumns>
DS_DEVICE void softmax_step(Rows& rows, float (&s)[kN][4], float (&x)[kColumns][4]) {
  DS_UNROLL
  for (int half = 0; half < 2; ++half) {
    float top = rows.top[half];
    DS_UNROLL
    for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    top = fmaxf(top, warp_shuffle_xor(top, 1));
    top = fmaxf(top, warp_shuffle_xor(top, 2));
    const float base = top == -kInfinity ? 0.0f : top;  // only -inf so far: all weights are 2^-inf = 0
    const float keep = fast_exp2(rows.top[half] - base);
    float sum = rows.sum[half] * keep;
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[n][e] = fast_exp2(s[n][e] - base);
        sum += s[n][e];
      }
    }
    DS_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      x[n][2 * half] *= keep;
      x[n][2 * half + 1] *= keep;
    }
    rows.top[half] = top;
    rows.sum[half] = sum;
  }
}

// The queries of a warp as operands: those of its rows of a tile, in registers if kHold.
template <int kD, int kM, bool kHold, class E>
class Fragments {
 public:
  DS_DEVICE explicit Fragments(const E* tile) : blocks_(Blocks<kD, E>::template of<false>(tile)) {}
  // Once the tile is there.
  DS_DEVICE void load() {
    if constexpr (kHold) {
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        DS_UNROLL
        for (int i = 0; i < kD / 16; ++i) load_matrices(held_[m][i], blocks_.at(16 * m, i));
      }
    }
  }
  DS_DEVICE void operator()(int m, int i, u32 (&fragment)[4]) const {
    if constexpr (kHold) {
      DS_UNROLL
      for (int j = 0; j < 4; ++j) fragment[j] = held_[m][i][j];
    } else {
      load_matrices(fragment, blocks_.at(16 * m, i));
    }
  }

 private:
  Blocks<kD, E> blocks_;
  u32 held_[kHold ? kM : 1][kHold ? kD / 16 : 1][4];
};

// The rows of a warp, from `row` on, and their queries and keys. token_of(row) is the query of a row.
template <class SomeMask, class Keys, class TokenOf>
struct WarpRows {
  const SomeMask& mask;
  TokenOf token_of;
  int b, head;  // for dropout and biases: the rows are then those of one head
  int row;
  Range queries;
  Keys keys;
  u32 blocks;
  int distance0;  // from a query to the key of the same number
};
template <class SomeMask, class Keys, class TokenOf>
WarpRows(const SomeMask&, TokenOf, int, int, int, Range, Keys, u32, int) -> WarpRows<SomeMask, Keys, TokenOf>;

// Adds step n, in tiles k and v, to the rows' statistics and sums x. kByRow: scores are rounded by themselves, so that
// no compiled variant of the code after them can differ in bits.
template <int kD, bool kHold, bool kByRow, int kM, class E, bool kGeneral, int kStep, class Query, class View>
DS_DEVICE void attend_step(float (&x)[kM][kD / 8][4], Rows (&rows)[kM], const Problem<E>& p,
                           const Steps<kGeneral, kStep>& steps, int n, const E* k, const E* v, const Query& query,
                           const View& view) {
  constexpr int kN = kStep / 8;
  const int lane = thread_index() % kWarp;
  const auto needed = steps.template needed<kN / 2>(n, 0, view.keys, view.blocks);
  if (!needed.any()) return;
  float s[kM][kN][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) clear(s[m]);
  multiply_transposed<kD, kHold>(s, query, k, needed);
  if (kGeneral && p.terms.any()) {
    DS_UNROLL
    for (int m = 0; m < kM; ++m) {
      const int row = view.row + 16 * m + lane / 4, base = view.distance0 + lane % 4 * 2 - row;
      make_scores(
          s[m], p, p.terms.bias_of(view.head),
          [&](int i, int e) { return base + steps.first(n, i / 2) + i % 2 * 8 + e % 2 - e / 2 * 8; },
          [](int, int, float) {});
    }
  } else {
    DS_UNROLL
    for (int m = 0; m < kM; ++m) {
      DS_UNROLL
      for (int i = 0; i < kN; ++i) {
        DS_UNROLL
        for (int e = 0; e < 4; ++e) s[m][i][e] = kByRow ? rounded_product(s[m][i][e], p.scale2) : s[m][i][e] * p.scale2;
      }
    }
  }
  const auto see = [&](int token) { return view.mask.keys_of_row(token); };
  const auto visible = [&](Range keys) { return view.mask.all_visible(view.queries, keys); };
  if (!steps.template whole<kN / 2>(needed, n, 0, view.blocks, visible)) {
    DS_UNROLL
    for (int m = 0; m < kM; ++m) {
      hide(s[m], steps, n, 0, view.row + 16 * m, see, view.mask.has_sinks(), -kInfinity, view.token_of);
    }
  }
  u32 weights[kM][kN / 2][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) {
    softmax_step(rows[m], s[m], x[m]);
    if (p.dropout.on) {
      const u32 bits = kept_by_slot<true, kN / 2>(p.dropout, needed, [&](int slot) {
        return p.dropout.element(view.b, view.head, view.row + 16 * m, steps.first(n, slot));
      });
      DS_UNROLL
      for (int i = 0; i < 4 * kN; ++i) s[m][i / 4][i % 4] = (bits >> i & 1u) != 0 ? s[m][i / 4][i % 4] : 0.0f;
    }
    pack<E>(weights[m], s[m]);
  }
  multiply<kD>(x, weights, v, 0, needed);
}

}  // namespace ds::cuda::attention
