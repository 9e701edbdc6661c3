// SPDX-License-Identifier: Apache-2.0
#pragma once
// One vector of fp32 lanes for the instruction set that this file is compiled for (kernels/cpu is compiled once per
// set, see kernels/CMakeLists.txt): 16 lanes with AVX-512, 8 with AVX2+FMA+F16C. Everything is in ds::cpu::<isa>, so
// the sets never share a symbol. Loads and stores convert from and to 16-bit floats with round to nearest even and
// agree with ds/kernels/dtype.h bit for bit.

#include <immintrin.h>

#include "ds/kernels/ops.h"

#ifndef DS_ISA_NAMESPACE
#error "compile through ds_add_isa_kernels()"
#endif

namespace ds::cpu::DS_ISA_NAMESPACE {

#if defined(__AVX512F__)

struct Vec {
  static constexpr i64 kLanes = 16;
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

inline Vec zero() noexcept { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) noexcept { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) noexcept { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) noexcept { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) noexcept { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) noexcept { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) noexcept { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a*b + c
inline Vec max(Vec a, Vec b) noexcept { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) noexcept { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) noexcept { return {_mm512_sqrt_ps(a.v)}; }
inline Vec round(Vec a) noexcept { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec abs(Vec a) noexcept { return {_mm512_abs_ps(a.v)}; }
inline Mask less(Vec a, Vec b) noexcept { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Vec select(Mask m, Vec yes, Vec no) noexcept { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
inline Mask first(i64 n) noexcept { return {static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (1u << n) - 1u)}; }
// a with the sign bit of s.
inline Vec copysign(Vec a, Vec s) noexcept {
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return {
      _mm512_castsi512_ps(_mm512_ternarylogic_epi32(sign, _mm512_castps_si512(s.v), _mm512_castps_si512(a.v), 0xCA))};
}
// a * 2^n, rounded once, for integral-valued n in [-252, 254].
inline Vec scale_exp2(Vec a, Vec n) noexcept { return {_mm512_scalef_ps(a.v, n.v)}; }

inline Vec load(const float* p) noexcept { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) noexcept {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Vec load(const f16* p) noexcept {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, Vec a) noexcept { _mm512_storeu_ps(p, a.v); }
inline __m256i to_bf16_bits(Vec a) noexcept {
#if defined(__AVX512BF16__)
  constexpr int kSubnormal = 0x20;  // the instruction returns zero for it
  if (_mm512_fpclass_ps_mask(a.v, kSubnormal) == 0) return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#endif
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, lsb), _mm512_set1_epi32(0x7FFF)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
}
inline void store(bf16* p, Vec a) noexcept { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits(a)); }
inline void store(f16* p, Vec a) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The first n lanes, 0 < n < kLanes; the others load as zero.
inline Vec load(const float* p, i64 n) noexcept { return {_mm512_maskz_loadu_ps(first(n).m, p)}; }
inline Vec load(const bf16* p, i64 n) noexcept {
  const __m256i h = _mm256_maskz_loadu_epi16(first(n).m, p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline Vec load(const f16* p, i64 n) noexcept { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n).m, p))}; }
inline void store(float* p, Vec a, i64 n) noexcept { _mm512_mask_storeu_ps(p, first(n).m, a.v); }
inline void store(bf16* p, Vec a, i64 n) noexcept { _mm256_mask_storeu_epi16(p, first(n).m, to_bf16_bits(a)); }
inline void store(f16* p, Vec a, i64 n) noexcept {
  _mm256_mask_storeu_epi16(p, first(n).m, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Sums and maxima over lanes, in a fixed tree.
inline float reduce_add(Vec a) noexcept {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(Vec a) noexcept { return _mm512_reduce_max_ps(a.v); }

#else  // AVX2 + FMA + F16C

struct Vec {
  static constexpr i64 kLanes = 8;
  __m256 v;
};
struct Mask {
  __m256 m;
};

inline Vec zero() noexcept { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) noexcept { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) noexcept { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) noexcept { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) noexcept { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) noexcept { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) noexcept { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) noexcept { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) noexcept { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) noexcept { return {_mm256_sqrt_ps(a.v)}; }
inline Vec round(Vec a) noexcept { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec abs(Vec a) noexcept { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Mask less(Vec a, Vec b) noexcept { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline Vec select(Mask m, Vec yes, Vec no) noexcept { return {_mm256_blendv_ps(no.v, yes.v, m.m)}; }
inline Mask first(i64 n) noexcept {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int count = n >= 8 ? 8 : static_cast<int>(n);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane))};
}
inline Vec copysign(Vec a, Vec s) noexcept {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, a.v), _mm256_and_ps(sign, s.v))};
}
inline Vec scale_exp2(Vec a, Vec n) noexcept {
  // In two steps, since a single power of two would leave the exponent range before the product does.
  const auto exp2 = [](__m256i e) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
  };
  const __m256i e = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(e, 1);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, exp2(half)), exp2(_mm256_sub_epi32(e, half)))};
}

inline Vec load(const float* p) noexcept { return {_mm256_loadu_ps(p)}; }
inline Vec from_bf16_bits(__m128i h) noexcept {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline Vec load(const bf16* p) noexcept { return from_bf16_bits(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const f16* p) noexcept {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, Vec a) noexcept { _mm256_storeu_ps(p, a.v); }
inline __m128i to_bf16_bits(Vec a) noexcept {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, lsb), _mm256_set1_epi32(0x7FFF)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i w = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
inline void store(bf16* p, Vec a) noexcept { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16_bits(a)); }
inline void store(f16* p, Vec a) noexcept {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load(const float* p, i64 n) noexcept { return {_mm256_maskload_ps(p, _mm256_castps_si256(first(n).m))}; }
template <class T>
inline Vec load(const T* p, i64 n) noexcept {
  T lanes[8] = {};
  for (i64 i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store(float* p, Vec a, i64 n) noexcept { _mm256_maskstore_ps(p, _mm256_castps_si256(first(n).m), a.v); }
template <class T>
inline void store(T* p, Vec a, i64 n) noexcept {
  T lanes[8];
  store(lanes, a);
  for (i64 i = 0; i < n; ++i) p[i] = lanes[i];
}

inline float reduce_add(Vec a) noexcept {
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(Vec a) noexcept {
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

#endif

// e^x within 2 ulp for x in [-104, 89]; subnormal results are correct. NaN gives NaN.
[[gnu::always_inline]] inline Vec exp_bounded(Vec x) noexcept {
  // Cody-Waite reduction x = n ln2 + r, |r| <= ln2/2, then a degree-6 polynomial (Cephes expf coefficients).
  const Vec n = round(x * broadcast(1.44269504088896341f));
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  return scale_exp2(p, n);
}
// For any x: 0 below -103, inf above 88.7; e^-inf = 0.
inline Vec exp(Vec x) noexcept {
  // The x86 min and max return their second operand if one is NaN, so NaN passes through this clamp.
  return exp_bounded(min(broadcast(89.0f), max(broadcast(-104.0f), x)));
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
