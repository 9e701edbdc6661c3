// SPDX-License-Identifier: Apache-2.0
#pragma once
// Products of fp32 tiles in shared memory on plain multiply-adds. 256 threads are a square of 16 x 16; thread (y, x)
// has rows y, y + 16, ... of the tile that its block owns, and columns x, x + 16, ... of scores and results.

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda::square {

inline constexpr int kSide = 16, kThreads = kSide * kSide;

template <int kD>
struct Plan {
  static constexpr int kRows = kD <= 64 ? 64 : 32;  // of both tiles
  static constexpr int kR = kRows / kSide, kC = kD / kSide;
};

// Four floats of padding keep rows aligned and in different banks.
template <int kRows, int kColumns>
using Tile = float[kRows][kColumns + 4];

DS_DEVICE int thread_x() { return thread_index() % kSide; }
DS_DEVICE int thread_y() { return thread_index() / kSide; }

template <int kR, int kC>
DS_DEVICE void clear(float (&x)[kR][kC]) {
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    DS_UNROLL
    for (int c = 0; c < kC; ++c) x[r][c] = 0;
  }
}

// s = a b^T. Sums are split into runs of 32 columns, since the products of a row and its delta may nearly cancel in ds.
template <int kR, int kRows, int kColumns>
DS_DEVICE void products(float (&s)[kR][kR], const Tile<kRows, kColumns>& a, const Tile<kRows, kColumns>& b) {
  clear(s);
  DS_NO_UNROLL
  for (int first = 0; first < kColumns; first += 32) {
    float part[kR][kR];
    clear(part);
    DS_UNROLL_BY(4)
    for (int d = first; d < first + 32; d += 4) {
      float as[kR][4], bs[kR][4];
      DS_UNROLL
      for (int r = 0; r < kR; ++r) {
        load16(as[r], &a[thread_y() + kSide * r][d]);
        load16(bs[r], &b[thread_x() + kSide * r][d]);
      }
      DS_UNROLL
      for (int e = 0; e < 4; ++e) {
        DS_UNROLL
        for (int r = 0; r < kR; ++r) {
          DS_UNROLL
          for (int c = 0; c < kR; ++c) part[r][c] += as[r][e] * bs[c][e];
        }
      }
    }
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      DS_UNROLL
      for (int c = 0; c < kR; ++c) s[r][c] += part[r][c];
    }
  }
}

// x += weight b.
template <int kR, int kC, int kRows, int kColumns>
DS_DEVICE void add_products(float (&x)[kR][kC], const Tile<kRows, kRows>& weight, const Tile<kRows, kColumns>& b) {
  DS_NO_UNROLL
  for (int j = 0; j < kRows; j += 4) {
    float w[kR][4];
    DS_UNROLL
    for (int r = 0; r < kR; ++r) load16(w[r], &weight[thread_y() + kSide * r][j]);
    DS_UNROLL
    for (int e = 0; e < 4; ++e) {
      DS_UNROLL
      for (int c = 0; c < kC; ++c) {
        const float y = b[j + e][thread_x() + kSide * c];
        DS_UNROLL
        for (int r = 0; r < kR; ++r) x[r][c] += w[r][e] * y;
      }
    }
  }
}

}  // namespace ds::cuda::square
