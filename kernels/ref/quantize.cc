// SPDX-License-Identifier: Apache-2.0
// Codes and scales, and back. Their bits are the contract, so the oracle also computes in fp32.

#include <algorithm>
#include <bit>
#include <cmath>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

float element(const TensorView& v, i64 i) noexcept { return static_cast<float>(get(v, i)); }

// Element i of a row of codes.
void put_code(u8* row, i64 i, int bits, int code) noexcept {
  const i64 first = i * bits;
  u8& byte = row[first / 8];
  if (first % 8 == 0) byte = 0;
  byte = static_cast<u8>(byte | (static_cast<u32>(code) & ((1u << bits) - 1u)) << first % 8);
}
float get_code(const u8* row, i64 i, int bits) noexcept {
  const i64 first = i * bits;
  const u32 code = (u32{row[first / 8]} >> first % 8) & ((1u << bits) - 1u);
  if (bits == 1) return code != 0 ? -1.0f : 1.0f;
  const u32 sign = 1u << (bits - 1);
  return static_cast<float>(static_cast<i32>(code ^ sign) - static_cast<i32>(sign));
}

}  // namespace

void quantize(TensorView codes, TensorView scales, TensorView x, TensorView error, CodeFormat format,
              ErrorFeedback feedback, Stream&) noexcept {
  const i64 N = x.dim(1), block = format.block_elems(N);
  for (i64 r = 0; r < x.dim(0); ++r) {
    const TensorView row = x.rows(r, 1);
    float* const e = error ? error.as<float>() + r * error.stride[0] : nullptr;
    const auto value = [&](i64 i) { return e == nullptr ? element(row, i) : element(row, i) + feedback.scale * e[i]; };
    for (i64 b = 0; b < format.num_blocks(N); ++b) {
      const i64 begin = b * block, end = std::min(N, begin + block);
      u32 largest = 0;
      for (i64 i = begin; i < end; ++i) largest = std::max(largest, std::bit_cast<u32>(value(i)) & 0x7FFFFFFFu);
      const float scale = block_scale(largest, format);
      const bool finite = !std::isnan(scale);
      scales.as<float>()[r * scales.stride[0] + b] = scale;
      for (i64 i = begin; i < end; ++i) {
        const float y = value(i), code = finite ? std::nearbyint(y / scale) : 0.0f;
        put_code(codes.as<u8>() + r * codes.stride[0], i, format.bits, static_cast<int>(code));
        if (e == nullptr) continue;
        e[i] = finite ? feedback.decay * (feedback.scale * e[i]) + (1 - feedback.decay) * (y - code * scale) : 0.0f;
      }
    }
  }
}

void quantize_signs(TensorView codes, TensorView scale, TensorView y, TensorView max_abs, TensorView sum, i64 n,
                    Stream&) noexcept {
  const float s = sign_scale(*max_abs.as<i64>(), {sum.as<i64>()[0], sum.as<i64>()[1]}, n);
  *scale.as<float>() = s;
  for (i64 i = 0; i < y.numel(); ++i) {
    float& value = y.as<float>()[i];
    const bool negative = value < 0;
    put_code(codes.as<u8>(), i, 1, negative ? 1 : 0);
    value = std::isnan(s) ? 0.0f : negative ? value + s : value - s;
  }
}

void dequantize(TensorView y, TensorView codes, TensorView scales, CodeFormat format, Stream&) noexcept {
  const i64 N = y.dim(1), block = format.block_elems(N);
  for (i64 r = 0; r < y.dim(0); ++r) {
    for (i64 i = 0; i < N; ++i) {
      const float scale = scales.as<float>()[r * scales.stride[0] + i / block];
      const float product = get_code(codes.as<u8>() + r * codes.stride[0], i, format.bits) * scale;
      put(y.rows(r, 1), i, static_cast<double>(product));
    }
  }
}

void dequantize_fold(TensorView dst, TensorView codes, TensorView scales, bool accumulate, float divisor,
                     CodeFormat format, Stream&) noexcept {
  const i64 N = dst.numel(), block = format.block_elems(N);
  for (i64 i = 0; i < N; ++i) {
    const auto value = [&](i64 r) {
      return get_code(codes.as<u8>() + r * codes.stride[0], i, format.bits) *
             scales.as<float>()[r * scales.stride[0] + i / block];
    };
    float fold = value(0);
    for (i64 r = 1; r < codes.dim(0); ++r) fold += value(r);
    float& to = dst.as<float>()[i];
    to = accumulate ? to + fold / divisor : fold / divisor;
  }
}

}  // namespace ds::ref
