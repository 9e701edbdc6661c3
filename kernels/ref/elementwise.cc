// SPDX-License-Identifier: Apache-2.0
// add, bias_residual, cast, fold, and the two reductions over a whole tensor.

#include <algorithm>
#include <cmath>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void add(TensorView y, TensorView a, TensorView b, Stream&) noexcept {
  for (i64 i = 0; i < y.numel(); ++i) put(y, i, get(a, i) + get(b, i));
}

void bias_residual(TensorView y, TensorView x, TensorView bias, TensorView residual, Stream&) noexcept {
  for (i64 i = 0; i < y.numel(); ++i) {
    const double sum = get(x, i) + (bias ? get(bias, i % y.dim(1)) : 0);
    put(y, place(y, i), sum + (residual ? get(residual, place(residual, i)) : 0));
  }
}

void cast(TensorView y, TensorView x, Stream&) noexcept {
  for (i64 i = 0; i < y.numel(); ++i) put(y, i, get(x, i));
}

// The order of the fold is its contract, so the oracle also adds in fp32.
void fold(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream&) noexcept {
  for (i64 i = 0; i < dst.numel(); ++i) {
    float sum = static_cast<float>(get(accumulate ? dst : sources[0], i));
    for (size_t s = accumulate ? 0 : 1; s < sources.size(); ++s) sum += static_cast<float>(get(sources[s], i));
    put(dst, i, static_cast<double>(sum));
  }
}

void nonzero_rows(TensorView flags, TensorView x, Stream&) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  for (i64 r = 0; r < R; ++r) {
    bool any = false;
    for (i64 c = 0; c < C; ++c) any = any || get(x, r * C + c) != 0;
    flags.as<u8>()[r] = any ? 1 : 0;
  }
}

void max_abs(TensorView result, TensorView x, Stream&) noexcept {
  i64& largest = *result.as<i64>();
  for (i64 i = 0; i < x.numel(); ++i) {
    // get() would convert to double and change a NaN, so read its bits directly.
    const float f = x.dtype == DType::BF16  ? to_float(x.as<bf16>()[i])
                    : x.dtype == DType::F16 ? to_float(x.as<f16>()[i])
                                            : x.as<float>()[i];
    largest = std::max<i64>(largest, std::bit_cast<u32>(f) & 0x7FFFFFFFu);
  }
}

void sum_squares(TensorView result, TensorView x, TensorView max_abs, Stream&) noexcept {
  const u32 bits = static_cast<u32>(*max_abs.as<i64>());
  if (bits >= 0x7F800000u) return;
  const int exponent = ExactSum::exponent_of(bits);
  ExactSum sum;
  for (i64 i = 0; i < x.numel(); ++i) {
    const double scaled = std::ldexp(get(x, i), 25 - exponent);
    const i64 units = std::llrint(scaled * scaled);  // 48 bits or less: the square is exact
    sum.hi += units >> 32;
    sum.lo += units & 0xFFFFFFFF;
  }
  result.as<i64>()[0] += sum.hi + (sum.lo >> 32);
  result.as<i64>()[1] += sum.lo & 0xFFFFFFFF;
}

void sum(TensorView result, TensorView x, double factor, Stream&) noexcept {
  double total = 0;
  for (i64 i = 0; i < x.numel(); ++i) total += get(x, i);
  *result.as<double>() = total * factor;
}

void judge(GradVerdict* verdict, TensorView max_abs, TensorView sum, const JudgeParams& p, Stream&) noexcept {
  *verdict = judge_gradients(*max_abs.as<i64>(), {sum.as<i64>()[0], sum.as<i64>()[1]}, p);
}

void scaled_sum(TensorView y, TensorView x, float a, float b, const float* factor, Stream&) noexcept {
  const double of_x = static_cast<double>(b) * (factor != nullptr ? static_cast<double>(*factor) : 1.0);
  for (i64 i = 0; i < y.numel(); ++i) put(y, i, (a == 0 ? 0 : static_cast<double>(a) * get(y, i)) + of_x * get(x, i));
}

void norm_ratios(TensorView factors, TensorView largest, TensorView sums, float low, float high, Stream&) noexcept {
  const i64 K = factors.numel();
  for (i64 k = 0; k < K; ++k)
    factors.as<float>()[k] = norm_ratio(largest.as<i64>(), sums.as<i64>(), k, K, low, high, largest.numel() == K);
}

}  // namespace ds::ref
