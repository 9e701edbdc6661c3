// SPDX-License-Identifier: Apache-2.0
#pragma once
// The factors of attention's products as tiles of words.

#include "cpu/isa/tiling.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// The operands of attention's products in tiles: rows of D elements as words along D, [rows][inner_ld], or, where rows
// are the inner dimension, as words across rows, [rows / kDepth][ld]. For fp32 words both are the same.
template <class E>
struct Operands {
  using Product = typename ProductOf<E>::type;
  static constexpr i64 kDepth = Product::kDepth;
  static constexpr bool kPairs = kDepth > 1;

  i64 D;
  i64 inner;         // words of D elements
  i64 width;         // D in whole vectors
  i64 ld, inner_ld;  // row strides: whole vectors and slightly more, so that rows do not map to the same cache sets
  // Pairs leave queries as they are and scale the products instead.
  float query_scale, score_scale;

  Operands(i64 d, float scale) noexcept
      : D(d),
        inner(words(d)),
        width(round_up(d, Vec::kLanes)),
        ld(width + 16),
        inner_ld(round_up(inner, Vec::kLanes) + 16),
        query_scale(kPairs ? 1.0f : scale),
        score_scale(kPairs ? scale : 1.0f) {}
  static i64 words(i64 n) noexcept { return ceil_div(n, kDepth); }
};

// A tile of rows in either form, or in both; null if the form is not needed.
struct RowForms {
  float *along, *across;
  template <class E>
  static RowForms take(Arena& arena, const Operands<E>& op, i64 rows) noexcept {
    float* const along = arena.take(rows * op.inner_ld);
    return {along, op.kPairs ? arena.take(rows / op.kDepth * op.ld) : along};
  }
};

// Probabilities and gradients of scores, [rows][keys]: in fp32, and as factors of products.
struct ScoreGrads {
  float *prob, *dscore;
  float* dscore_along;                 // words along keys, [rows][keys / kDepth]
  float *prob_across, *dscore_across;  // words across rows, [rows / kDepth][keys]
  template <class E>
  static ScoreGrads take(Arena& arena, const Operands<E>& op, i64 rows, i64 keys) noexcept {
    float *const prob = arena.take(rows * keys), *const dscore = arena.take(rows * keys);
    const auto factor = [&](float* fp32) { return op.kPairs ? arena.take(rows * keys / op.kDepth) : fp32; };
    float *const along = factor(dscore), *const prob_across = factor(prob);
    return {prob, dscore, along, prob_across, factor(dscore)};
  }
};

// The transposed words of rows [0, n), in blocks of `block` rows: [inner in whole groups of 8][block]. n is a multiple
// of the lanes.
template <class E>
void transpose_blocks(float* to, i64 block, const float* along, const Operands<E>& op, i64 n) noexcept {
  const i64 inner = round_up(op.inner, 8);
  for (i64 j = 0; j < n; j += block) {
    transpose(to + j * inner, block, along + j * op.inner_ld, op.inner_ld, std::min(block, n - j), inner);
  }
}

// Rows [begin, end) of a tile from the elements at row(i), for a begin that is a multiple of kDepth. row_ahead(i) is
// prefetched.
template <class E, class Row, class Ahead>
[[gnu::always_inline]] inline void load_tile(const RowForms& to, const Operands<E>& op, Range rows, float scale,
                                             Row&& row, Ahead&& row_ahead) noexcept {
  for (i64 i = rows.begin; i < rows.end; ++i) {
    prefetch(row_ahead(i), op.D);
    if (to.along != nullptr) load_along(to.along + i * op.inner_ld, row(i), op.D, broadcast(scale));
    if constexpr (Operands<E>::kPairs) {
      if (to.across == nullptr || i % 2 != 0) continue;
      const E* const odd = i + 1 < rows.end ? row(i + 1) : nullptr;
      load_across<typename Operands<E>::Product>(to.across + i / 2 * op.ld, row(i), odd, op.D);
    } else if (to.across != nullptr && to.across != to.along) {
      load_along(to.across + i * op.ld, row(i), op.D, broadcast(scale));
    }
  }
}

// Zero rows of a tile.
template <class E>
void zero_rows(const RowForms& to, const Operands<E>& op, Range rows) noexcept {
  constexpr i64 kDepth = Operands<E>::kDepth;
  if (to.along != nullptr) {
    for (i64 j = rows.begin; j < rows.end; ++j) fill_zero(to.along + j * op.inner_ld, op.inner_ld - 16);
  }
  if (to.across == nullptr || to.across == to.along) return;
  for (i64 j = ceil_div(rows.begin, kDepth); j < ceil_div(rows.end, kDepth); ++j) {
    fill_zero(to.across + j * op.ld, op.ld - 16);
  }
}

// The pairs across rows [r.begin, r.end) of a matrix in n columns from `column` on, rounded. The other row of a pair at
// the edge counts as zero.
template <class Product>
void join_rows(float* words, const float* matrix, i64 ld, Range r, i64 column, i64 n) noexcept {
  for (i64 row = r.begin / 2 * 2; row < r.end; row += 2) {
    const auto vector = [&](i64 i, i64 j) {
      return i < r.begin || i >= r.end ? zero() : load(matrix + i * ld + column + j);
    };
    for (i64 j = 0; j < n; j += Vec::kLanes) {
      store(words + row / 2 * ld + column + j, Product::join_rounded(vector(row, j), vector(row + 1, j)));
    }
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
