// SPDX-License-Identifier: Apache-2.0
#pragma once
// Converts blocks of encoded states to fp32 and back: ds/kernels/state_codes.h on vectors.

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/loops.h"
#include "cpu/philox.h"
#include "ds/kernels/state_codes.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Decoding handles two vectors of codes at a time, encoding four.
static_assert(kStateBlock % (4 * Vec::kLanes) == 0);

// Bits of a magnitude.
template <DType t>
inline constexpr int kCodeBits = t == DType::I8 ? 7 : 8;

#if defined(__AVX512F__)

using Ints = __m512i;
inline Ints bits_of(Vec x) noexcept { return _mm512_castps_si512(x.v); }
inline Vec from_bits(Ints a) noexcept { return {_mm512_castsi512_ps(a)}; }
inline Ints ints(int x) noexcept { return _mm512_set1_epi32(x); }
inline Ints ints(const void* p) noexcept { return _mm512_loadu_si512(p); }
inline Ints add(Ints a, Ints b) noexcept { return _mm512_add_epi32(a, b); }
inline Ints both(Ints a, Ints b) noexcept { return _mm512_and_si512(a, b); }
inline Ints larger(Ints a, Ints b) noexcept { return _mm512_max_epu32(a, b); }
inline u32 largest_of(Ints a) noexcept { return _mm512_reduce_max_epu32(a); }
template <int n>
inline Ints shift_right(Ints a) noexcept {
  return _mm512_srli_epi32(a, n);
}
inline void store_high_halves(bf16* p, Ints a) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shift_right<16>(a)));
}
// a where x is finite, else b.
inline Ints where_finite(Vec x, Ints a, Ints b) noexcept {
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(abs(x).v, _mm512_set1_ps(INFINITY), _CMP_LT_OQ), b, a);
}

// The values of signed codes, by magnitude. The halves of these numbers are in separate tables, since an instruction
// looks up more words than numbers.
struct SignedValues {
  alignas(64) u16 low[128], high[128];
  constexpr SignedValues() noexcept : low{}, high{} {
    for (size_t k = 0; k < 128; ++k) {
      const u32 bits = std::bit_cast<u32>(state_codes::decode(DType::I8, static_cast<u8>(k), 1));
      low[k] = static_cast<u16>(bits);
      high[k] = static_cast<u16>(bits >> 16);
    }
  }
};
inline VecPair decode_signed(const u8* codes, Vec scale) noexcept {
  static constexpr SignedValues values;
  // In the order that makes the unpacks below sort the numbers.
  const __m256i k = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)),
                                                _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  // Encoding never produces -128, which means the same as -127.
  const Ints magnitude = _mm512_cvtepu8_epi16(_mm256_min_epu8(_mm256_abs_epi8(k), _mm256_set1_epi8(127)));
  const __mmask32 from_64 = _mm512_test_epi16_mask(magnitude, _mm512_set1_epi16(64));
  const auto look_up = [&](const u16* table) {
    const auto of_64 = [&](const u16* p) { return _mm512_permutex2var_epi16(ints(p), magnitude, ints(p + 32)); };
    return _mm512_mask_blend_epi16(from_64, of_64(table), of_64(table + 64));
  };
  const Ints sign = _mm512_set1_epi16(std::numeric_limits<short>::min());
  const Ints low = look_up(values.low);
  const Ints high = _mm512_ternarylogic_epi32(sign, _mm512_cvtepi8_epi16(k), look_up(values.high), 0xCA);
  return {from_bits(_mm512_unpacklo_epi16(low, high)) * scale, from_bits(_mm512_unpackhi_epi16(low, high)) * scale};
}

// The unit of a decade, by the lowest four bits of its exponent; zero is looked up as 1/2, whose unit is zero.
struct Units {
  alignas(64) float by_exponent[16];
  constexpr Units() noexcept : by_exponent{} {
    for (size_t e = 0; e < 8; ++e) by_exponent[(127 + e) % 16] = state_codes::Map<8>::units()[e];
  }
};
// By the definition, since a table would be too long.
inline Vec decode_unsigned(const u8* codes, Vec scale) noexcept {
  static constexpr Units units;
  const __m128i k = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  // The bits of 2^23 + k are those of 2^23 combined with those of k.
  const Vec x =
      from_bits(_mm512_or_si512(_mm512_cvtepu8_epi32(k), bits_of(broadcast(0x1p23f)))) - broadcast(0x1p23f - 0.5f);
  const Vec fraction = from_bits(_mm512_ternarylogic_epi32(bits_of(x), ints(0x007FFFFF), ints(0x3F800000), 0xEA));
  const Vec unit = {_mm512_permutexvar_ps(shift_right<23>(bits_of(x)), _mm512_load_ps(units.by_exponent))};
  const Vec y = (broadcast(0.9f) * fraction - broadcast(0.8f)) * unit;
  const __mmask16 not_last = _mm_cmpneq_epu8_mask(k, _mm_set1_epi8(-1));
  return {_mm512_mask_mul_ps(scale.v, not_last, y.v, scale.v)};
}
template <DType t>
inline VecPair decode_two(const u8* codes, Vec scale) noexcept {
  if constexpr (t == DType::I8) return decode_signed(codes, scale);
  return {decode_unsigned(codes, scale), decode_unsigned(codes + Vec::kLanes, scale)};
}

// Magnitudes fall into regions: those coded as zero (with a sign), the decades, and those with the last code. In each
// region the code is min(scale y + offset, end), truncated. A pair of octaves consists of the numbers with the same
// bits from bit 24 on; at most one region begins in a pair. Adding the pair's number to_next to a magnitude's bits
// moves exactly those of the new region to the next pair, so that the lowest four bits of the pair identify the region.
// Pairs range from that of kLeast, before which only the first region begins, to that of 1; the region that begins in
// the last pair is stored in the slot before kLeast's.
template <DType t>
struct Regions {
  static constexpr float kLeast = 0x1p-29f;
  alignas(64) u32 to_next[16];
  alignas(64) float scale[16], offset[16], end[16];
  constexpr Regions() noexcept : to_next{}, scale{}, offset{}, end{} {
    using Map = state_codes::Map<kCodeBits<t>>;
    constexpr int kDecades = kCodeBits<t>;
    // A decade; before the first: the region before them, after the last: the one after them.
    int region = t == DType::I8 ? -1 : 0;
    for (u32 pair = std::bit_cast<u32>(kLeast) >> 24;; ++pair) {
      const size_t i = pair % 16, e = region < 0 ? 0 : static_cast<size_t>(region);
      if (region == kDecades) {
        offset[i] = end[i] = Map::kLast;
        return;
      }
      if (region >= 0) {
        scale[i] = Map::scales()[e];
        offset[i] = Map::offsets()[e];
        end[i] = Map::ends()[e];
      }
      const u32 next = std::bit_cast<u32>(region < 0              ? Map::kFromFirst
                                          : region + 1 < kDecades ? Map::begins()[e + 1]
                                                                  : Map::kFromLast);
      if (next >> 24 != pair) continue;
      to_next[i] = ((pair + 1) << 24) - next;
      ++region;
    }
  }
};
template <DType t>
inline Ints encode_one(Vec x, Vec inverse) noexcept {
  static constexpr Regions<t> regions;
  const auto look_up = [](const auto& table, Ints index) { return _mm512_permutexvar_epi32(index, ints(table)); };
  const Vec y = (t == DType::I8 ? abs(x) : x) * inverse;
  const Ints bits = _mm512_max_epi32(bits_of(y), bits_of(broadcast(regions.kLeast)));
  const Ints region = shift_right<24>(add(bits, look_up(regions.to_next, shift_right<24>(bits))));
  const Vec k = from_bits(look_up(regions.scale, region)) * y + from_bits(look_up(regions.offset, region));
  // Positive numbers are ordered like their bits, and there are more integer units than floating-point units.
  const Vec limited = from_bits(_mm512_min_epi32(bits_of(k), look_up(regions.end, region)));
  if constexpr (t == DType::I8) return _mm512_cvttps_epi32(copysign(limited, x).v);
  // Only zero becomes code 0: any other number has bits of at least 1.
  return _mm512_min_epi32(_mm512_cvttps_epi32(limited.v), bits_of(y));
}
template <DType t>
inline void store_codes(u8* p, Ints a, Ints b, Ints c, Ints d) noexcept {
  const Ints ab = _mm512_packs_epi32(a, b), cd = _mm512_packs_epi32(c, d);
  const Ints bytes = t == DType::I8 ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
}

#else

using Ints = __m256i;
inline Ints bits_of(Vec x) noexcept { return _mm256_castps_si256(x.v); }
inline Vec from_bits(Ints a) noexcept { return {_mm256_castsi256_ps(a)}; }
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
inline void store_high_halves(bf16* p, Ints a) noexcept {
  const __m256i w = shift_right<16>(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline Ints where_finite(Vec x, Ints a, Ints b) noexcept {
  return _mm256_blendv_epi8(b, a, _mm256_castps_si256(_mm256_cmp_ps(abs(x).v, _mm256_set1_ps(INFINITY), _CMP_LT_OQ)));
}

// The upper half of a float's bits, which grows by 128 per octave, is nearly its logarithm. It gives a guess of the
// decade, or the one before it; comparing with the begin of the next decade decides.
template <int kBits>
struct Decades {
  using Map = state_codes::Map<kBits>;
  static constexpr int kDecade = 425, kFactor = 65536 / kDecade;
  static constexpr int kBase = static_cast<int>(std::bit_cast<u32>(Map::units()[0]) >> 16) - 2 * kDecade / 3;
  alignas(32) float next[8];
  constexpr Decades() noexcept : next{} {
    for (size_t e = 0; e < 8; ++e)
      next[e] = e + 1 < kBits ? Map::begins()[e + 1] : std::numeric_limits<float>::infinity();
  }
  static constexpr bool guesses_well() noexcept {
    const auto guess = [](u32 bits) { return std::max(static_cast<int>(bits >> 16) - kBase, 0) * kFactor >> 16; };
    for (int e = 1; e < kBits; ++e) {
      const u32 begin = std::bit_cast<u32>(Map::begins()[static_cast<size_t>(e)]);
      if (guess(begin) < e - 1 || guess(begin - 1) >= e) return false;
    }
    return guess(std::bit_cast<u32>(1.01f)) < kBits;
  }
};

// The interface that the definition calls; tables have as many numbers as vectors.
struct StateLanes {
  using Value = Vec;
  template <auto values>
  struct Table {
    Vec v = [] {
      constexpr std::array<float, 8> table = values();
      return load(table.data());
    }();
    Vec operator[](Ints e) const noexcept { return {_mm256_permutevar8x32_ps(v.v, e)}; }
  };
  static Vec all(float x) noexcept { return broadcast(x); }
  static Mask less(Vec a, Vec b) noexcept { return DS_ISA_NAMESPACE::less(a, b); }
  static Vec select(Mask m, Vec yes, Vec no) noexcept { return DS_ISA_NAMESPACE::select(m, yes, no); }
  static Vec min(Vec a, Vec b) noexcept { return DS_ISA_NAMESPACE::min(a, b); }
  static Ints exponent(Vec x) noexcept { return add(shift_right<23>(bits_of(x)), ints(-127)); }
  static Vec fraction(Vec x) noexcept { return from_bits(add(both(bits_of(x), ints(0x007FFFFF)), ints(0x3F800000))); }
  template <int kBits>
  static Ints decade(Vec y) noexcept {
    static constexpr Decades<kBits> decades;
    static_assert(decades.guesses_well());
    const Ints above = _mm256_subs_epu16(shift_right<16>(bits_of(y)), ints(decades.kBase));
    const Ints e = _mm256_mulhi_epu16(above, ints(decades.kFactor));
    const Vec next = {_mm256_permutevar8x32_ps(_mm256_load_ps(decades.next), e)};
    return _mm256_sub_epi32(e, _mm256_castps_si256(_mm256_cmp_ps(y.v, next.v, _CMP_GE_OQ)));  // true is -1
  }
};
template <DType t>
using LaneCodes = state_codes::Codes<kCodeBits<t>, StateLanes>;
template <DType t>
inline VecPair decode_two(const u8* codes, Vec scale) noexcept {
  const LaneCodes<t> map;
  const auto decode = [&](const u8* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const Vec k = {_mm256_cvtepi32_ps(t == DType::I8 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes))};
    if constexpr (t == DType::I8) return copysign(map.decode(abs(k)), k) * scale;
    return map.decode(k) * scale;
  };
  return {decode(codes), decode(codes + Vec::kLanes)};
}
template <DType t>
inline Ints encode_one(Vec x, Vec inverse) noexcept {
  const LaneCodes<t> map;
  if constexpr (t == DType::I8) return _mm256_cvttps_epi32(copysign(map.encode(abs(x) * inverse), x).v);
  return _mm256_cvttps_epi32(map.encode(x * inverse).v);
}
template <DType t>
inline void store_codes(u8* p, Ints a, Ints b, Ints c, Ints d) noexcept {
  const Ints ab = _mm256_packs_epi32(a, b), cd = _mm256_packs_epi32(c, d);
  const Ints bytes = t == DType::I8 ? _mm256_packs_epi16(ab, cd) : _mm256_packus_epi16(ab, cd);
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
}

#endif

template <DType t>
inline void encode_four(u8* codes, const float* values, Vec inverse) noexcept {
  const auto code = [=](i64 i) { return encode_one<t>(load(values + i * Vec::kLanes), inverse); };
  store_codes<t>(codes, code(0), code(1), code(2), code(3));
}

// Up to a block of bf16: element i is rounded by 16 bits of random[i]; random must have all words of a block.
inline void decode_bf16(float* values, const bf16* from, i64 n) noexcept {
  for_vectors(0, n, [&](i64 i, auto lanes) { store(values + i, load(from + i, lanes)); });
}
inline void encode_bf16(bf16* to, const float* values, i64 n, const u32* random, bool high_half) noexcept {
  const auto encode = [&](bf16* p, i64 i) {
    const Vec x = load(values + i);
    const Ints word = bits_of(load(reinterpret_cast<const float*>(random + i)));
    const Ints rest = high_half ? shift_right<16>(word) : both(word, ints(0xFFFF));
    // Truncation could lose a NaN's low bits, and with them the NaN; adding zero makes it quiet.
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

}  // namespace ds::cpu::DS_ISA_NAMESPACE
