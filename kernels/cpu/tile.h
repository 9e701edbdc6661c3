// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles of 32-bit words (product.h) in scratch memory, small enough for the caches: their products, conversion from and
// to them, transposition.

#include <algorithm>

#include "cpu/product.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

constexpr i64 round_up(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit * unit; }
constexpr i64 ceil_div(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit; }

// The register block: kStrip rows of kPanel columns, the sums held in 24 of 32 or 12 of 16 registers.
inline constexpr int kStrip = 6;
#if defined(__AVX512F__)
inline constexpr int kPanelVectors = 4;
#else
inline constexpr int kPanelVectors = 2;
#endif
inline constexpr i64 kPanel = kPanelVectors * Vec::kLanes;

// The fastest-running index of the left factor, in words: a(m,k) is a[m*lda + k] (Rows) or a[k*lda + m] (Columns).
enum class Order { Rows, Columns };

template <Order kOrder, class Product, int kRows, int kVectors>
inline void register_block(float* c, i64 ldc, const float* a, i64 lda, const float* b, i64 ldb, i64 K,
                           bool add) noexcept {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) sum[m][n] = add ? load(c + m * ldc + n * Vec::kLanes) : zero();
  }
  for (i64 k = 0; k < K; ++k) {
    Vec bk[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) bk[n] = load(b + k * ldb + n * Vec::kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec am = broadcast(kOrder == Order::Rows ? a[m * lda + k] : a[k * lda + m]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) sum[m][n] = Product::multiply_add(am, bk[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) store(c + m * ldc + n * Vec::kLanes, sum[m][n]);
  }
}

template <Order kOrder, class Product, int kVectors>
inline void panel_product(float* c, i64 ldc, const float* a, i64 lda, const float* b, i64 ldb, i64 M, i64 K,
                          bool add) noexcept {
  const i64 step = kOrder == Order::Rows ? lda : 1;
  i64 m = 0;
  for (; m + kStrip <= M; m += kStrip) {
    register_block<kOrder, Product, kStrip, kVectors>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, add);
  }
  if (M - m >= 4) {
    register_block<kOrder, Product, 4, kVectors>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, add);
    m += 4;
  }
  if (M - m >= 2) {
    register_block<kOrder, Product, 2, kVectors>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, add);
    m += 2;
  }
  if (m < M) register_block<kOrder, Product, 1, kVectors>(c + m * ldc, ldc, a + m * step, lda, b, ldb, K, add);
}

// c[M,N] = a b, or c += a b, with K words per element and b [K,N] in rows; N is a multiple of the lanes. Each element
// is one sum in the order of k, independent of the surrounding tile.
template <Order kOrder, class Product = Single>
inline void tile_product(float* c, i64 ldc, const float* a, i64 lda, const float* b, i64 ldb, i64 M, i64 N, i64 K,
                         bool add) noexcept {
  i64 n = 0;
  for (; n + kPanel <= N; n += kPanel)
    panel_product<kOrder, Product, kPanelVectors>(c + n, ldc, a, lda, b + n, ldb, M, K, add);
  if (kPanelVectors > 2 && n + 2 * Vec::kLanes <= N) {
    panel_product<kOrder, Product, 2>(c + n, ldc, a, lda, b + n, ldb, M, K, add);
    n += 2 * Vec::kLanes;
  }
  for (; n < N; n += Vec::kLanes) panel_product<kOrder, Product, 1>(c + n, ldc, a, lda, b + n, ldb, M, K, add);
}

template <class T>
inline void prefetch(const T* from, i64 n) noexcept {
  constexpr i64 kLine = 64 / sizeof(T);
  for (i64 d = 0; d < n; d += kLine) _mm_prefetch(reinterpret_cast<const char*>(from + d), _MM_HINT_T0);
}

// to[0, n) = scale * from[0, n), then zeros up to a whole vector.
template <class T>
inline void load_row(float* to, const T* from, i64 n, Vec scale) noexcept {
  i64 d = 0;
  for (; d + Vec::kLanes <= n; d += Vec::kLanes) store(to + d, scale * load(from + d));
  if (d < n) store(to + d, scale * load(from + d, n - d));
}

// The words along a row of n elements, then zeros up to a whole vector; `scale` multiplies fp32 words only.
template <class T>
inline void load_along(float* to, const T* from, i64 n, Vec scale) noexcept {
  using Product = typename ProductOf<T>::type;
  if constexpr (Product::kDepth == 1) {
    load_row(to, from, n, scale);
  } else {
    for (i64 d = 0; d < n; d += Product::kDepth * Vec::kLanes) {
      store(to + d / Product::kDepth, Product::load_along(from + d, n - d));
    }
  }
}

// The pairs across two rows of n elements, then zeros up to a whole vector; a null row is zero.
template <class Product, class T>
inline void load_across(float* to, const T* even, const T* odd, i64 n) noexcept {
  for_vectors(0, n, [&](i64 d, auto lanes) {
    store(to + d, Product::join(load(even + d, lanes), odd == nullptr ? zero() : load(odd + d, lanes)));
  });
}

// to[0, n) = scale * from[0, n), rounded.
template <class T>
inline void store_row(T* to, const float* from, i64 n, Vec scale) noexcept {
  i64 d = 0;
  for (; d + Vec::kLanes <= n; d += Vec::kLanes) store(to + d, scale * load(from + d));
  if (d < n) store(to + d, scale * load(from + d), n - d);
}

inline void fill_zero(float* to, i64 n) noexcept { std::fill_n(to, n, 0.0f); }

// to[c][r] = from[r][c]; rows and cols are multiples of 8.
inline void transpose(float* to, i64 ldt, const float* from, i64 ldf, i64 rows, i64 cols) noexcept {
  for (i64 r = 0; r < rows; r += 8) {
    for (i64 c = 0; c < cols; c += 8) {
      __m256 x[8], y[8];
      // Puts rows that are four apart side by side, then transposes 4x4 within the halves.
      for (int i = 0; i < 4; ++i) {
        const float* const row = from + (r + i) * ldf + c;
        x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * ldf), 1);
        x[i + 4] =
            _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row + 4)), _mm_loadu_ps(row + 4 * ldf + 4), 1);
      }
      for (int h = 0; h < 8; h += 4) {
        const __m256 a = _mm256_unpacklo_ps(x[h], x[h + 1]), b = _mm256_unpackhi_ps(x[h], x[h + 1]);
        const __m256 p = _mm256_unpacklo_ps(x[h + 2], x[h + 3]), q = _mm256_unpackhi_ps(x[h + 2], x[h + 3]);
        y[h] = _mm256_shuffle_ps(a, p, _MM_SHUFFLE(1, 0, 1, 0));
        y[h + 1] = _mm256_shuffle_ps(a, p, _MM_SHUFFLE(3, 2, 3, 2));
        y[h + 2] = _mm256_shuffle_ps(b, q, _MM_SHUFFLE(1, 0, 1, 0));
        y[h + 3] = _mm256_shuffle_ps(b, q, _MM_SHUFFLE(3, 2, 3, 2));
      }
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + (c + i) * ldt + r, y[i]);
    }
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
