// SPDX-License-Identifier: Apache-2.0
#pragma once
// Philox4x32-10 on vectors, with the same numbers as ds/kernels/philox.h. A counter word occupies the low half of a
// 64-bit lane, and the 32 x 32 -> 64 bit product ignores what the rounds leave in the high half, so a round is two
// products, two shifts and four exclusive-ors, without shuffles.

#include "cpu/simd.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

struct VecPair {
  Vec first, second;
};

#if defined(__AVX512F__)

using Words = __m512i;
inline Words words(u64 x) noexcept { return _mm512_set1_epi64(static_cast<long long>(x)); }
inline Words product(Words a, Words b) noexcept { return _mm512_mul_epu32(a, b); }
inline Words high(Words a) noexcept { return _mm512_srli_epi64(a, 32); }
inline Words xor3(Words a, Words b, Words c) noexcept { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
// The blocks of the lanes, ordered so that the unpacks of `uniforms` sort them.
inline Words lane_blocks(u64 first) noexcept {
  return _mm512_add_epi64(words(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
}
inline Words join(Words low, Words high_half) noexcept {
  return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high_half, 32));
}
inline Words unpack_even(Words a, Words b) noexcept { return _mm512_unpacklo_epi64(a, b); }
inline Words unpack_odd(Words a, Words b) noexcept { return _mm512_unpackhi_epi64(a, b); }
inline Vec top_24_bits(Words a) noexcept { return {_mm512_cvtepi32_ps(_mm512_srli_epi32(a, 8))}; }

#else

using Words = __m256i;
inline Words words(u64 x) noexcept { return _mm256_set1_epi64x(static_cast<long long>(x)); }
inline Words product(Words a, Words b) noexcept { return _mm256_mul_epu32(a, b); }
inline Words high(Words a) noexcept { return _mm256_srli_epi64(a, 32); }
inline Words xor3(Words a, Words b, Words c) noexcept { return _mm256_xor_si256(a, _mm256_xor_si256(b, c)); }
inline Words lane_blocks(u64 first) noexcept { return _mm256_add_epi64(words(first), _mm256_setr_epi64x(0, 2, 1, 3)); }
inline Words join(Words low, Words high_half) noexcept {
  return _mm256_blend_epi32(low, _mm256_slli_epi64(high_half, 32), 0xAA);
}
inline Words unpack_even(Words a, Words b) noexcept { return _mm256_unpacklo_epi64(a, b); }
inline Words unpack_odd(Words a, Words b) noexcept { return _mm256_unpackhi_epi64(a, b); }
inline Vec top_24_bits(Words a) noexcept { return {_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 8))}; }

#endif

struct WordPair {
  Words first, second;
};
// RngKey::bits of the elements 4*block .. 4*block + 2*kLanes - 1, 32 bits each.
inline WordPair random_words(const RngKey& key, u64 block) noexcept {
  Words c0 = lane_blocks(block), c1 = high(c0), c2 = words(key.step), c3 = words(0);
  u32 key0 = key.seed, key1 = key.site;
  for (int round = 0; round < 10; ++round) {
    const Words p0 = product(c0, words(0xD2511F53u));
    const Words p1 = product(c2, words(0xCD9E8D57u));
    c0 = xor3(high(p1), c1, words(key0));
    c2 = xor3(high(p0), c3, words(key1));
    c1 = p1;
    c3 = p0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const Words c01 = join(c0, c1), c23 = join(c2, c3);
  return {unpack_even(c01, c23), unpack_odd(c01, c23)};
}
// RngKey::uniform of the same.
inline VecPair uniforms(const RngKey& key, u64 block) noexcept {
  const auto uniform = [](Words w) { return (top_24_bits(w) + broadcast(0.5f)) * broadcast(0x1p-24f); };
  const WordPair w = random_words(key, block);
  return {uniform(w.first), uniform(w.second)};
}

// The factors of dropout for elements first .. first + n - 1: 0 or 1/(1-p). The result is in `buffer`, which must have
// room for keep_room(n) floats.
constexpr i64 keep_room(i64 n) noexcept { return n + 4 + 2 * Vec::kLanes; }
inline const float* keep_factors(float* buffer, const RngKey& key, float p, u64 first, i64 n) noexcept {
  const i64 skip = static_cast<i64>(first % 4);
  const Vec limit = broadcast(p), scale = broadcast(1.0f / (1.0f - p));
  for (i64 i = 0; i < skip + n; i += 2 * Vec::kLanes) {
    const VecPair u = uniforms(key, first / 4 + static_cast<u64>(i / 4));
    store(buffer + i, select(less(u.first, limit), zero(), scale));
    store(buffer + i + Vec::kLanes, select(less(u.second, limit), zero(), scale));
  }
  return buffer + skip;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
