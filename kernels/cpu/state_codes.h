// SPDX-License-Identifier: Apache-2.0
#pragma once
// Blocks of states that are not fp32, to fp32 and back: ds/kernels/state_codes.h on vectors.

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/loops.h"
#include "cpu/philox.h"
#include "ds/kernels/state_codes.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

#if defined(__AVX512F__)

using Ints = __m512i;
inline Ints bits_of(Vec x) noexcept { return _mm512_castps_si512(x.v); }
inline Ints ints(int x) noexcept { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) noexcept { return _mm512_add_epi32(a, b); }
inline Ints both(Ints a, Ints b) noexcept { return _mm512_and_si512(a, b); }
inline Ints larger(Ints a, Ints b) noexcept { return _mm512_max_epu32(a, b); }
inline u32 largest_of(Ints a) noexcept { return _mm512_reduce_max_epu32(a); }
template <int n>
inline Ints shift_right(Ints a) noexcept {
  return _mm512_srli_epi32(a, n);
}
inline Vec from_bits(Ints a) noexcept { return {_mm512_castsi512_ps(a)}; }
// By octave 2^(i - 31): the decades that have begun before it, and where one begins inside of it, infinity if none
// does.
template <int kBits>
struct Octaves {
  float begin[32];
  i32 before[32];
  constexpr Octaves() noexcept : begin{}, before{} {
    constexpr std::array<float, 8> begins = state_codes::Map<kBits>::begins();
    double octave = 1.0 / (u32{1} << 31);
    for (size_t i = 0; i < 32; ++i, octave *= 2) {
      begin[i] = std::numeric_limits<float>::infinity();
      for (size_t e = 1; e < kBits; ++e) {
        const double b = static_cast<double>(begins[e]);
        if (b <= octave) ++before[i];
        if (b > octave && b < 2 * octave) begin[i] = begins[e];
      }
    }
  }
};
// What is below the first octave is in the first decade; above 0 it is rare.
template <int kBits>
inline Ints decade_of(Vec y) noexcept {
  static constexpr Octaves<kBits> octaves;
  const auto floats = [](const float* p) { return _mm512_loadu_ps(p); };
  const Ints octave = shift_right<23>(bits_of(max(y, broadcast(0x1p-31f))));  // the lowest five bits count
  const Ints before =
      _mm512_permutex2var_epi32(_mm512_loadu_si512(octaves.before), octave, _mm512_loadu_si512(octaves.before + 16));
  const __m512 begin = _mm512_permutex2var_ps(floats(octaves.begin), octave, floats(octaves.begin + 16));
  return _mm512_mask_add_epi32(before, _mm512_cmp_ps_mask(y.v, begin, _CMP_GE_OQ), before, ints(1));
}
inline Vec eight(const float* p) noexcept { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
inline Vec permute(Vec table, Ints e) noexcept { return {_mm512_permutexvar_ps(e, table.v)}; }
template <DType t>
inline Vec load_codes(const u8* p) noexcept {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(t == DType::I8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes))};
}
// Of what is before the point.
inline void store_codes(u8* p, Vec k) noexcept {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(k.v)));
}
inline void store_high_halves(bf16* p, Ints a) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shift_right<16>(a)));
}
// a where x is finite, else b.
inline Ints where_finite(Vec x, Ints a, Ints b) noexcept {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(INFINITY), _CMP_LT_OQ), b, a);
}

#else

using Ints = __m256i;
inline Ints bits_of(Vec x) noexcept { return _mm256_castps_si256(x.v); }
inline Ints ints(int x) noexcept { return _mm256_set1_epi32(x); }
inline Ints add(Ints a, Ints b) noexcept { return _mm256_add_epi32(a, b); }
inline Ints both(Ints a, Ints b) noexcept { return _mm256_and_si256(a, b); }
inline Ints larger(Ints a, Ints b) noexcept { return _mm256_max_epu32(a, b); }
inline u32 largest_of(Ints a) noexcept {
  u32 lanes[8];
  std::memcpy(lanes, &a, sizeof lanes);
  return *std::max_element(lanes, lanes + 8);
}
template <int n>
inline Ints shift_right(Ints a) noexcept {
  return _mm256_srli_epi32(a, n);
}
inline Vec from_bits(Ints a) noexcept { return {_mm256_castsi256_ps(a)}; }
template <int kBits>
inline Ints decade_of(Vec y) noexcept {
  constexpr std::array<float, 8> begins = state_codes::Map<kBits>::begins();
  Ints e = ints(0);
  for (size_t i = 1; i < kBits; ++i)  // true is -1
    e = _mm256_sub_epi32(e, _mm256_castps_si256(_mm256_cmp_ps(y.v, _mm256_set1_ps(begins[i]), _CMP_GE_OQ)));
  return e;
}
inline Vec eight(const float* p) noexcept { return {_mm256_loadu_ps(p)}; }
inline Vec permute(Vec table, Ints e) noexcept { return {_mm256_permutevar8x32_ps(table.v, e)}; }
template <DType t>
inline Vec load_codes(const u8* p) noexcept {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(t == DType::I8 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes))};
}
inline void store_codes(u8* p, Vec k) noexcept {
  const __m256i i = both(_mm256_cvttps_epi32(k.v), ints(0xFF));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void store_high_halves(bf16* p, Ints a) noexcept {
  const __m256i w = shift_right<16>(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline Ints where_finite(Vec x, Ints a, Ints b) noexcept {
  return _mm256_blendv_epi8(b, a, _mm256_castps_si256(_mm256_cmp_ps(abs(x).v, _mm256_set1_ps(INFINITY), _CMP_LT_OQ)));
}

#endif

struct StateLanes {
  using Value = Vec;
  template <auto values>
  struct Table {
    Vec v = [] {
      constexpr std::array<float, 8> table = values();
      return eight(table.data());
    }();
    Vec operator[](Ints e) const noexcept { return permute(v, e); }
  };
  static Vec all(float x) noexcept { return broadcast(x); }
  static Mask less(Vec a, Vec b) noexcept { return DS_ISA_NAMESPACE::less(a, b); }
  static Vec select(Mask m, Vec yes, Vec no) noexcept { return DS_ISA_NAMESPACE::select(m, yes, no); }
  static Vec min(Vec a, Vec b) noexcept { return DS_ISA_NAMESPACE::min(a, b); }
  static Ints exponent(Vec x) noexcept { return add(shift_right<23>(bits_of(x)), ints(-127)); }
  static Vec fraction(Vec x) noexcept { return from_bits(add(both(bits_of(x), ints(0x007FFFFF)), ints(0x3F800000))); }
  template <int kBits>
  static Ints decade(Vec y) noexcept {
    return decade_of<kBits>(y);
  }
};

// One block, or what there is of it: whole vectors of `values`, of which those behind n are zeros after decoding and
// must be so before encoding.
template <DType t>
void decode_codes(float* values, const u8* codes, float scale, i64 n) noexcept {
  const state_codes::Codes<t == DType::I8 ? 7 : 8, StateLanes> map;
  const Vec unit = broadcast(scale);
  const auto decode = [&](float* to, const u8* from) {
    const Vec k = load_codes<t>(from);
    if constexpr (t == DType::I8) {
      store(to, copysign(map.decode(abs(k)), k) * unit);
    } else {
      store(to, map.decode(k) * unit);
    }
  };
  i64 i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) decode(values + i, codes + i);
  if (i == n) return;
  u8 rest[Vec::kLanes] = {};
  std::memcpy(rest, codes + i, static_cast<size_t>(n - i));
  decode(values + i, rest);
}

template <DType t>
void encode_codes(u8* codes, float& scale, const float* values, i64 n) noexcept {
  Ints largest = ints(0);
  for (i64 i = 0; i < n; i += Vec::kLanes) largest = larger(largest, bits_of(abs(load(values + i))));
  const state_codes::Scale s = state_codes::scale_of(largest_of(largest));
  scale = s.value;
  if (s.inverse == 0) {
    std::memset(codes, 0, static_cast<size_t>(n));
    return;
  }
  const state_codes::Codes<t == DType::I8 ? 7 : 8, StateLanes> map;
  const Vec inverse = broadcast(s.inverse);
  const auto encode = [&](u8* to, const float* from) {
    const Vec x = load(from);
    if constexpr (t == DType::I8) {
      store_codes(to, copysign(map.encode(abs(x) * inverse), x));
    } else {
      store_codes(to, map.encode(x * inverse));
    }
  };
  i64 i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) encode(codes + i, values + i);
  if (i == n) return;
  u8 rest[Vec::kLanes];
  encode(rest, values + i);
  std::memcpy(codes + i, rest, static_cast<size_t>(n - i));
}

// bf16 likewise: element i is rounded by 16 bits of random[i], which all words of a block need.
inline void decode_bf16(float* values, const bf16* from, i64 n) noexcept {
  for_vectors(0, n, [&](i64 i, auto lanes) { store(values + i, load(from + i, lanes)); });
}
inline void encode_bf16(bf16* to, const float* values, i64 n, const u32* random, bool high_half) noexcept {
  const auto encode = [&](bf16* p, i64 i) {
    const Vec x = load(values + i);
    const Ints word = bits_of(load(reinterpret_cast<const float*>(random + i)));
    const Ints rest = high_half ? shift_right<16>(word) : both(word, ints(0xFFFF));
    // A NaN's low bits would be lost, and so may it be: adding zero makes it quiet.
    store_high_halves(p, where_finite(x, add(bits_of(x), rest), bits_of(x + zero())));
  };
  i64 i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) encode(to + i, i);
  if (i == n) return;
  bf16 last[Vec::kLanes];
  encode(last, i);
  std::memcpy(to + i, last, static_cast<size_t>(n - i) * sizeof(bf16));
}

// RngKey::bits of elements first .. first + n - 1, first a multiple of 4; room for whole blocks of 256.
inline void put_random_words(u32* to, const RngKey& key, u64 first, i64 n) noexcept {
  for (i64 i = 0; i < n; i += 2 * Vec::kLanes) {
    const WordPair w = random_words(key, (first + static_cast<u64>(i)) / 4);
    std::memcpy(to + i, &w.first, sizeof w.first);
    std::memcpy(to + i + Vec::kLanes, &w.second, sizeof w.second);
  }
}

// Elements [begin, begin + n) of a state: a block, or what there is of it.
inline void decode_block(float* values, const TensorView& state, i64 begin, i64 n) noexcept {
  u8* const codes = state.as<u8>() + begin;
  switch (state.dtype) {
    case DType::I8: return decode_codes<DType::I8>(values, codes, state.scale[begin / kStateBlock], n);
    case DType::U8: return decode_codes<DType::U8>(values, codes, state.scale[begin / kStateBlock], n);
    default: return decode_bf16(values, state.as<bf16>() + begin, n);
  }
}
inline void encode_block(const TensorView& state, const float* values, i64 begin, i64 n, const u32* random,
                         bool high_half) noexcept {
  u8* const codes = state.as<u8>() + begin;
  switch (state.dtype) {
    case DType::I8: return encode_codes<DType::I8>(codes, state.scale[begin / kStateBlock], values, n);
    case DType::U8: return encode_codes<DType::U8>(codes, state.scale[begin / kStateBlock], values, n);
    default: return encode_bf16(state.as<bf16>() + begin, values, n, random, high_half);
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
