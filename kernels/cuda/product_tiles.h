// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles of products c += a b: their rows, which groups of rows may share out, their inner dimension, and the steps of
// 64 along it on tensor cores, of which the next is loaded while one is multiplied. An element's sum is one chain in
// the order of k, so it does not depend on its place in a tile.

#include "cuda/attention_tile.h"
#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda::product {

// The inner dimension of a tile: one range, or the rows of all groups that use a matrix.
struct Inner {
  const i32* offsets;
  i64 group, groups, matrices;
  i64 at, end;

  DS_DEVICE static Inner of_range(i64 n) { return {nullptr, 0, 1, 1, 0, n}; }
  DS_DEVICE static Inner of_matrix(const i32* offsets, i64 groups, i64 matrix, i64 matrices, i64 rows) {
    const bool all = offsets == nullptr;
    return {offsets, matrix, groups, matrices, all ? 0 : i64{offsets[matrix]}, all ? rows : i64{offsets[matrix + 1]}};
  }
  // Moves to the next range if this one is done; false: there is none.
  DS_DEVICE bool settle() {
    while (at >= end) {
      group += matrices;
      if (group >= groups) return false;
      at = offsets[group];
      end = offsets[group + 1];
    }
    return true;
  }
};

struct Rows {
  i64 begin, end;
};
// Rows of a tile of the forward product, and their matrix. The tiles of group g are numbers offsets[g] / kTile + g,
// ...: at least as many as it needs, and ascending. No rows: the number is not used.
template <int kTile>
DS_DEVICE Rows rows_of_tile(const i32* offsets, i64 groups, i64 rows, i64 tile, i64& group) {
  group = 0;
  if (offsets == nullptr) return {tile * kTile, (tile + 1) * kTile < rows ? (tile + 1) * kTile : rows};
  const auto first = [&](i64 g) { return offsets[g] / kTile + g; };
  i64 above = groups;  // the lowest group known to begin after this tile
  while (above - group > 1) {
    const i64 middle = (group + above) / 2;
    if (first(middle) <= tile) {
      group = middle;
    } else {
      above = middle;
    }
  }
  if (tile < first(group)) return {0, 0};
  const i64 begin = offsets[group] + (tile - first(group)) * kTile, end = offsets[group + 1];
  return {begin, begin + kTile < end ? begin + kTile : end};
}
template <int kTile>
DS_HOST_DEVICE constexpr i64 tiles_of_rows(i64 rows, i64 groups) noexcept {
  return rows / kTile + groups;
}

// A matrix, or a batch of them.
template <class T>
struct Matrix {
  T* data;
  i64 batch, ld;
  bool whole_chunks;  // rows of eight elements at multiples of eight columns are aligned, and whole

  static Matrix of(const TensorView& v) noexcept {
    const bool batched = v.rank == 3;
    const i64 batch = batched && v.dim(0) > 1 ? v.stride[0] : 0, ld = v.stride[v.rank - 2];
    const bool whole =
        reinterpret_cast<size_t>(v.data) % 16 == 0 && batch % 8 == 0 && ld % 8 == 0 && v.dim(v.rank - 1) % 8 == 0;
    return {v.as<T>(), batch, ld, whole};
  }
  DS_DEVICE T* at(i64 e, i64 row, i64 column) const { return data + e * batch + row * ld + column; }
};

// ---- tensor cores

namespace tensor {

constexpr int kThreads = 128, kColumns = 128, kStep = 64;

// The parts of a tile that warps have, in units of the instruction.
template <int kRows>
struct Shape {
  static_assert(kRows == 16 || kRows == 64);
  static constexpr int kWarpRows = kRows == 64 ? 32 : 16, kWarpColumns = kRows == 64 ? 64 : 32;
  static constexpr int kM = kWarpRows / 16, kN = kWarpColumns / 8;

  DS_DEVICE static int row(int warp) { return kRows == 64 ? warp / 2 * kWarpRows : 0; }
  DS_DEVICE static int column(int warp) { return (kRows == 64 ? warp % 2 : warp) * kWarpColumns; }
};

template <int kRows, class T>
struct Stage {
  T a[kRows * kStep], b[kColumns * kStep];
};

// x += the product of a step. a is [rows, k], or with kAcross [k, rows]; b [k, columns], or with kTransB [columns, k].
template <int kRows, bool kAcross, bool kTransB, class T>
DS_DEVICE void multiply_stage(float (&x)[Shape<kRows>::kM][Shape<kRows>::kN][4], const Stage<kRows, T>& s, int row,
                              int column) {
  using attention::Blocks;
  using S = Shape<kRows>;
  DS_UNROLL
  for (int k = 0; k < kStep / 16; ++k) {
    u32 a[S::kM][4];
    DS_UNROLL
    for (int m = 0; m < S::kM; ++m) {
      if constexpr (kAcross) {
        const auto blocks = Blocks<kRows, T>::template of<true>(s.a);
        load_matrices_transposed(a[m], blocks.at(16 * k, row / 16 + m));
      } else {
        const auto blocks = Blocks<kStep, T>::template of<false>(s.a);
        load_matrices(a[m], blocks.at(row + 16 * m, k));
      }
    }
    DS_UNROLL
    for (int n = 0; n < S::kN; n += 2) {
      u32 r[4];
      if constexpr (kTransB) {
        load_matrices(r, Blocks<kStep, T>::template of<true>(s.b).at(column + 8 * n, k));
      } else {
        load_matrices_transposed(r, Blocks<kColumns, T>::template of<false>(s.b).at(16 * k, column / 16 + n / 2));
      }
      const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
      DS_UNROLL
      for (int m = 0; m < S::kM; ++m) {
        mma_16x8x16<T>(x[m][n], a[m], b0);
        mma_16x8x16<T>(x[m][n + 1], a[m], b1);
      }
    }
  }
}

// Calls f(row, column, sum) with a lane's sums, of a warp's part of a tile that begins at (row, column).
template <int kM, int kN, class F>
DS_DEVICE void for_sums(const float (&x)[kM][kN][4], i64 row, i64 column, F&& f) {
  const int lane = thread_index() % kWarp;
  DS_UNROLL
  for (int m = 0; m < kM; ++m) {
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 0; e < 4; ++e)
        f(row + 16 * m + lane / 4 + e / 2 * 8, column + 8 * n + 2 * (lane % 4) + e % 2, x[m][n][e]);
    }
  }
}
// Stores them, rounded, in rows below `end` and columns below `columns`; `room`: 16 rows of the warp's columns.
template <int kM, int kN, class T>
DS_DEVICE void store_sums(T* room, const float (&x)[kM][kN][4], const attention::Head<T>& c, i64 row, i64 end,
                          i64 column, i64 columns) {
  DS_UNROLL
  for (int m = 0; m < kM; ++m)
    attention::store_rows<8 * kN>(room, x[m], c, static_cast<int>(row) + 16 * m, static_cast<int>(end),
                                  static_cast<int>(column), static_cast<int>(columns));
}

}  // namespace tensor

// ---- plain multiply-adds

namespace plain {

constexpr int kSide = 16, kThreads = kSide * kSide, kTile = 64, kStep = 16, kEach = kTile / kSide;

struct Shared {
  float a[kStep][kTile + 4], b[kStep][kTile + 4];  // four floats keep rows in different banks
};

// to[k][i] of kStep x kTile numbers. along: k is contiguous in memory.
template <bool kAlong, class Get>
DS_DEVICE void fill(float (&to)[kStep][kTile + 4], Get&& get) {
  for (int t = thread_index(); t < kStep * kTile; t += kThreads) {
    const int k = kAlong ? t % kStep : t / kTile, i = kAlong ? t / kStep : t % kTile;
    to[k][i] = get(k, i);
  }
}

// sum += the product of a step. Thread (y, x) of a square has rows y + 16 r and columns x + 16 c.
DS_DEVICE void multiply_step(float (&sum)[kEach][kEach], const Shared& shared) {
  const int y = thread_index() / kSide, x = thread_index() % kSide;
  DS_UNROLL_BY(4)
  for (int k = 0; k < kStep; ++k) {
    DS_UNROLL
    for (int r = 0; r < kEach; ++r) {
      DS_UNROLL
      for (int c = 0; c < kEach; ++c)
        sum[r][c] = std::fma(shared.a[k][y + kSide * r], shared.b[k][x + kSide * c], sum[r][c]);
    }
  }
}

// Calls f(row, column, sum) with a thread's sums, of a tile that begins at (row, column).
template <class F>
DS_DEVICE void for_sums(const float (&sum)[kEach][kEach], i64 row, i64 column, F&& f) {
  const int y = thread_index() / kSide, x = thread_index() % kSide;
  DS_UNROLL
  for (int r = 0; r < kEach; ++r) {
    DS_UNROLL
    for (int c = 0; c < kEach; ++c) f(row + y + kSide * r, column + x + kSide * c, sum[r][c]);
  }
}

}  // namespace plain

}  // namespace ds::cuda::product
