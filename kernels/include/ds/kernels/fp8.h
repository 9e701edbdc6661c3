// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers in 8 bits, and matrices of them in which blocks share an fp32 scale: the operands of FP8 products. Every
// backend uses these functions, so codes and scales are equal bit for bit.
//
// The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning" (2022): E4M3 has 3 bits of mantissa,
// numbers up to 448, no infinity, and NaN in all-ones codes alone; E5M2 has 2 bits, numbers up to 57344, and infinities
// and NaN as in IEEE 754. Blocks are those of DeepSeek-V3's report (2024), and of cuBLASLt on Hopper.

#include <bit>

#include "ds/kernels/dtype.h"
#include "ds/kernels/philox.h"

namespace ds {

struct Fp8Format {
  int mantissa;  // bits
  int bias;      // of the exponent
  u8 largest;    // code of the largest number
  float largest_value;
};
DS_HOST_DEVICE constexpr Fp8Format fp8_format(DType t) noexcept {
  return t == DType::F8E5M2 ? Fp8Format{2, 15, 0x7B, 57344.0f} : Fp8Format{3, 7, 0x7E, 448.0f};
}

// The nearest code, ties to even. Numbers beyond the largest one, and infinities, get its code; NaN stays NaN.
DS_HOST_DEVICE inline u8 to_fp8(float x, Fp8Format f) noexcept {
  const u32 u = std::bit_cast<u32>(x), sign = u >> 24 & 0x80u, a = u & 0x7FFFFFFFu;
  // Normal numbers: the mantissa is rounded in place, and the exponent gets another bias.
  const int drop = 23 - f.mantissa;
  const u32 rounded = a + ((1u << (drop - 1)) - 1u) + (a >> drop & 1u);
  const u32 normal = (rounded >> drop) - (static_cast<u32>(127 - f.bias) << f.mantissa);
  // Subnormal ones: the sum with a number whose last place is that of subnormal codes rounds there.
  const float shift = std::bit_cast<float>(static_cast<u32>(127 + 24 - f.bias - f.mantissa) << 23);
  const u32 subnormal = std::bit_cast<u32>(std::bit_cast<float>(a) + shift) - std::bit_cast<u32>(shift);
  u32 code = a < static_cast<u32>(128 - f.bias) << 23 ? subnormal : normal;
  code = code < f.largest ? code : f.largest;
  return static_cast<u8>(sign | (a > 0x7F800000u ? 0x7Fu : code));
}

// The number of a code, exact.
DS_HOST_DEVICE inline float from_fp8(u8 code, Fp8Format f) noexcept {
  const u32 sign = static_cast<u32>(code & 0x80u) << 24, a = code & 0x7Fu;
  if (a > f.largest) {
    const bool infinite = f.mantissa == 2 && a == 0x7Cu;
    return std::bit_cast<float>(sign | (infinite ? 0x7F800000u : 0x7FC00000u));
  }
  // As bits of an fp32 number the code is off by a power of two, whether it is normal or not.
  const float small = std::bit_cast<float>(a << (23 - f.mantissa));
  const float power = std::bit_cast<float>(static_cast<u32>(254 - f.bias) << 23);
  return std::bit_cast<float>(std::bit_cast<u32>(small * power) | sign);
}

inline constexpr i64 kFp8Block = 128;
// The elements of an operand [rows, K] that share a scale: 128 of one row, or 128 of each of 128 rows. K is the
// dimension that a product sums over.
enum class Fp8Blocks : u8 { Rows, Squares };

// The scale of a square by the bits of its largest |x|, which is finite: the least power of two with which that element
// is rounded to a code, and not cut off at the largest one. The value of every code is then exact in bf16, and has the
// same scale and code again, so a matrix may travel as codes and be encoded from their values. The range of scales
// keeps values normal and finite: below it small numbers become 0, and beyond it the largest are cut off at 1.75 *
// 2^127.
DS_HOST_DEVICE inline float fp8_square_scale(u32 max_abs_bits, Fp8Format f) noexcept {
  const int drop = 23 - f.mantissa, top = (f.largest >> f.mantissa) - f.bias;  // top: exponent of the largest number
  const u32 rounded = (max_abs_bits + ((1u << (drop - 1)) - 1u) + (max_abs_bits >> drop & 1u)) >> drop,
            mask = (1u << f.mantissa) - 1u;
  const int above = (rounded & mask) > (f.largest & mask) ? 1 : 0, least = f.mantissa + f.bias, most = 254 - top;
  int exponent = static_cast<int>(rounded >> f.mantissa) + above - top;
  exponent = exponent < least ? least : exponent > most ? most : exponent;
  return std::bit_cast<float>(static_cast<u32>(exponent) << 23);
}

// The scale of a block by the bits of its largest |x|; an element is encoded as to_fp8(x / scale). If that is not
// finite the scale is NaN and all codes of the block are 0, so every product with the block is NaN. Never subnormal; in
// a row 1 for zeros.
DS_HOST_DEVICE inline float fp8_scale(u32 max_abs_bits, Fp8Format f, Fp8Blocks blocks) noexcept {
  if (max_abs_bits >= 0x7F800000u) return std::bit_cast<float>(0x7FC00000u);
  if (blocks == Fp8Blocks::Squares) return fp8_square_scale(max_abs_bits, f);
  if (max_abs_bits == 0) return 1.0f;
  const float scale = std::bit_cast<float>(max_abs_bits) / f.largest_value;
  return scale > 0x1p-126f ? scale : 0x1p-126f;
}
DS_HOST_DEVICE inline u8 fp8_code(float x, float scale, Fp8Format f) noexcept {
  return scale == scale ? to_fp8(x / scale, f) : u8{0};
}

// The memory of an operand [rows, K], in the layout of cuBLASLt.
//   codes   [padded_rows, padded_k] E4M3 or E5M2, contiguous: both dims rounded up to a multiple of 16, with zeros
//   scales  fp32. Rows: [blocks of K, padded_rows]. Squares: [blocks of rows, blocks of K rounded up to a multiple of
//   4],
//           the excess being 1
struct Fp8Layout {
  i64 rows = 0, k = 0;
  Fp8Blocks blocks = Fp8Blocks::Rows;

  DS_HOST_DEVICE static constexpr i64 up(i64 n, i64 unit) noexcept { return (n + unit - 1) / unit * unit; }
  DS_HOST_DEVICE constexpr i64 padded_rows() const noexcept { return up(rows, 16); }
  DS_HOST_DEVICE constexpr i64 padded_k() const noexcept { return up(k, 16); }
  DS_HOST_DEVICE constexpr i64 k_blocks() const noexcept { return (k + kFp8Block - 1) / kFp8Block; }
  DS_HOST_DEVICE constexpr i64 row_blocks() const noexcept { return (rows + kFp8Block - 1) / kFp8Block; }
  DS_HOST_DEVICE constexpr i64 scale_rows() const noexcept {
    return blocks == Fp8Blocks::Rows ? k_blocks() : row_blocks();
  }
  DS_HOST_DEVICE constexpr i64 scale_columns() const noexcept {
    return blocks == Fp8Blocks::Rows ? padded_rows() : up(k_blocks(), 4);
  }
  // The number of the scale of an element.
  DS_HOST_DEVICE constexpr i64 scale_of(i64 row, i64 column) const noexcept {
    return blocks == Fp8Blocks::Rows ? column / kFp8Block * scale_columns() + row
                                     : row / kFp8Block * scale_columns() + column / kFp8Block;
  }
  constexpr i64 code_bytes() const noexcept { return padded_rows() * padded_k(); }
  constexpr i64 scale_bytes() const noexcept { return scale_rows() * scale_columns() * dtype_bytes(DType::F32); }
};

// Elements [first, first + count) of a matrix of squares, row by row. A row has `across` squares; first and count are
// multiples of 128, so that the part has all or none of the 128 elements of a row that are in a square.
struct Fp8Part {
  i64 across = 0, first = 0, count = 0;

  struct Range {
    i64 begin, end;
  };
  // The rows of the matrix whose 128 elements in the square the part has.
  DS_HOST_DEVICE constexpr Range rows_of(i64 square) const noexcept {
    const i64 top = square / across * kFp8Block, column = square % across, piece = first / kFp8Block;
    const i64 begin = (piece - column + across - 1) / across,
              end = (piece + count / kFp8Block - column + across - 1) / across;
    const i64 from = begin > top ? begin : top, to = end < top + kFp8Block ? end : top + kFp8Block;
    return {from, to > from ? to : from};
  }
  // Where these 128 elements of a row are in the part.
  DS_HOST_DEVICE constexpr i64 at(i64 row, i64 square) const noexcept {
    return (row * across + square % across) * kFp8Block - first;
  }
};

}  // namespace ds
