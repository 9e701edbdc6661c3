// SPDX-License-Identifier: Apache-2.0
#pragma once
// One tile of a matrix product from operands that its worker packs. An element's sum is a fold over blocks of k, each a
// chain of multiply-adds, and does not depend on the bounds of the tile.

#include <algorithm>

#include "cpu/epilogue.h"
#include "cpu/gemm.h"
#include "cpu/isa/tiling.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// A tile's scratch: its packed A, a block of B, and its sums, all of which wait for the next block of k, if there is
// one (`held`).
template <class Product>
struct TileRoom {
  static constexpr i64 kDepth = kWords * Product::kDepth;  // of a block of k
  static constexpr i64 kBlock = 8 * kNR;                   // columns of B packed together: 384 KiB, in L2
  static constexpr i64 kPitchA = kMR * kWords + kLanes, kPitchB = kNR * kWords, kSums = kMR * kNR;
  i64 a, b, sums;  // floats

  TileRoom(i64 panels_m, i64 panels_n, bool held) noexcept
      : a(panels_m * kPitchA),
        b(std::min(panels_n, kBlock / kNR) * kPitchB),
        sums((held ? panels_m * panels_n : 1) * kSums) {}
  size_t bytes() const noexcept { return static_cast<size_t>(a + b + sums) * sizeof(float); }
};

// The blocks of k: each(k, depth, first, last) is called for at least one, in order.
template <class Product>
struct InnerBlocks {
  static constexpr i64 kDepth = TileRoom<Product>::kDepth;
  i64 K;

  bool several() const noexcept { return K > kDepth; }
  template <class F>
  void each(F&& f) const noexcept {
    for (i64 k = 0; k == 0 || k < K; k += kDepth) f(k, std::min(kDepth, K - k), k == 0, k + kDepth >= K);
  }
};

// c[m, n] of one tile; blocks as InnerBlocks, which may leave out some k.
template <class Product, class S, class Blocks>
void multiply_tile(const S& a, const S& b, const Blocks& blocks, Range m, Range n, const Epilogue& e, FinishFn done,
                   float* scratch) noexcept {
  using Room = TileRoom<Product>;
  constexpr i64 kBlock = Room::kBlock, kPitchA = Room::kPitchA, kPitchB = Room::kPitchB, kSums = Room::kSums;
  const bool held = blocks.several();
  const Room room(ceil_div(m.size(), kMR), ceil_div(n.size(), kNR), held);
  float* const a_block = scratch;
  float* const b_block = a_block + room.a;
  float* const sums = b_block + room.b;

  blocks.each([&](i64 k, i64 depth, bool first, bool last) {
    const i64 words = ceil_div(depth, Product::kDepth);
    pack_panels<Product, kMR>(a_block, kPitchA, a, m.begin, m.end, k, depth);
    float* block = sums;
    for (i64 jb = n.begin; jb < n.end; jb += kBlock) {
      const i64 j_end = std::min(jb + kBlock, n.end);
      pack_panels<Product, kNR>(b_block, kPitchB, b, jb, j_end, k, depth);
      const float* a_panel = a_block;
      for (i64 i = m.begin; i < m.end; i += kMR, a_panel += kPitchA) {
        const i64 rows = std::min(kMR, m.end - i);
        const float* b_panel = b_block;
        for (i64 j = jb; j < j_end; j += kNR, b_panel += kPitchB) {
          micro_kernels<Product>[rows - 1](words, a_panel, b_panel, block, first);
          if (last) done(e, block, kNR, i, j, rows, std::min(kNR, n.end - j));
          if (held) block += kSums;
        }
      }
    }
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
