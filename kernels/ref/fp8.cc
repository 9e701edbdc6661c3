// SPDX-License-Identifier: Apache-2.0
// Operands in 8 bits and their products. Codes and scales are the contract, so they are computed in fp32 here, too.

#include <algorithm>
#include <bit>

#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {

void quantize_fp8(TensorView codes, TensorView scales, TensorView x, Fp8Blocks blocks, bool transposed,
                  Stream&) noexcept {
  const Fp8Layout layout{x.dim(transposed ? 1 : 0), x.dim(transposed ? 0 : 1), blocks};
  const Fp8Format format = fp8_format(codes.dtype);
  const i64 block_rows = blocks == Fp8Blocks::Rows ? 1 : kFp8Block;
  const auto value = [&](i64 row, i64 k) {
    if (row >= layout.rows || k >= layout.k) return 0.0f;
    const i64 i = transposed ? k * x.stride[0] + row : row * x.stride[0] + k;
    return static_cast<float>(get(x, i));
  };
  float* const s = scales.as<float>();
  std::fill_n(s, layout.scale_rows() * layout.scale_columns(), 1.0f);
  for (i64 row = 0; row < layout.padded_rows(); row += block_rows) {
    for (i64 k = 0; k < layout.padded_k(); k += kFp8Block) {
      const i64 row_end = std::min(row + block_rows, layout.padded_rows()),
                k_end = std::min(k + kFp8Block, layout.padded_k());
      u32 largest = 0;
      for (i64 r = row; r < row_end; ++r) {
        for (i64 j = k; j < k_end; ++j) largest = std::max(largest, std::bit_cast<u32>(value(r, j)) & 0x7FFFFFFFu);
      }
      const float scale = fp8_scale(largest, format, blocks);
      s[layout.scale_of(row, k)] = scale;
      for (i64 r = row; r < row_end; ++r) {
        for (i64 j = k; j < k_end; ++j)
          codes.as<u8>()[r * layout.padded_k() + j] = fp8_code(value(r, j), scale, format);
      }
    }
  }
}

void matmul_fp8(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                TensorView residual, const Fp8MatmulParams& p, Stream&) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(1);
  const auto element = [K](const TensorView& codes, const TensorView& scales, const Fp8Layout& layout, i64 row, i64 k) {
    const float value = from_fp8(codes.as<u8>()[row * K + k], fp8_format(codes.dtype));
    return static_cast<double>(value) * static_cast<double>(scales.as<float>()[layout.scale_of(row, k)]);
  };
  const Fp8Layout la{M, K, p.a}, lb{N, K, p.b};
  for (i64 m = 0; m < M; ++m) {
    for (i64 n = 0; n < N; ++n) {
      double x = 0;
      for (i64 k = 0; k < K; ++k) x += element(a, a_scales, la, m, k) * element(b, b_scales, lb, n, k);
      if (bias) x += get(bias, n);
      if (residual) x += get(residual, m * residual.stride[0] + n);
      put(c, m * c.stride[0] + n, x);
    }
  }
}

namespace {

// Calls use(i, square) for the elements of a part of a matrix.
template <class F>
void for_part(const TensorView& maxima, i64 first, i64 count, F&& use) noexcept {
  const i64 across = maxima.dim(1), columns = across * kFp8Block;
  for (i64 i = 0; i < count; ++i) {
    const i64 row = (first + i) / columns, column = (first + i) % columns;
    use(i, row / kFp8Block * across + column / kFp8Block);
  }
}

constexpr Fp8Format kE4M3 = fp8_format(DType::F8E4M3);
float square_scale(const TensorView& maxima, i64 square) noexcept {
  return fp8_scale(static_cast<u32>(maxima.as<i64>()[square]), kE4M3, Fp8Blocks::Squares);
}

}  // namespace

void max_abs_fp8(TensorView maxima, TensorView x, i64 first, Stream&) noexcept {
  i64* const largest = maxima.as<i64>();
  std::fill_n(largest, maxima.numel(), 0);
  for_part(maxima, first, x.numel(), [&](i64 i, i64 square) {
    const float value = to_float(x.as<bf16>()[i]);
    largest[square] = std::max(largest[square], i64{std::bit_cast<u32>(value) & 0x7FFFFFFFu});
  });
}

void encode_fp8(TensorView codes, TensorView x, TensorView maxima, i64 first, Stream&) noexcept {
  for_part(maxima, first, x.numel(), [&](i64 i, i64 square) {
    codes.as<u8>()[i] = fp8_code(to_float(x.as<bf16>()[i]), square_scale(maxima, square), kE4M3);
  });
}

void decode_fp8(TensorView x, TensorView codes, TensorView maxima, i64 first, Stream&) noexcept {
  for_part(maxima, first, x.numel(), [&](i64 i, i64 square) {
    x.as<bf16>()[i] = to_bf16(from_fp8(codes.as<u8>()[i], kE4M3) * square_scale(maxima, square));
  });
}

}  // namespace ds::ref
