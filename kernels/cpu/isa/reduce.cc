// SPDX-License-Identifier: Apache-2.0
// Reductions over a whole tensor. max_abs and sum_squares are maxima and sums of integers, so the order of tiles does
// not matter.

#include <atomic>
#include <bit>
#include <type_traits>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Squares are scaled to integers below 2^50 and added in 64-bit lanes: 2^13 terms fit, and a tile has fewer per lane.
static_assert(2 * kTileElements / Vec::kLanes <= 1 << 13);

template <class T>
struct LaneArray {
  T value[sizeof(Vec) / sizeof(T)];
};

#if defined(__AVX512F__)

using Ints = __m512i;  // 32-bit or 64-bit lanes
Ints max_bits(Ints a, Vec x) noexcept { return _mm512_max_epi32(a, _mm512_castps_si512(abs(x).v)); }
// round((x scale)^2) in 64-bit integers. Adding 2^52 leaves the integer, rounded to even, in the low mantissa bits; the
// fused operation rounds the exact square once.
Ints square_units(__m256 x, double scale) noexcept {
  const __m512d y = _mm512_mul_pd(_mm512_cvtps_pd(x), _mm512_set1_pd(scale));
  const __m512d magic = _mm512_set1_pd(0x1p52);
  return _mm512_sub_epi64(_mm512_castpd_si512(_mm512_fmadd_pd(y, y, magic)), _mm512_castpd_si512(magic));
}
Ints add_units(Ints sum, Vec x, double scale) noexcept {
  sum = _mm512_add_epi64(sum, square_units(_mm512_castps512_ps256(x.v), scale));
  return _mm512_add_epi64(sum, square_units(_mm512_extractf32x8_ps(x.v, 1), scale));
}

#else

using Ints = __m256i;
Ints max_bits(Ints a, Vec x) noexcept { return _mm256_max_epi32(a, _mm256_castps_si256(abs(x).v)); }
Ints square_units(__m128 x, double scale) noexcept {
  const __m256d y = _mm256_mul_pd(_mm256_cvtps_pd(x), _mm256_set1_pd(scale));
  const __m256d magic = _mm256_set1_pd(0x1p52);
  return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_fmadd_pd(y, y, magic)), _mm256_castpd_si256(magic));
}
Ints add_units(Ints sum, Vec x, double scale) noexcept {
  sum = _mm256_add_epi64(sum, square_units(_mm256_castps256_ps128(x.v), scale));
  return _mm256_add_epi64(sum, square_units(_mm256_extractf128_ps(x.v, 1), scale));
}

#endif

}  // namespace

void max_abs(TensorView result, TensorView x, Stream& stream) noexcept {
  std::atomic<i32> largest{0};
  with_work_type(x.dtype, [&]<class T>(T) {
    for_tiles(stream, x.numel(), [&, xp = x.as<T>()](i64 begin, i64 end) {
      Ints acc{};
      for_vectors(begin, end, [&](i64 i, auto n) { acc = max_bits(acc, load(xp + i, n)); });
      i32 found = 0;
      for (const i32 lane : std::bit_cast<LaneArray<i32>>(acc).value) found = std::max(found, lane);
      for (i32 now = largest.load(std::memory_order_relaxed);
           found > now && !largest.compare_exchange_weak(now, found, std::memory_order_relaxed);) {
      }
    });
  });
  *result.as<i64>() = std::max<i64>(*result.as<i64>(), largest.load(std::memory_order_relaxed));
}

void nonzero_rows(TensorView flags, TensorView x, Stream& stream) noexcept {
  const i64 C = x.dim(1);
  with_work_type(x.dtype, [&]<class T>(T) {
    using Bits = std::conditional_t<sizeof(T) == 4, u32, u16>;
    for_tiles(
        stream, x.dim(0),
        [=, out = flags.as<u8>(), bits = x.as<const Bits>()](i64 begin, i64 end) {
          for (i64 r = begin; r < end; ++r) {
            Bits any = 0;
            for (i64 c = 0; c < C; ++c) any = static_cast<Bits>(any | bits[r * C + c]);
            out[r] = static_cast<Bits>(any << 1) != 0 ? 1 : 0;  // ignoring the sign
          }
        },
        std::max<i64>(1, kTileElements / std::max<i64>(1, C)));
  });
}

void sum_squares(TensorView result, TensorView x, TensorView max_abs, Stream& stream) noexcept {
  const u32 bits = static_cast<u32>(*max_abs.as<i64>());
  if (bits >= 0x7F800000u) return;
  const double scale = std::ldexp(1.0, 25 - ExactSum::exponent_of(bits));
  std::atomic<i64> hi{0}, lo{0};
  with_work_type(x.dtype, [&]<class T>(T) {
    for_tiles(stream, x.numel(), [&, xp = x.as<T>()](i64 begin, i64 end) {
      Ints acc{};
      for_vectors(begin, end, [&](i64 i, auto n) { acc = add_units(acc, load(xp + i, n), scale); });
      i64 tile_hi = 0, tile_lo = 0;
      for (const i64 lane : std::bit_cast<LaneArray<i64>>(acc).value) {
        tile_hi += lane >> 32;
        tile_lo += lane & 0xFFFFFFFF;
      }
      hi.fetch_add(tile_hi, std::memory_order_relaxed);
      lo.fetch_add(tile_lo, std::memory_order_relaxed);
    });
  });
  const i64 low = lo.load(std::memory_order_relaxed);
  result.as<i64>()[0] += hi.load(std::memory_order_relaxed) + (low >> 32);
  result.as<i64>()[1] += low & 0xFFFFFFFF;
}

void sum(TensorView result, TensorView x, double factor, Stream&) noexcept {
  double total = 0;  // one per token and micro-batch: too few to distribute
  for (i64 i = 0; i < x.numel(); ++i) total += static_cast<double>(x.as<float>()[i]);
  *result.as<double>() = total * factor;
}

void judge(GradVerdict* verdict, TensorView max_abs, TensorView sum, const JudgeParams& p, Stream&) noexcept {
  *verdict = judge_gradients(*max_abs.as<i64>(), {sum.as<i64>()[0], sum.as<i64>()[1]}, p);
}

void norm_ratios(TensorView factors, TensorView largest, TensorView sums, float low, float high, Stream&) noexcept {
  const i64 K = factors.numel();
  for (i64 k = 0; k < K; ++k)
    factors.as<float>()[k] = norm_ratio(largest.as<i64>(), sums.as<i64>(), k, K, low, high, largest.numel() == K);
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
