// SPDX-License-Identifier: Apache-2.0
// Parts of matrices that travel as codes of their squares. A worker has a square at a time, or what a part has of it.

#include <algorithm>
#include <bit>

#include "cpu/isa/kernels.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr Fp8Format kTravelling = fp8_format(DType::F8E4M3);

// Calls use(square, rows, at): `at` says where the part has its 128 elements of a row.
template <class F>
void for_squares(const TensorView& maxima, i64 first, i64 count, Stream& stream, F&& use) noexcept {
  const Fp8Part part{maxima.dim(1), first, count};
  stream.pool->parallel_for(maxima.numel(), [&](i64 square, int) {
    use(square, part.rows_of(square), [&](i64 row) { return part.at(row, square); });
  });
}

float scale_of_square(const TensorView& maxima, i64 square) noexcept {
  return fp8_scale(static_cast<u32>(maxima.as<i64>()[square]), kTravelling, Fp8Blocks::Squares);
}

}  // namespace

void max_abs_fp8(TensorView maxima, TensorView x, i64 first, Stream& stream) noexcept {
  for_squares(maxima, first, x.numel(), stream, [&](i64 square, Fp8Part::Range rows, auto at) {
    u32 largest = 0;
    for (i64 row = rows.begin; row < rows.end; ++row) {
      const bf16* const values = x.as<bf16>() + at(row);
      for (i64 i = 0; i < kFp8Block; ++i)
        largest = std::max(largest, std::bit_cast<u32>(to_float(values[i])) & 0x7FFFFFFFu);
    }
    maxima.as<i64>()[square] = largest;
  });
}

void encode_fp8(TensorView codes, TensorView x, TensorView maxima, i64 first, Stream& stream) noexcept {
  for_squares(maxima, first, x.numel(), stream, [&](i64 square, Fp8Part::Range rows, auto at) {
    const float scale = scale_of_square(maxima, square);
    for (i64 row = rows.begin; row < rows.end; ++row) {
      const i64 begin = at(row);
      for (i64 i = begin; i < begin + kFp8Block; ++i)
        codes.as<u8>()[i] = fp8_code(to_float(x.as<bf16>()[i]), scale, kTravelling);
    }
  });
}

void decode_fp8(TensorView x, TensorView codes, TensorView maxima, i64 first, Stream& stream) noexcept {
  for_squares(maxima, first, x.numel(), stream, [&](i64 square, Fp8Part::Range rows, auto at) {
    const float scale = scale_of_square(maxima, square);
    for (i64 row = rows.begin; row < rows.end; ++row) {
      const i64 begin = at(row);
      for (i64 i = begin; i < begin + kFp8Block; ++i)
        x.as<bf16>()[i] = to_bf16(from_fp8(codes.as<u8>()[i], kTravelling) * scale);
    }
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
