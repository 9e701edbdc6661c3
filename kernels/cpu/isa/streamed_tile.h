// SPDX-License-Identifier: Apache-2.0
#pragma once
// One tile of a product of a few rows, a b or a b^T, in which most memory traffic is that of b. All rows of a are kept
// packed, and b passes in panels, each prefetched while the one before it is multiplied. Where k is contiguous in b,
// its rows are copied as they are, and the rows of a are the lanes: transposing b would take as long as the product of
// a few rows. Sums grow in the order of packed_tile.h and have the same bits.

#include <algorithm>
#include <array>
#include <utility>

#include "cpu/isa/packed_tile.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

inline constexpr i64 kRowPitch = kWords + 16;  // words between copied rows: they lie in different sets of L1

// Cache lines that are wanted soon: `lines` adjacent ones of each of some rows.
class Ahead {
 public:
  Ahead() = default;
  template <class T>
  Ahead(const T* first, i64 row_elems, i64 ld, i64 rows) noexcept
      : row_(reinterpret_cast<const char*>(first)),
        lines_(ceil_div(row_elems * i64{sizeof(T)}, 64)),
        step_(ld * i64{sizeof(T)} - lines_ * 64),
        left_(lines_ * rows),
        until_(lines_) {}
  void prefetch_one() noexcept {
    if (left_ == 0) return;
    _mm_prefetch(row_, _MM_HINT_T1);
    row_ += 64;
    --left_;
    if (--until_ == 0) row_ += step_, until_ = lines_;
  }

 private:
  const char* row_ = nullptr;
  i64 lines_ = 0, step_ = 0, left_ = 0, until_ = 0;
};

// sums[kRows][kVectors * kLanes] = or += rows [kRows][kRowPitch] times lanes [words][kVectors * kLanes].
using StreamKernel = void (*)(i64 words, const float* rows, const float* lanes, float* sums, bool first, Ahead& ahead);

template <class Product, int kVectors, int kRows>
void stream_kernel(i64 words, const float* rows, const float* lanes, float* sums, bool first, Ahead& ahead) noexcept {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  }
  Ahead soon = ahead;
  for (i64 w = 0; w < words; ++w, ++rows, lanes += kVectors * kLanes) {
    soon.prefetch_one();
    Vec x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(lanes + v * kLanes);
#pragma GCC unroll 14
    for (int r = 0; r < kRows; ++r) {
      const Vec y = broadcast(rows[r * kRowPitch]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Product::multiply_add(y, x[v], sum[r][v]);
    }
  }
  ahead = soon;
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v, sums += kLanes) store(sums, first ? sum[r][v] : load(sums) + sum[r][v]);
  }
}

// stream_kernels<Product, vectors>[rows - 1].
template <class Product, int kVectors>
inline constexpr std::array<StreamKernel, kMR> stream_kernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<StreamKernel, kMR>{stream_kernel<Product, kVectors, static_cast<int>(r + 1)>...};
}
(std::make_index_sequence<kMR>{});

// Words of rows [begin, end) in which k is contiguous.
template <class Product, class T>
void copy_rows(float* to, const Source<T>& s, i64 begin, i64 end, i64 k, i64 depth) noexcept {
  constexpr i64 D = Product::kDepth;
  for (i64 r = begin; r < end; ++r, to += kRowPitch) {
    const T* const from = s.at(r, k);
    i64 d = 0;
    for (; d + D * kLanes <= depth; d += D * kLanes) store(to + d / D, Product::load_along(from + d, AllLanes{}));
    if (d < depth) store(to + d / D, Product::load_along(from + d, depth - d));
  }
}

// A tile's scratch: the packed rows of a, a panel of b, and the sums, which wait for the next block of k if there is
// one (`held`); where the rows of a are lanes, also results in rows.
struct StreamRoom {
  i64 kept, panel, results, sums;  // floats

  // b [N,K]: panels of kMR rows.
  static StreamRoom along(i64 m, i64 panels_n, bool held) noexcept {
    const i64 panels_m = ceil_div(m, kNR);
    return {panels_m * kNR * kWords, kMR * kRowPitch, kNR * kLanes, (held ? panels_m * panels_n : 1) * kMR * kNR};
  }
  // b [K,N]: panels of kNR columns.
  static StreamRoom across(i64 m, i64 panels_n, bool held) noexcept {
    return {m * kRowPitch, kNR * kWords, 0, (held ? ceil_div(m, kMR) * panels_n : 1) * kMR * kNR};
  }
  size_t bytes() const noexcept { return static_cast<size_t>(kept + panel + results + sums) * sizeof(float); }
};

// results[row][kLanes] = the transposed sums [rows][vectors * kLanes].
inline void turn_sums(float* results, const float* sums, i64 rows, i64 vectors) noexcept {
  for (i64 v = 0; v < vectors; ++v, results += kLanes * kLanes) {
    Vec t[kLanes];
#pragma GCC unroll 16
    for (i64 r = 0; r < kLanes; ++r) t[r] = r < rows ? load(sums + (r * vectors + v) * kLanes) : zero();
    transpose(t);
#pragma GCC unroll 16
    for (i64 i = 0; i < kLanes; ++i) store(results + i * kLanes, t[i]);
  }
}

// c[m, n] of one tile; b [N,K].
template <class Product, class T>
void multiply_along(const Source<T>& a, const Source<T>& b, i64 K, Range m, Range n, const Epilogue& e, FinishFn done,
                    float* scratch) noexcept {
  const InnerBlocks<Product> blocks{K};
  const bool held = blocks.several();
  const StreamRoom room = StreamRoom::along(m.size(), ceil_div(n.size(), kMR), held);
  float *const panel = scratch + room.kept, *const results = panel + room.panel, *const sums = results + room.results;
  blocks.each([&](i64 k, i64 depth, bool first, bool last) {
    const i64 words = ceil_div(depth, Product::kDepth);
    float* kept = scratch;
    for (i64 i = m.begin; i < m.end; i += kNR, kept += kNR * kWords) {
      const i64 count = std::min(kNR, m.end - i), width = round_up(count, kLanes);
      for (i64 v = 0; v < count; v += kLanes)
        pack<Product>(kept + v, width, a, i + v, std::min(kLanes, count - v), k, depth);
    }
    float* block = sums;
    for (i64 j = n.begin; j < n.end; j += kMR) {
      const i64 rows = std::min(kMR, n.end - j), next = std::min(kMR, n.end - j - rows);
      copy_rows<Product>(panel, b, j, j + rows, k, depth);
      Ahead ahead = next > 0 ? Ahead(b.at(j + rows, k), depth, b.ld, next) : Ahead();
      kept = scratch;
      for (i64 i = m.begin; i < m.end; i += kNR, kept += kNR * kWords) {
        const i64 count = std::min(kNR, m.end - i), vectors = ceil_div(count, kLanes);
        const auto& kernels = vectors == 1 ? stream_kernels<Product, 1> : stream_kernels<Product, 2>;
        kernels[rows - 1](words, panel, kept, block, first, ahead);
        if (last) {
          turn_sums(results, block, rows, vectors);
          done(e, results, kLanes, i, j, count, rows);
        }
        if (held) block += kMR * kNR;
      }
    }
  });
}

// c[m, n] of one tile; b [K,N].
template <class Product, class T>
void multiply_across(const Source<T>& a, const Source<T>& b, i64 K, Range m, Range n, const Epilogue& e, FinishFn done,
                     float* scratch) noexcept {
  const InnerBlocks<Product> blocks{K};
  const bool held = blocks.several();
  const StreamRoom room = StreamRoom::across(m.size(), ceil_div(n.size(), kNR), held);
  float *const panel = scratch + room.kept, *const sums = panel + room.panel;
  const i64 panels = ceil_div(m.size(), kMR);
  blocks.each([&](i64 k, i64 depth, bool first, bool last) {
    const i64 words = ceil_div(depth, Product::kDepth);
    copy_rows<Product>(scratch, a, m.begin, m.end, k, depth);
    float* block = sums;
    for (i64 j = n.begin; j < n.end; j += kNR) {
      const i64 columns = std::min(kNR, n.end - j), next = std::min(kNR, n.end - j - columns);
      pack_panels<Product, kNR>(panel, kNR * kWords, b, j, j + columns, k, depth);
      Ahead ahead = next > 0 ? Ahead(b.at(j + columns, k), next, b.ld, depth) : Ahead();
      for (i64 p = 0; p < panels; ++p) {  // as even as possible
        const Range rows = part_of(m.size(), 1, p, panels);
        stream_kernels<Product, 2>[rows.size() - 1](words, scratch + rows.begin * kRowPitch, panel, block, first,
                                                    ahead);
        if (last) done(e, block, kNR, m.begin + rows.begin, j, rows.size(), columns);
        if (held) block += kMR * kNR;
      }
    }
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
