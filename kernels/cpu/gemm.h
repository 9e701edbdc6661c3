// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inner loops of the matrix product, after Goto and van de Geijn: "Anatomy of High-Performance Matrix
// Multiplication". Both operands are packed into panels of 32-bit words, whatever their dtype and orientation:
//
//   a panel  [words][rows <= kMR]   one column of A per word, broadcast from L1
//   b panel  [words][kNR]           two vectors of B per word, streamed from L2
//
// A word is one fp32 number or a pair of bf16 numbers (product.h). The kernel keeps a [rows, kNR] block of fp32 sums in
// registers.

#include <algorithm>
#include <array>
#include <utility>

#include "cpu/product.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

inline constexpr i64 kLanes = Vec::kLanes;
inline constexpr i64 kMR = kLanes == 16 ? 14 : 6;  // kMR * 2 sums, 2 of B and 1 of A: all 32 (15 of 16) registers
inline constexpr i64 kNR = 2 * kLanes;
inline constexpr i64 kWords = 384;  // depth of a panel: an a panel is 21 KiB, most of L1

// r[i] lane j <-> r[j] lane i.
inline void transpose(Vec (&r)[kLanes]) noexcept {
#if defined(__AVX512F__)
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  __m512 u[16];  // u[4q + c]: rows 4q .. 4q+3 of columns c, c+4, c+8, c+12
#pragma GCC unroll 4
  for (int q = 0; q < 16; q += 4) {
    u[q] = low(t[q], t[q + 2]);
    u[q + 1] = high(t[q], t[q + 2]);
    u[q + 2] = low(t[q + 1], t[q + 3]);
    u[q + 3] = high(t[q + 1], t[q + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 ab = _mm512_shuffle_f32x4(u[c], u[c + 4], 0x88), cd = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0x88);
    const __m512 ef = _mm512_shuffle_f32x4(u[c], u[c + 4], 0xDD), gh = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0xDD);
    r[c].v = _mm512_shuffle_f32x4(ab, cd, 0x88);
    r[c + 4].v = _mm512_shuffle_f32x4(ef, gh, 0x88);
    r[c + 8].v = _mm512_shuffle_f32x4(ab, cd, 0xDD);
    r[c + 12].v = _mm512_shuffle_f32x4(ef, gh, 0xDD);
  }
#else
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  __m256 u[8];
  for (int q = 0; q < 8; q += 4) {
    u[q] = _mm256_shuffle_ps(t[q], t[q + 2], 0x44);
    u[q + 1] = _mm256_shuffle_ps(t[q], t[q + 2], 0xEE);
    u[q + 2] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0x44);
    u[q + 3] = _mm256_shuffle_ps(t[q + 1], t[q + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    r[c].v = _mm256_permute2f128_ps(u[c], u[c + 4], 0x20);
    r[c + 4].v = _mm256_permute2f128_ps(u[c], u[c + 4], 0x31);
  }
#endif
}

// Rows (of A) or columns (of B) to pack: element (i, k) is at i*ld + k if `along` (k is contiguous), else at k*ld + i.
template <class T>
struct Source {
  const T* data;
  i64 ld;
  bool along;
  const T* at(i64 i, i64 k) const noexcept { return along ? data + i * ld + k : data + k * ld + i; }
};

// Packs `count` <= kLanes rows and `depth` elements of k, which load(j, k, n) returns as words of row j from k on: all
// lanes, or those of the n elements that are left. dst[word * stride + row]; each word stores a whole vector, zero
// beyond `count`; with stride < kLanes the next word overwrites the excess, and the last word needs room for it.
template <i64 kDepth, class Load>
inline void pack_rows(float* dst, i64 stride, i64 count, i64 depth, Load&& load) noexcept {
  for (i64 k = 0; k < depth; k += kDepth * kLanes) {
    const i64 left = depth - k;
    Vec r[kLanes];
    const auto fill = [&](auto n) {
#pragma GCC unroll 16
      for (i64 j = 0; j < kLanes; ++j) r[j] = j < count ? load(j, k, n) : zero();
    };
    if (left >= kDepth * kLanes) {
      fill(AllLanes{});
    } else {
      fill(left);
    }
    transpose(r);
    const i64 words = std::min(kLanes, (left + kDepth - 1) / kDepth);
    if (words == kLanes) {
#pragma GCC unroll 16
      for (i64 w = 0; w < kLanes; ++w, dst += stride) store(dst, r[w]);
    } else {
      for (i64 w = 0; w < words; ++w, dst += stride) store(dst, r[w]);
    }
  }
}

// The same for rows from i on and k in [k0, k0 + depth) of a source.
template <class Product, class T>
inline void pack(float* dst, i64 stride, const Source<T>& s, i64 i, i64 count, i64 k0, i64 depth) noexcept {
  constexpr i64 D = Product::kDepth;
  if (s.along) {
    return pack_rows<D>(dst, stride, count, depth,
                        [&](i64 j, i64 k, auto n) { return Product::load_along(s.at(i + j, k0 + k), n); });
  }
  const T* p = s.at(i, k0);
  const auto words = [&](auto n) {
    for (i64 k = 0; k < depth; k += D, dst += stride, p += D * s.ld) {
      store(dst, Product::load_across(p, s.ld, depth - k, n));
    }
  };
  if (count == kLanes) {
    words(AllLanes{});
  } else {
    words(count);
  }
}

// Packs rows [begin, end) and k in [k0, k0 + depth) as panels of kWidth rows, `pitch` words apart; the last panel may
// be narrower. A panel needs room for kLanes words beyond its end unless kWidth is a multiple of kLanes.
template <class Product, i64 kWidth, class S>
inline void pack_panels(float* dst, i64 pitch, const S& s, i64 begin, i64 end, i64 k0, i64 depth) noexcept {
  // If k is strided, packs a few k of all panels at a time: each is one long piece of memory.
  const i64 step = s.along ? depth : std::min<i64>(depth, 16);
  for (i64 k = 0; k < depth; k += step) {
    float* panel = dst;
    for (i64 i = begin; i < end; i += kWidth, panel += pitch) {
      const i64 stride = kWidth % kLanes == 0 ? kWidth : std::min(kWidth, end - i);
      for (i64 v = 0; v < kWidth; v += kLanes) {
        const i64 count = std::clamp<i64>(end - i - v, 0, std::min(kWidth, kLanes));
        pack<Product>(panel + k / Product::kDepth * stride + v, stride, s, i + v, count, k0 + k,
                      std::min(step, depth - k));
      }
    }
  }
}

// A panel times a panel, in registers: every loop over `sum` must be unrolled. One chain of multiply-adds per element,
// in the order of k. The words of B are fp32 numbers in 16 bits, too, if its elements are W.
template <class Product, int kRows, class W>
[[gnu::always_inline]] inline void multiply_panels(Vec (&sum)[kRows][2], i64 words, const float* a,
                                                   const W* b) noexcept {
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = zero();
  constexpr i64 kAhead = 64 * kNR, kLine = 64 / sizeof(W);
  for (i64 w = 0; w < words; ++w, a += kRows, b += kNR) {
    // The hardware prefetches too little where sums leave room for few words in flight.
    for (i64 i = 0; i < kNR; i += kLine) _mm_prefetch(reinterpret_cast<const char*>(b + kAhead + i), _MM_HINT_T0);
    const Vec b0 = load(b), b1 = load(b + kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const Vec x = broadcast(a[r]);
      sum[r][0] = Product::multiply_add(x, b0, sum[r][0]);
      sum[r][1] = Product::multiply_add(x, b1, sum[r][1]);
    }
  }
}

// sums[rows][kNR] = or += a panel * b panel.
template <class W>
using MicroKernel = void (*)(i64 words, const float* a, const W* b, float* sums, bool first);

template <class Product, int kRows, class W>
void micro_kernel(i64 words, const float* a, const W* b, float* sums, bool first) noexcept {
  Vec sum[kRows][2];
  multiply_panels<Product, kRows>(sum, words, a, b);
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r, sums += kNR) {
    store(sums, first ? sum[r][0] : load(sums) + sum[r][0]);
    store(sums + kLanes, first ? sum[r][1] : load(sums + kLanes) + sum[r][1]);
  }
}

// micro_kernels<Product, W>[rows - 1].
template <class Product, class W = float>
inline constexpr std::array<MicroKernel<W>, kMR> micro_kernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<MicroKernel<W>, kMR>{micro_kernel<Product, static_cast<int>(r + 1), W>...};
}
(std::make_index_sequence<kMR>{});

}  // namespace ds::cpu::DS_ISA_NAMESPACE
