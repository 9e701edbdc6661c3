// SPDX-License-Identifier: Apache-2.0
// Products of groups of rows with a matrix each, in tiles of all groups together. A row's sums are those of the packed
// matrix product (packed_tile.h), whatever its group has beside it.

#include <algorithm>
#include <array>
#include <utility>

#include "cpu/isa/coded_tile.h"
#include "cpu/isa/codes.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/packed_tile.h"
#include "cpu/isa/streamed_tile.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kTileRows = 256, kTileColumns = 512;  // of the largest tile

// A dimension in panels of `unit`, cut into tiles of at most `most`.
struct Cut {
  i64 n, unit, tiles;
  Cut(i64 size, i64 panel, i64 most) noexcept
      : n(size), unit(panel), tiles(ceil_div(ceil_div(size, panel), most / panel)) {}
  i64 panels() const noexcept { return ceil_div(ceil_div(n, unit), tiles); }  // of the largest tile
  Range operator[](i64 tile) const noexcept { return part_of(n, unit, tile, tiles); }
};

// Row ranges of groups; without offsets all rows are one.
struct Groups {
  const i32* offsets;
  i64 count, rows;

  Groups(const TensorView& v, i64 M) noexcept : offsets(v.as<i32>()), count(v ? v.numel() - 1 : 1), rows(M) {}
  Range operator[](i64 g) const noexcept {
    return offsets == nullptr ? Range{0, rows} : Range{offsets[g], offsets[g + 1]};
  }
};

// Groups cut into pieces of at most kTileRows rows. first[g]: the pieces of groups before g.
struct Pieces {
  static size_t bytes(i64 groups) noexcept {
    return static_cast<size_t>(round_up((groups + 1) * i64{sizeof(i32)}, ThreadPool::kScratchUnit));
  }

  Pieces(const Groups& g, void* memory) noexcept : groups_(g), first_(static_cast<i32*>(memory)) {
    first_[0] = 0;
    for (i64 i = 0; i < g.count; ++i)
      first_[i + 1] = first_[i] + static_cast<i32>(ceil_div(std::max<i64>(g[i].size(), 0), kTileRows));
  }
  i64 count() const noexcept { return first_[groups_.count]; }
  i64 group_of(i64 piece) const noexcept {
    return std::upper_bound(first_, first_ + groups_.count + 1, static_cast<i32>(piece)) - first_ - 1;
  }
  Range rows_of(i64 piece) const noexcept {
    const i64 g = group_of(piece);
    const Range rows = groups_[g];
    const Range part = part_of(rows.size(), kNR, piece - first_[g], first_[g + 1] - first_[g]);
    return {rows.begin + part.begin, rows.begin + part.end};
  }

 private:
  Groups groups_;
  i32* first_;
};

// Rows of b that are copied as they are have no panels; those of codes do.
Cut columns_of(i64 N, const TensorView& b, bool trans_b) noexcept {
  return {N, trans_b && !b.codes ? kMR : kNR, kTileColumns};
}

size_t product_bytes(const TensorView& c, const TensorView& a, const TensorView& b, const TensorView& offsets,
                     bool trans_b) noexcept {
  const i64 rows = std::min(c.dim(0), kTileRows), panels = columns_of(c.dim(1), b, trans_b).panels();
  size_t bytes = Pieces::bytes(Groups(offsets, c.dim(0)).count);
  if (b.codes) return bytes + coded_tile_bytes(a.dtype, b.codes, rows, panels * kNR, a.dim(1));
  with_work_type(a.dtype, [&]<class T>(T) {
    const bool held = InnerBlocks<typename ProductOf<T>::type>{a.dim(1)}.several();
    bytes += (trans_b ? StreamRoom::along(rows, panels, held) : StreamRoom::across(rows, panels, held)).bytes();
  });
  return bytes;
}

// A tile of the gradient of a matrix. Only shapes are known before, so sums are expected to wait for other groups.
struct GradCut {
  Cut rows, columns;
  GradCut(const TensorView& a, const TensorView& b) noexcept
      : rows(a.dim(1), kMR, kTileRows), columns(b.dim(1), kNR, kTileColumns) {}
  i64 tiles() const noexcept { return rows.tiles * columns.tiles; }
  size_t bytes(DType work) const noexcept {
    size_t bytes = 0;
    with_work_type(work, [&]<class T>(T) {
      bytes = TileRoom<typename ProductOf<T>::type>(rows.panels(), columns.panels(), true).bytes();
    });
    return bytes;
  }
};

// The rows of the groups that use a matrix, as blocks of an inner dimension. No rows: one block of depth 0.
template <class Product>
struct RowBlocks {
  static constexpr i64 kDepth = TileRoom<Product>::kDepth;
  Groups groups;
  i64 matrix, matrices;

  i64 count() const noexcept {
    i64 n = 0;
    for (i64 g = matrix; g < groups.count; g += matrices) n += ceil_div(groups[g].size(), kDepth);
    return n;
  }
  bool several() const noexcept { return count() > 1; }
  template <class F>
  void each(F&& f) const noexcept {
    Range waiting{0, 0};
    bool first = true;
    for (i64 g = matrix; g < groups.count; g += matrices) {
      const Range rows = groups[g];
      for (i64 k = rows.begin; k < rows.end; k += kDepth) {
        if (!waiting.empty()) f(waiting.begin, waiting.size(), first, false), first = false;
        waiting = {k, std::min(k + kDepth, rows.end)};
      }
    }
    f(waiting.begin, waiting.size(), first, true);
  }
};

// c[rows][kNR] = or += a panel * b panel, whose rows are `ld` apart.
template <class C>
using ResultKernel = void (*)(i64 words, const float* a, const float* b, C* c, i64 ld, bool add);

template <class Product, class C, int kRows>
void result_kernel(i64 words, const float* a, const float* b, C* c, i64 ld, bool add) noexcept {
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
    __builtin_prefetch(c + r * ld, 1);
    __builtin_prefetch(c + r * ld + kNR - 1, 1);
  }
  Vec sum[kRows][2];
  multiply_panels<Product, kRows>(sum, words, a, b);
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r, c += ld) {
    store(c, add ? load(c) + sum[r][0] : sum[r][0]);
    store(c + kLanes, add ? load(c + kLanes) + sum[r][1] : sum[r][1]);
  }
}
template <class Product, class C>
constexpr std::array<ResultKernel<C>, kMR> result_kernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<ResultKernel<C>, kMR>{result_kernel<Product, C, static_cast<int>(r + 1)>...};
}
(std::make_index_sequence<kMR>{});

// multiply_tile of one block of the inner dimension: few rows, whose products are a small part of the work, so sums go
// from registers to c.
template <class Product, class C, class T>
void multiply_block(const Source<T>& a, const Source<T>& b, Range inner, Range m, Range n, const Epilogue& e,
                    FinishFn done, float* scratch) noexcept {
  using Room = TileRoom<Product>;
  const i64 words = ceil_div(inner.size(), Product::kDepth);
  const Room room(ceil_div(m.size(), kMR), ceil_div(n.size(), kNR), false);
  float *const b_block = scratch + room.a, *const sums = b_block + room.b;
  pack_panels<Product, kMR>(scratch, Room::kPitchA, a, m.begin, m.end, inner.begin, inner.size());
  for (i64 begin = n.begin; begin < n.end; begin += Room::kBlock) {
    const i64 end = std::min(begin + Room::kBlock, n.end);
    pack_panels<Product, kNR>(b_block, Room::kPitchB, b, begin, end, inner.begin, inner.size());
    const float* a_panel = scratch;
    for (i64 i = m.begin; i < m.end; i += kMR, a_panel += Room::kPitchA) {
      const i64 rows = std::min(kMR, m.end - i), ld = e.c.stride[0];
      const float* b_panel = b_block;
      for (i64 j = begin; j < end; j += kNR, b_panel += Room::kPitchB) {
        if (j + kNR <= end) {
          result_kernels<Product, C>[rows - 1](words, a_panel, b_panel, e.c.as<C>() + i * ld + j, ld, e.accumulate);
        } else {
          micro_kernels<Product>[rows - 1](words, a_panel, b_panel, sums, true);
          done(e, sums, kNR, i, j, rows, end - j);
        }
      }
    }
  }
}

TensorView matrix_of(const TensorView& batch, i64 e) noexcept {
  if (batch.codes) {
    const i64 N = batch.dim(1), K = batch.dim(2);
    TensorView m = TensorView::of(batch.as<u8>() + e * N * batch.codes.row_bytes(K), batch.dtype, {N, K});
    m.codes = batch.codes, m.panels = batch.panels;
    return m;
  }
  TensorView m = TensorView::of(batch.as<char>() + e * batch.stride[0] * dtype_bytes(batch.dtype), batch.dtype,
                                {batch.dim(1), batch.dim(2)});
  m.stride[0] = batch.stride[1];
  return m;
}

}  // namespace

void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b,
                    Stream& stream) noexcept {
  const i64 N = c.dim(1), E = b.dim(0);
  if (c.dim(0) == 0 || N == 0) return;
  ThreadPool& pool = *stream.pool;
  const Groups groups(offsets, c.dim(0));
  const Pieces pieces(groups, pool.reserve_scratch(product_bytes(c, a, b, offsets, trans_b)));
  const Cut columns = columns_of(N, b, trans_b);
  const Epilogue e{c, {}, {}, {}};
  const FinishFn done = finish_for(c.dtype, a.dtype);
  with_work_type(a.dtype, [&]<class T>(T) {
    using Product = typename ProductOf<T>::type;
    const Source<T> sa{a.as<T>(), a.stride[0], true};
    pool.parallel_for(pieces.count() * columns.tiles, [&](i64 tile, int worker) {
      const i64 piece = tile / columns.tiles;
      const TensorView matrix = matrix_of(b, pieces.group_of(piece) % E);
      const Source<T> sb{matrix.as<T>(), matrix.stride[0], trans_b};
      float* const scratch = static_cast<float*>(pool.scratch(worker)) + Pieces::bytes(groups.count) / sizeof(float);
      const Range m = pieces.rows_of(piece), n = columns[tile % columns.tiles];
      if (b.codes) {
        multiply_coded_tile(a, CodedMatrix(matrix), m, n, e, done, scratch);
      } else if (trans_b) {
        multiply_along<Product>(sa, sb, a.dim(1), m, n, e, done, scratch);
      } else {
        multiply_across<Product>(sa, sb, a.dim(1), m, n, e, done, scratch);
      }
    });
  });
}

void grouped_matmul_grad(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                         Stream& stream) noexcept {
  if (c.numel() == 0) return;
  const i64 E = c.dim(0);
  ThreadPool& pool = *stream.pool;
  const GradCut cut(a, b);
  pool.reserve_scratch(cut.bytes(a.dtype));
  const Groups groups(offsets, a.dim(0));
  const FinishFn done = finish_for(c.dtype, a.dtype);
  with_work_type(a.dtype, [&]<class T>(T) {
    using Product = typename ProductOf<T>::type;
    const Source<T> sa{a.as<T>(), a.stride[0], false}, sb{b.as<T>(), b.stride[0], false};
    pool.parallel_for(E * cut.tiles(), [&](i64 tile, int worker) {
      const i64 matrix = tile / cut.tiles(), part = tile % cut.tiles();
      const RowBlocks<Product> blocks{groups, matrix, E};
      const i64 count = blocks.count();
      if (accumulate && count == 0) return;
      Epilogue e{matrix_of(c, matrix), {}, {}, {}};
      e.accumulate = accumulate;
      const Range m = cut.rows[part / cut.columns.tiles], n = cut.columns[part % cut.columns.tiles];
      float* const scratch = static_cast<float*>(pool.scratch(worker));
      if (count != 1) return multiply_tile<Product>(sa, sb, blocks, m, n, e, done, scratch);
      blocks.each([&](i64 k, i64 depth, bool, bool) {
        const Range inner{k, k + depth};
        if (c.dtype == DType::F32) {
          multiply_block<Product, float>(sa, sb, inner, m, n, e, done, scratch);
        } else {
          multiply_block<Product, T>(sa, sb, inner, m, n, e, done, scratch);
        }
      });
    });
  });
}

void grouped_matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b,
                            Stream& stream) noexcept {
  if (c.dim(0) > 0 && c.dim(1) > 0) note_scratch(stream, product_bytes(c, a, b, offsets, trans_b));
}
void grouped_matmul_grad_scratch(TensorView c, TensorView a, TensorView b, TensorView, bool, Stream& stream) noexcept {
  if (c.numel() > 0) note_scratch(stream, GradCut(a, b).bytes(a.dtype));
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
