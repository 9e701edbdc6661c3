// SPDX-License-Identifier: Apache-2.0
// Operands in 8 bits: bound by memory. Loops over adjacent elements are simple enough for the compiler to vectorise.

#include <algorithm>
#include <bit>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kSide = kFp8Block;

u32 magnitude(float x) noexcept { return std::bit_cast<u32>(x) & 0x7FFFFFFFu; }

// A tile of x: `rows` rows of `columns` elements. In codes it is the same, or its transpose.
template <class T>
struct Fp8Tile {
  const T* x;
  i64 stride, rows, columns;
};

template <class T>
u32 largest_of_row(const Fp8Tile<T>& t, i64 i) noexcept {
  u32 largest = 0;
  for (i64 j = 0; j < t.columns; ++j) largest = std::max(largest, magnitude(to_float(t.x[i * t.stride + j])));
  return largest;
}

// Sets the scale of each row of codes: scale[r], for r < kSide.
template <class T>
void find_scales(const Fp8Tile<T>& t, Fp8Blocks blocks, bool transposed, Fp8Format f, float* scale) noexcept {
  u32 largest[kSide] = {};
  if (blocks == Fp8Blocks::Squares) {
    u32 all = 0;
    for (i64 i = 0; i < t.rows; ++i) all = std::max(all, largest_of_row(t, i));
    std::fill_n(largest, kSide, all);
  } else if (transposed) {
    for (i64 i = 0; i < t.rows; ++i) {
      for (i64 j = 0; j < t.columns; ++j) largest[j] = std::max(largest[j], magnitude(to_float(t.x[i * t.stride + j])));
    }
  } else {
    for (i64 i = 0; i < t.rows; ++i) largest[i] = largest_of_row(t, i);
  }
  for (i64 r = 0; r < kSide; ++r) scale[r] = fp8_scale(largest[r], f, blocks);
}

// Writes the codes of a tile; those outside of x are zero.
template <class T>
void encode(const Fp8Tile<T>& t, bool transposed, Fp8Format f, const float* scale, u8* codes, i64 pitch, i64 rows,
            i64 columns) noexcept {
  alignas(64) u8 code[kSide][kSide];  // as x is
  for (i64 i = 0; i < t.rows; ++i) {
    const T* const x = t.x + i * t.stride;
    if (transposed) {
      for (i64 j = 0; j < t.columns; ++j) code[i][j] = fp8_code(to_float(x[j]), scale[j], f);
    } else {
      const float s = scale[i];
      for (i64 j = 0; j < t.columns; ++j) code[i][j] = fp8_code(to_float(x[j]), s, f);
    }
  }
  for (i64 r = 0; r < rows; ++r) {
    for (i64 k = 0; k < columns; ++k) {
      const i64 i = transposed ? k : r, j = transposed ? r : k;
      codes[r * pitch + k] = i < t.rows && j < t.columns ? code[i][j] : u8{0};
    }
  }
}

}  // namespace

// A worker has a tile of codes, [kSide, kSide] or less, with its scales.
void quantize_fp8(TensorView codes, TensorView scales, TensorView x, Fp8Blocks blocks, bool transposed,
                  Stream& stream) noexcept {
  const Fp8Layout layout{x.dim(transposed ? 1 : 0), x.dim(transposed ? 0 : 1), blocks};
  const i64 across = layout.k_blocks(), padded_k = layout.padded_k();
  with_work_type(x.dtype, [&]<class T>(T) {
    // A constant format lets the compiler see constant shifts.
    const auto run = [&]<DType kFormat>() {
      constexpr Fp8Format f = fp8_format(kFormat);
      stream.pool->parallel_for(layout.row_blocks() * across, [&](i64 tile, int) {
        const i64 row = tile / across * kSide, k = tile % across * kSide, x_row = transposed ? k : row,
                  x_column = transposed ? row : k;
        const Fp8Tile<T> t{x.as<T>() + x_row * x.stride[0] + x_column, x.stride[0], std::min(kSide, x.dim(0) - x_row),
                           std::min(kSide, x.dim(1) - x_column)};
        const i64 rows = std::min(kSide, layout.padded_rows() - row), columns = std::min(kSide, padded_k - k);
        float scale[kSide];
        find_scales(t, blocks, transposed, f, scale);
        float* const to = scales.as<float>() + layout.scale_of(row, k);
        if (blocks == Fp8Blocks::Rows) {
          std::copy_n(scale, rows, to);
        } else {
          *to = scale[0];
          if (k / kSide + 1 == across) std::fill(to + 1, to + 1 + layout.scale_columns() - across, 1.0f);
        }
        encode(t, transposed, f, scale, codes.as<u8>() + row * padded_k + k, padded_k, rows, columns);
      });
    };
    codes.dtype == DType::F8E5M2 ? run.template operator()<DType::F8E5M2>() : run.template operator()<DType::F8E4M3>();
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
