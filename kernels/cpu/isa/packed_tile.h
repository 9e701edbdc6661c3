// SPDX-License-Identifier: Apache-2.0
#pragma once
// One tile of a matrix product from operands that its worker packs, or from a matrix that was packed before. An
// element's sum is a fold over blocks of k, each a chain of multiply-adds, and depends neither on the bounds of the
// tile nor on who packed.

#include <algorithm>
#include <type_traits>

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

  TileRoom(i64 panels_m, i64 panels_n, bool held, bool packs_b = true) noexcept
      : a(panels_m * kPitchA),
        b((packs_b ? std::min(panels_n, kBlock / kNR) : 1) * kPitchB),
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

// The panels of B that a tile multiplies next. take(): columns [begin, end) and k in [k, k + depth); panel(j): the
// words of the panel whose first column is j. This one packs them in scratch.
template <class Product, class S>
class TilePanels {
 public:
  using Word = float;
  static constexpr bool kPacks = true;
  TilePanels(const S& b, float* room) noexcept : b_(b), room_(room) {}
  void take(i64 begin, i64 end, i64 k, i64 depth) noexcept {
    begin_ = begin;
    pack_panels<Product, kNR>(room_, TileRoom<Product>::kPitchB, b_, begin, end, k, depth);
  }
  const Word* panel(i64 j) const noexcept { return room_ + (j - begin_) / kNR * TileRoom<Product>::kPitchB; }

 private:
  const S& b_;
  float* room_;
  i64 begin_ = 0;
};

// A matrix [N,K] in panels of kNR rows and Product::kDepth numbers (OpTable::pack_matrix).
template <class T>
struct PanelSource {
  const T* data;
  i64 N, K;
};

// Such panels are read where they are. Scratch is for those without whole words of kNR columns.
template <class Product, class T>
class TilePanels<Product, PanelSource<T>> {
 public:
  static constexpr i64 kDepth = Product::kDepth;
  using Word = std::conditional_t<kDepth == 1, T, float>;
  static constexpr bool kPacks = false;
  TilePanels(const PanelSource<T>& b, float* room) noexcept : b_(b), room_(reinterpret_cast<T*>(room)) {}
  void take(i64, i64, i64 k, i64 depth) noexcept { k_ = k, depth_ = depth; }
  const Word* panel(i64 j) const noexcept {
    const i64 width = std::min(kNR, b_.N - j);
    const T* from = b_.data + j * b_.K + k_ * width;
    if (width == kNR && depth_ % kDepth == 0) return reinterpret_cast<const Word*>(from);
    T* to = room_;
    for (i64 k = 0; k < depth_; k += kDepth, to += kDepth * kNR) {
      const i64 d = std::min(kDepth, depth_ - k);
      std::fill_n(to, kDepth * kNR, T{});
      for (i64 i = 0; i < width * d; ++i) to[i / d * kDepth + i % d] = *from++;
    }
    return reinterpret_cast<const Word*>(room_);
  }

 private:
  PanelSource<T> b_;
  T* room_;
  i64 k_ = 0, depth_ = 0;
};

// c[m, n] of one tile; blocks as InnerBlocks, which may leave out some k.
template <class Product, class A, class B, class Blocks>
void multiply_tile(const A& a, const B& b, const Blocks& blocks, Range m, Range n, const Epilogue& e, FinishFn done,
                   float* scratch) noexcept {
  using Room = TileRoom<Product>;
  using Panels = TilePanels<Product, B>;
  constexpr i64 kBlock = Room::kBlock, kPitchA = Room::kPitchA, kSums = Room::kSums;
  const bool held = blocks.several();
  const Room room(ceil_div(m.size(), kMR), ceil_div(n.size(), kNR), held, Panels::kPacks);
  float* const a_block = scratch;
  Panels panels(b, a_block + room.a);
  float* const sums = a_block + room.a + room.b;

  blocks.each([&](i64 k, i64 depth, bool first, bool last) {
    const i64 words = ceil_div(depth, Product::kDepth);
    pack_panels<Product, kMR>(a_block, kPitchA, a, m.begin, m.end, k, depth);
    float* block = sums;
    for (i64 jb = n.begin; jb < n.end; jb += kBlock) {
      const i64 j_end = std::min(jb + kBlock, n.end);
      panels.take(jb, j_end, k, depth);
      const float* a_panel = a_block;
      for (i64 i = m.begin; i < m.end; i += kMR, a_panel += kPitchA) {
        const i64 rows = std::min(kMR, m.end - i);
        for (i64 j = jb; j < j_end; j += kNR) {
          micro_kernels<Product, typename Panels::Word>[rows - 1](words, a_panel, panels.panel(j), block, first);
          if (last) done(e, block, kNR, i, j, rows, std::min(kNR, n.end - j));
          if (held) block += kSums;
        }
      }
    }
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
