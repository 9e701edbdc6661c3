// SPDX-License-Identifier: Apache-2.0
#pragma once
// The arithmetic of matrix products. Their operands are 32-bit words: one fp32 number, or a pair of bf16 numbers (k,
// k+1) if the CPU multiplies pairs. Sums are fp32.

#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Products of fp32 words; 16-bit floats are converted while they are packed.
struct Single {
  static constexpr i64 kDepth = 1;
  static Vec multiply_add(Vec a, Vec b, Vec sum) noexcept { return fma(a, b, sum); }
  // Words [0, n) of a row in which k is contiguous in memory; `left` elements remain in it.
  template <class T, class N>
  static Vec load_along(const T* p, N n) noexcept {
    return load(p, n);
  }
  // One word from each of n adjacent rows; k is strided in memory.
  template <class T, class N>
  static Vec load_across(const T* p, i64, i64, N n) noexcept {
    return load(p, n);
  }
  // One word from each of two vectors of adjacent rows.
  template <class T>
  static void load_across(Vec (&words)[2], const T* p, i64, i64) noexcept {
    words[0] = load(p), words[1] = load(p + Vec::kLanes);
  }
};

#if defined(__AVX512BF16__)
// Products of bf16 pairs, summed in fp32 by VDPBF16PS, for which subnormal factors and sums are zero.
struct Pairs {
  static constexpr i64 kDepth = 2;
  static Vec multiply_add(Vec a, Vec b, Vec sum) noexcept {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
  }
  static Vec load_along(const bf16* p, AllLanes) noexcept { return {_mm512_loadu_ps(p)}; }
  static Vec load_along(const bf16* p, i64 elements) noexcept {
    const __mmask32 m = elements >= 32 ? ~__mmask32{0} : (__mmask32{1} << elements) - 1;
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, p))};
  }
  template <class N>
  static Vec load_across(const bf16* p, i64 stride, i64 depth, N n) noexcept {
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(load(p, n).v), 16);
    if (depth == 1) return {_mm512_castsi512_ps(even)};
    return join(even, load(p + stride, n));
  }
  static void load_across(Vec (&words)[2], const bf16* p, i64 stride, i64 depth) noexcept {
    const __m512i even = _mm512_loadu_si512(p),
                  odd = depth == 1 ? _mm512_setzero_si512() : _mm512_loadu_si512(p + stride);
    // Within each 128 bits; then the halves of two words each are put in order.
    const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                  second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
    words[0].v = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, first, high));
    words[1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, second, high));
  }
  // The words (even[i], odd[i]), where the lanes are bf16 numbers.
  static Vec join(Vec even, Vec odd) noexcept { return join(_mm512_srli_epi32(_mm512_castps_si512(even.v), 16), odd); }
  // The same with lanes that are rounded. Subnormal numbers become zero, as in products.
  static Vec join_rounded(Vec even, Vec odd) noexcept {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even.v));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd.v));
    return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)))};
  }
  // The words of 32 numbers, rounded.
  static Vec join_halves(Vec low, Vec high) noexcept {
    return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high.v, low.v))};
  }
  // Words of n numbers, rounded; n is a multiple of the lanes. They may overwrite the numbers.
  static void round_to(float* words, const float* from, i64 n) noexcept {
    for (i64 i = 0; i < n; i += Vec::kLanes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i / 2), (__m256i)_mm512_cvtneps_pbh(load(from + i).v));
    }
  }

 private:
  static Vec join(__m512i even, Vec odd) noexcept {
    return {_mm512_castsi512_ps(_mm512_or_si512(even, _mm512_castps_si512(odd.v)))};
  }
};
#endif

// The product of operands of dtype T.
template <class T>
struct ProductOf {
  using type = Single;
};
#if defined(__AVX512BF16__)
template <>
struct ProductOf<bf16> {
  using type = Pairs;
};
#endif

}  // namespace ds::cpu::DS_ISA_NAMESPACE
