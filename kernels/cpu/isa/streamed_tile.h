// SPDX-License-Identifier: Apache-2.0
#pragma once
// One tile of a product of a few rows, a b or a b^T, in which most memory traffic is that of b. All rows of a are kept
// packed, and b passes in panels: while one is multiplied, the next is packed, a piece every few multiplications, so
// that memory and the multipliers work at the same time. Where k is contiguous in b, its rows are copied as they are,
// and the rows of a are the lanes: transposing b would take as long as the product of a few rows. Sums grow in the
// order of packed_tile.h and have the same bits.

#include <algorithm>
#include <array>
#include <utility>

#include "cpu/isa/packed_tile.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

inline constexpr i64 kRowPitch = kWords + 16;  // words between copied rows: they lie in different sets of L1

// The next panel of b, [N,K]: rows [rows][kRowPitch]. A piece is a vector of a row.
template <class Product, class T>
class RowFeed {
 public:
  RowFeed() = default;
  RowFeed(float* to, const Source<T>& b, Range rows, i64 k, i64 depth) noexcept
      : from_(b.at(rows.begin, k)), to_(to), ld_(b.ld), depth_(depth), rows_(rows.size()) {}

  void pack_piece() noexcept {
    if (rows_ <= 0) return;
    constexpr i64 kElems = Product::kDepth * kLanes, kFar = kMR;  // rows
    _mm_prefetch(reinterpret_cast<const char*>(from_ + kFar * ld_ + at_), _MM_HINT_T1);
    float* const to = to_ + at_ / Product::kDepth;
    if (at_ + kElems <= depth_) {
      store(to, Product::load_along(from_ + at_, AllLanes{}));
    } else {
      store(to, Product::load_along(from_ + at_, depth_ - at_));
    }
    at_ += kElems;
    if (at_ >= depth_) at_ = 0, from_ += ld_, to_ += kRowPitch, --rows_;
  }
  void finish() noexcept {
    while (rows_ > 0) pack_piece();
  }

 private:
  const T* from_ = nullptr;
  float* to_ = nullptr;
  i64 ld_ = 0, depth_ = 0, rows_ = 0, at_ = 0;
};

// The next panels of b, [K,N]: columns [panels][kWords][kNR]. A piece is a word of each column of a panel; pieces go
// along the rows of b.
template <class Product, class T>
class ColumnFeed {
 public:
  ColumnFeed() = default;
  ColumnFeed(float* to, const Source<T>& b, Range columns, i64 k, i64 depth) noexcept
      : from_(b.at(columns.begin, k)), to_(to), ld_(b.ld), left_(depth), columns_(columns.size()) {}

  void pack_piece() noexcept {
    if (left_ <= 0) return;
    // Shortly before their use: rows that are a power of two apart share few sets of the caches.
    for (i64 d = 0; d < D; ++d) {
      for (i64 c = 0; c < kNR; c += 64 / i64{sizeof(T)})
        _mm_prefetch(reinterpret_cast<const char*>(from_ + (kFar + d) * ld_ + at_ + c), _MM_HINT_T1);
    }
    float* const to = to_ + at_ * kWords;
    if (at_ + kNR <= columns_) {
      Vec words[2];
      Product::load_across(words, from_ + at_, ld_, left_);
      store(to, words[0]), store(to + kLanes, words[1]);
    } else {
      pack_edge(to);
    }
    at_ += kNR;
    if (at_ >= columns_) at_ = 0, from_ += D * ld_, to_ += kNR, left_ -= D;
  }
  void finish() noexcept {
    while (left_ > 0) pack_piece();
  }

 private:
  static constexpr i64 D = Product::kDepth, kFar = 64;  // rows

  [[gnu::cold, gnu::noinline]] void pack_edge(float* to) const noexcept {
    for_vectors(at_, columns_,
                [&](i64 v, auto n) { store(to + v - at_, Product::load_across(from_ + v, ld_, left_, n)); });
  }

  const T* from_ = nullptr;
  float* to_ = nullptr;
  i64 ld_ = 0, left_ = 0, columns_ = 0, at_ = 0;
};

// sums[kRows][kVectors * kLanes] = or += rows [kRows][kRowPitch] times lanes [words][kVectors * kLanes]. The feed packs
// a piece every `every` words.
template <class Feed>
using StreamKernel = void (*)(i64 words, const float* rows, const float* lanes, float* sums, bool first, Feed& feed,
                              i64 every);

template <class Product, int kVectors, int kRows, class Feed>
void stream_kernel(i64 words, const float* rows, const float* lanes, float* sums, bool first, Feed& feed,
                   i64 every) noexcept {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  }
  Feed next = feed;  // in registers
  for (i64 w = 0; w < words;) {
    next.pack_piece();
    for (const i64 end = std::min(words, w + every); w < end; ++w, ++rows, lanes += kVectors * kLanes) {
      Vec x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load(lanes + v * kLanes);
#pragma GCC unroll 14
      for (int r = 0; r < kRows; ++r) {
        const Vec y = broadcast(rows[r * kRowPitch]);
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Product::multiply_add(y, x[v], sum[r][v]);
      }
    }
  }
  feed = next;
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v, sums += kLanes) store(sums, first ? sum[r][v] : load(sums) + sum[r][v]);
  }
}

// stream_kernels<Product, Feed>[rows - 1], of two vectors.
template <class Product, class Feed>
inline constexpr std::array<StreamKernel<Feed>, kMR> stream_kernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<StreamKernel<Feed>, kMR>{stream_kernel<Product, 2, static_cast<int>(r + 1), Feed>...};
}
(std::make_index_sequence<kMR>{});

// Words of rows in which k is contiguous.
template <class Product, class T>
void copy_rows(float* to, const Source<T>& s, Range rows, i64 k, i64 depth) noexcept {
  RowFeed<Product, T>(to, s, rows, k, depth).finish();
}

// A tile's scratch: the packed rows of a, two panels of b, and the sums, which wait for the next block of k if there is
// one (`held`); where the rows of a are lanes, also results in rows.
struct StreamRoom {
  i64 kept, panel, results, sums;  // floats

  // b [N,K]: panels of kMR rows.
  static StreamRoom along(i64 m, i64 panels_n, bool held) noexcept {
    const i64 panels_m = ceil_div(m, kNR);
    return {panels_m * kNR * kWords, kMR * kRowPitch + kLanes, kNR * kLanes,
            (held ? panels_m * panels_n : 1) * kMR * kNR};
  }
  // b [K,N]: kPanels panels of kNR columns together, which are long pieces of memory.
  static constexpr i64 kPanels = 4;
  static StreamRoom across(i64 m, i64 panels_n, bool held) noexcept {
    return {m * kRowPitch, kPanels * kNR * kWords, 0, (held ? ceil_div(m, kMR) * panels_n : 1) * kMR * kNR};
  }
  size_t bytes() const noexcept { return static_cast<size_t>(kept + 2 * panel + results + sums) * sizeof(float); }
};

// results[row][kLanes] = the transposed sums [kMR][vectors * kLanes].
inline void turn_sums(float* results, const float* sums, i64 vectors) noexcept {
  for (i64 v = 0; v < vectors; ++v, results += kLanes * kLanes) {
    Vec t[kLanes];
#pragma GCC unroll 16
    for (i64 r = 0; r < kLanes; ++r) t[r] = r < kMR ? load(sums + (r * vectors + v) * kLanes) : zero();
    transpose(t);
#pragma GCC unroll 16
    for (i64 i = 0; i < kLanes; ++i) store(results + i * kLanes, t[i]);
  }
}

// The panels of b in the order of their use: all of a block of k, then those of the next.
template <class Feed>
struct PanelOrder {
  i64 K, depth, step;
  Range n;
  // The feed of the panel after that at (j, k); empty after the last.
  template <class S>
  Feed after(float* to, const S& b, i64 j, i64 k) const noexcept {
    j += step;
    if (j >= n.end) j = n.begin, k += depth;
    return k < K ? at(to, b, j, k) : Feed();
  }
  template <class S>
  Feed at(float* to, const S& b, i64 j, i64 k) const noexcept {
    return Feed(to, b, {j, std::min(j + step, n.end)}, k, std::min(depth, K - k));
  }
};

// c[m, n] of one tile; b [N,K].
template <class Product, class T>
void multiply_along(const Source<T>& a, const Source<T>& b, i64 K, Range m, Range n, const Epilogue& e, FinishFn done,
                    float* scratch) noexcept {
  using Feed = RowFeed<Product, T>;
  const InnerBlocks<Product> blocks{K};
  const bool held = blocks.several();
  const i64 panels_m = ceil_div(m.size(), kNR);
  const StreamRoom room = StreamRoom::along(m.size(), ceil_div(n.size(), kMR), held);
  float *panel = scratch + room.kept, *other = panel + room.panel;
  float *const results = other + room.panel, *const sums = results + room.results;
  const PanelOrder<Feed> order{K, blocks.kDepth, kMR, n};
  order.at(panel, b, n.begin, 0).finish();
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
      Feed next = order.after(other, b, j, k);
      kept = scratch;
      for (i64 i = m.begin; i < m.end; i += kNR, kept += kNR * kWords) {
        const i64 count = std::min(kNR, m.end - i), vectors = ceil_div(count, kLanes);
        // A panel that ends early has old words in its other rows, whose sums are not used.
        const auto kernel = vectors == 1 ? stream_kernel<Product, 1, kMR, Feed> : stream_kernel<Product, 2, kMR, Feed>;
        kernel(words, panel, kept, block, first, next, panels_m);
        if (last) {
          turn_sums(results, block, vectors);
          done(e, results, kLanes, i, j, count, std::min(kMR, n.end - j));
        }
        if (held) block += kMR * kNR;
      }
      next.finish();
      std::swap(panel, other);
    }
  });
}

// c[m, n] of one tile; b [K,N].
template <class Product, class T>
void multiply_across(const Source<T>& a, const Source<T>& b, i64 K, Range m, Range n, const Epilogue& e, FinishFn done,
                     float* scratch) noexcept {
  using Feed = ColumnFeed<Product, T>;
  constexpr i64 kColumns = StreamRoom::kPanels * kNR;
  const InnerBlocks<Product> blocks{K};
  const bool held = blocks.several();
  const i64 panels_m = ceil_div(m.size(), kMR);
  const StreamRoom room = StreamRoom::across(m.size(), ceil_div(n.size(), kNR), held);
  float *panels = scratch + room.kept, *others = panels + room.panel, *const sums = others + room.panel;
  const PanelOrder<Feed> order{K, blocks.kDepth, kColumns, n};
  order.at(panels, b, n.begin, 0).finish();
  blocks.each([&](i64 k, i64 depth, bool first, bool last) {
    const i64 words = ceil_div(depth, Product::kDepth);
    copy_rows<Product>(scratch, a, m, k, depth);
    float* block = sums;
    for (i64 begin = n.begin; begin < n.end; begin += kColumns) {
      Feed next = order.after(others, b, begin, k);
      const i64 end = std::min(begin + kColumns, n.end);
      for (i64 p = 0; p < panels_m; ++p) {
        const Range rows = part_of(m.size(), 1, p, panels_m);  // as even as possible
        const float* panel = panels;
        for (i64 j = begin; j < end; j += kNR, panel += kNR * kWords) {
          stream_kernels<Product, Feed>[rows.size() - 1](words, scratch + rows.begin * kRowPitch, panel, block, first,
                                                         next, panels_m);
          if (last) done(e, block, kNR, m.begin + rows.begin, j, rows.size(), std::min(kNR, end - j));
          if (held) block += kMR * kNR;
        }
      }
      next.finish();
      std::swap(panels, others);
    }
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
