// SPDX-License-Identifier: Apache-2.0
// The 16-bit floats: all patterns against the hardware and the vector code, every rounding boundary, golden values.

#include "ds/kernels/dtype.h"

#include <gtest/gtest.h>
#include <immintrin.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds {
namespace dtype_test {

__attribute__((target("avx,f16c"))) float hardware_to_float(u16 h) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
__attribute__((target("avx,f16c"))) u16 hardware_to_f16(float x) {
  return static_cast<u16>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0));
}

// All 65536 patterns of T, and the fp32 values around each of its rounding boundaries.
template <class T>
std::vector<float> boundaries() {
  std::vector<float> values;
  for (u32 p = 0; p < 65535; ++p) {
    const float a = to_float(T{static_cast<u16>(p)}), b = to_float(T{static_cast<u16>(p + 1)});
    if (!std::isfinite(a) || !std::isfinite(b)) continue;
    const float middle = static_cast<float>((static_cast<double>(a) + static_cast<double>(b)) / 2);
    for (float x : {a, middle, std::nextafter(middle, a), std::nextafter(middle, b)}) values.push_back(x);
  }
  const float inf = std::numeric_limits<float>::infinity(), big = std::numeric_limits<float>::max();
  for (float x : {inf, -inf, big, -big, 65519.996f, 65520.0f, 65504.0f, 1e-45f, -1e-45f, 0x1p-25f, 0x1.000002p-25f})
    values.push_back(x);
  for (u32 nan : {0x7F800001u, 0x7FC00000u, 0xFFBFFFFFu, 0x7FFFFFFFu, 0xFF812345u})
    values.push_back(std::bit_cast<float>(nan));
  return values;
}

TEST(DType, F16ConversionsAreTheHardwares) {
  if (!__builtin_cpu_supports("f16c")) GTEST_SKIP() << "no F16C";
  for (u32 p = 0; p < 65536; ++p) {
    const u16 h = static_cast<u16>(p);
    ASSERT_EQ(std::bit_cast<u32>(to_float(f16{h})), std::bit_cast<u32>(hardware_to_float(h))) << std::hex << p;
  }
  for (float x : boundaries<f16>()) ASSERT_EQ(to_f16(x).bits, hardware_to_f16(x)) << std::hexfloat << x;
}

TEST(DType, RoundTripsAreExact) {
  for (u32 p = 0; p < 65536; ++p) {
    const u16 h = static_cast<u16>(p);
    const float half = to_float(f16{h}), brain = to_float(bf16{h});
    ASSERT_TRUE(std::isnan(half) || to_f16(half).bits == h) << std::hex << p;
    ASSERT_TRUE(std::isnan(brain) || to_bf16(brain).bits == h) << std::hex << p;
  }
}

TEST(DType, Bf16RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.00390625f).bits, 0x3F80);
  EXPECT_EQ(to_bf16(1.01171875f).bits, 0x3F82);
  EXPECT_EQ(to_bf16(3.14159265f).bits, 0x4049);
  EXPECT_EQ(to_bf16(-0.1f).bits, 0xBDCD);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  for (float x : boundaries<bf16>()) {
    const float y = to_float(to_bf16(x));
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(y));
      continue;
    }
    if (!std::isfinite(y)) continue;
    // No neighbour is nearer; at equal distance the pattern is even.
    const u16 bits = to_bf16(x).bits;
    const double error = std::abs(static_cast<double>(x) - static_cast<double>(y));
    for (int step : {-1, 1}) {
      const float other = to_float(bf16{static_cast<u16>(bits + step)});
      if (!std::isfinite(other) || std::signbit(other) != std::signbit(y)) continue;
      const double distance = std::abs(static_cast<double>(x) - static_cast<double>(other));
      ASSERT_TRUE(error < distance || (error == distance && bits % 2 == 0)) << std::hexfloat << x;
    }
  }
}

// The loads and stores of every instruction set agree with the scalar conversions bit for bit, tails included.
template <class T>
void expect_vector_casts_agree(const OpTable& ops, Stream& s) {
  std::vector<float> wide = boundaries<T>();
  wide.resize(wide.size() / 16 * 16 + 5);
  const i64 n = static_cast<i64>(wide.size());
  std::vector<T> narrow(wide.size());
  ops.cast(TensorView::of(narrow.data(), dtype_of<T>, {n}), TensorView::of(wide.data(), DType::F32, {n}), s);
  for (size_t i = 0; i < wide.size(); ++i) {
    ASSERT_EQ(narrow[i].bits, from_float<T>(wide[i]).bits) << ops.name << std::hexfloat << " " << wide[i];
  }
  std::vector<T> all(65536 + 3);
  for (size_t p = 0; p < all.size(); ++p) all[p].bits = static_cast<u16>(p);
  std::vector<float> back(all.size());
  const i64 m = static_cast<i64>(all.size());
  ops.cast(TensorView::of(back.data(), DType::F32, {m}), TensorView::of(all.data(), dtype_of<T>, {m}), s);
  for (size_t p = 0; p < all.size(); ++p) {
    ASSERT_EQ(std::bit_cast<u32>(back[p]), std::bit_cast<u32>(to_float(all[p]))) << ops.name << " " << p;
  }
}

TEST(DType, VectorCodeAgreesWithScalarCode) {
  ThreadPool pool(1);
  Stream s{.pool = &pool};
  for (const char* isa : {"avx2", "avx512", "avx512_bf16", "amx"}) {
    if (const OpTable* ops = cpu_ops(isa)) {
      expect_vector_casts_agree<bf16>(*ops, s);
      expect_vector_casts_agree<f16>(*ops, s);
    }
  }
}

}  // namespace dtype_test
}  // namespace ds
