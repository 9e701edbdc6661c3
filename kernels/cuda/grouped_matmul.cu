// SPDX-License-Identifier: Apache-2.0
// Products of groups of rows with a matrix each, and the gradients of these matrices. A block has a tile of a result
// and finds its group from the offsets. In 16 bits products are those of tensor cores, in steps of 64 along the sum, of
// which the next is loaded while one is multiplied; in fp32 they are plain multiply-adds. An element's sum is one chain
// in the order of k, so it does not depend on its place in a tile.

#include "cuda/attention_tile.h"
#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

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
i64 tiles_of_rows(i64 rows, i64 groups) noexcept {
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

template <class T, class C>
struct GroupedArgs {
  Matrix<C> c;
  Matrix<const T> a, b;
  const i32* offsets;
  i64 groups, matrices = 0;
  i64 M = 0, N = 0, K = 0;  // of c[M,N] += a[M,K] b[K,N]; gradient: c[e] is [M,N], and K the rows of all groups
  bool accumulate = false;
};

// The tile that a block has: rows and columns of c, and the matrix.
struct GroupedTile {
  Rows rows;
  i64 column, matrix;
};
template <bool kGrad, int kRows, int kColumns, class Args>
DS_DEVICE GroupedTile tile_of_block(const Args& p) {
  const i64 column = i64{block_index().y} * kColumns;
  if constexpr (kGrad) {
    const i64 first = i64{block_index().x} * kRows, last = first + kRows < p.M ? first + kRows : p.M;
    return {{first, last}, column, block_index().z};
  } else {
    i64 group = 0;
    const Rows rows = rows_of_tile<kRows>(p.offsets, p.groups, p.M, block_index().x, group);
    return {rows, column, group % p.matrices};
  }
}
template <bool kGrad, class Args>
DS_DEVICE Inner inner_of(const Args& p, const GroupedTile& tile) {
  return kGrad ? Inner::of_matrix(p.offsets, p.groups, tile.matrix, p.matrices, p.K) : Inner::of_range(p.K);
}

template <class C>
DS_DEVICE void put(C* to, float x, bool accumulate) {
  store(to, accumulate ? load(to) + x : x);
}

// ---- tensor cores

namespace tensor {

constexpr int kThreads = 128, kRows = 64, kColumns = 128, kStep = 64;
constexpr int kWarpRows = 32, kWarpColumns = 64, kM = kWarpRows / 16, kN = kWarpColumns / 8;

template <class T>
struct Stage {
  T a[kRows * kStep], b[kColumns * kStep];
};
template <class T>
struct Shared {
  Stage<T> stages[2];
};

// b is [K,N], or with kTransB [N,K]; the gradient has a [K,M].
template <bool kGrad, bool kTransB, class T, class C>
DS_DEVICE void load_stage(Stage<T>& to, const GroupedArgs<T, C>& p, const GroupedTile& tile, const Inner& inner) {
  using attention::Head;
  using attention::load_tile;
  const int at = static_cast<int>(inner.at), end = static_cast<int>(inner.end);
  const int row = static_cast<int>(tile.rows.begin), last = static_cast<int>(tile.rows.end);
  const int column = static_cast<int>(tile.column), N = static_cast<int>(p.N);
  if constexpr (kGrad) {
    load_tile<kRows, kStep, kThreads>(to.a, Head<const T>{p.a.data + row, p.a.ld, p.a.whole_chunks}, at, end,
                                      static_cast<int>(p.M) - row);
  } else {
    load_tile<kStep, kRows, kThreads>(to.a, Head<const T>{p.a.data + at, p.a.ld, p.a.whole_chunks}, row, last,
                                      end - at);
  }
  const i64 matrix = kGrad ? 0 : tile.matrix;
  if constexpr (kTransB) {
    load_tile<kStep, kColumns, kThreads>(to.b, Head<const T>{p.b.at(matrix, 0, at), p.b.ld, p.b.whole_chunks}, column,
                                         N, end - at);
  } else {
    load_tile<kColumns, kStep, kThreads>(to.b, Head<const T>{p.b.at(matrix, 0, column), p.b.ld, p.b.whole_chunks}, at,
                                         end, N - column);
  }
}

template <bool kGrad, bool kTransB, class T>
DS_DEVICE void multiply_stage(float (&x)[kM][kN][4], const Stage<T>& s, int row, int column) {
  using attention::Blocks;
  DS_UNROLL
  for (int k = 0; k < kStep / 16; ++k) {
    u32 a[kM][4];
    DS_UNROLL
    for (int m = 0; m < kM; ++m) {
      if constexpr (kGrad) {
        const auto blocks = Blocks<kRows, T>::template of<true>(s.a);
        load_matrices_transposed(a[m], blocks.at(16 * k, row / 16 + m));
      } else {
        const auto blocks = Blocks<kStep, T>::template of<false>(s.a);
        load_matrices(a[m], blocks.at(row + 16 * m, k));
      }
    }
    DS_UNROLL
    for (int n = 0; n < kN; n += 2) {
      u32 r[4];
      if constexpr (kTransB) {
        load_matrices(r, Blocks<kStep, T>::template of<true>(s.b).at(column + 8 * n, k));
      } else {
        load_matrices_transposed(r, Blocks<kColumns, T>::template of<false>(s.b).at(16 * k, column / 16 + n / 2));
      }
      const u32 b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
      DS_UNROLL
      for (int m = 0; m < kM; ++m) {
        mma_16x8x16<T>(x[m][n], a[m], b0);
        mma_16x8x16<T>(x[m][n + 1], a[m], b1);
      }
    }
  }
}

// A warp's sums, from (row, column) of c on.
template <class T, class C>
DS_DEVICE void store_sums(T* room, float (&x)[kM][kN][4], const GroupedArgs<T, C>& p, i64 matrix, i64 row, i64 end,
                          i64 column) {
  const int lane = thread_index() % kWarp;
  DS_UNROLL
  for (int m = 0; m < kM; ++m) {
    if constexpr (sizeof(C) == 2) {
      if (!p.accumulate) {
        attention::store_rows<kWarpColumns>(
            room, x[m], attention::Head<C>{p.c.at(matrix, 0, 0), p.c.ld, p.c.whole_chunks},
            static_cast<int>(row) + 16 * m, static_cast<int>(end), static_cast<int>(column), static_cast<int>(p.N));
        continue;
      }
    }
    DS_UNROLL
    for (int n = 0; n < kN; ++n) {
      DS_UNROLL
      for (int e = 0; e < 4; ++e) {
        const i64 r = row + 16 * m + lane / 4 + e / 2 * 8, c = column + 8 * n + 2 * (lane % 4) + e % 2;
        if (r < end && c < p.N) put(p.c.at(matrix, r, c), x[m][n][e], p.accumulate);
      }
    }
  }
}

template <bool kGrad, bool kTransB, class T, class C>
__global__ void __launch_bounds__(kThreads) grouped_kernel(GroupedArgs<T, C> p) {
  const GroupedTile tile = tile_of_block<kGrad, kRows, kColumns>(p);
  if (tile.rows.begin >= tile.rows.end) return;
  Shared<T>& shared = block_shared<Shared<T>>();
  const int warp = thread_index() / kWarp, row = warp / 2 * kWarpRows, column = warp % 2 * kWarpColumns;
  float x[kM][kN][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) attention::clear(x[m]);

  Inner inner = inner_of<kGrad>(p, tile);
  bool more = inner.settle();
  if (!more && p.accumulate) return;  // -0 stays, too
  if (more) load_stage<kGrad, kTransB>(shared.stages[0], p, tile, inner);
  copies_commit();
  for (int stage = 0; more; stage ^= 1) {
    inner.at += kStep;
    more = inner.settle();
    if (more) load_stage<kGrad, kTransB>(shared.stages[stage ^ 1], p, tile, inner);
    copies_commit();
    copies_wait<1>();
    sync_block();
    multiply_stage<kGrad, kTransB>(x, shared.stages[stage], row, column);
    sync_block();
  }
  copies_wait<0>();
  T* const room = shared.stages[0].a + warp * 16 * kWarpColumns;
  store_sums(room, x, p, kGrad ? tile.matrix : 0, tile.rows.begin + row, tile.rows.end, tile.column + column);
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

template <bool kGrad, bool kTransB>
__global__ void __launch_bounds__(kThreads) grouped_fp32_kernel(GroupedArgs<float, float> p) {
  const GroupedTile tile = tile_of_block<kGrad, kTile, kTile>(p);
  if (tile.rows.begin >= tile.rows.end) return;
  Shared& shared = block_shared<Shared>();
  const int y = thread_index() / kSide, x = thread_index() % kSide;
  const i64 of_b = kGrad ? 0 : tile.matrix, of_c = kGrad ? tile.matrix : 0;
  float sum[kEach][kEach] = {};
  Inner inner = inner_of<kGrad>(p, tile);
  bool more = inner.settle();
  if (!more && p.accumulate) return;
  while (more) {
    fill<!kGrad>(shared.a, [&](int k, int i) {
      const i64 row = tile.rows.begin + i, at = inner.at + k;
      if (row >= tile.rows.end || at >= inner.end) return 0.0f;
      return kGrad ? *p.a.at(0, at, row) : *p.a.at(0, row, at);
    });
    fill<kTransB>(shared.b, [&](int k, int i) {
      const i64 column = tile.column + i, at = inner.at + k;
      if (column >= p.N || at >= inner.end) return 0.0f;
      return kTransB ? *p.b.at(of_b, column, at) : *p.b.at(of_b, at, column);
    });
    sync_block();
    DS_UNROLL_BY(4)
    for (int k = 0; k < kStep; ++k) {
      DS_UNROLL
      for (int r = 0; r < kEach; ++r) {
        DS_UNROLL
        for (int c = 0; c < kEach; ++c) sum[r][c] += shared.a[k][y + kSide * r] * shared.b[k][x + kSide * c];
      }
    }
    sync_block();
    inner.at += kStep;
    more = inner.settle();
  }
  DS_UNROLL
  for (int r = 0; r < kEach; ++r) {
    DS_UNROLL
    for (int c = 0; c < kEach; ++c) {
      const i64 row = tile.rows.begin + y + kSide * r, column = tile.column + x + kSide * c;
      if (row < tile.rows.end && column < p.N) put(p.c.at(of_c, row, column), sum[r][c], p.accumulate);
    }
  }
}

}  // namespace plain

template <class T, class C>
GroupedArgs<T, C> args_of(const TensorView& c, const TensorView& a, const TensorView& b,
                          const TensorView& offsets) noexcept {
  return {.c = Matrix<C>::of(c),
          .a = Matrix<const T>::of(a),
          .b = Matrix<const T>::of(b),
          .offsets = offsets.as<i32>(),
          .groups = offsets ? offsets.numel() - 1 : 1};
}

dim3 grid_of(i64 x, i64 y, i64 z) noexcept {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

template <bool kTransB, class T, class C>
void multiply(const GroupedArgs<T, C>& p, cudaStream_t stream) noexcept {
  if constexpr (sizeof(T) == 4) {
    launch(plain::grouped_fp32_kernel<false, kTransB>,
           {grid_of(tiles_of_rows<plain::kTile>(p.M, p.groups), ceil_div(p.N, plain::kTile), 1), plain::kThreads,
            sizeof(plain::Shared)},
           stream, p);
  } else {
    launch(tensor::grouped_kernel<false, kTransB, T, C>,
           {grid_of(tiles_of_rows<tensor::kRows>(p.M, p.groups), ceil_div(p.N, tensor::kColumns), 1), tensor::kThreads,
            sizeof(tensor::Shared<T>)},
           stream, p);
  }
}

template <class T, class C>
void gradient(const GroupedArgs<T, C>& p, cudaStream_t stream) noexcept {
  if constexpr (sizeof(T) == 4) {
    launch(plain::grouped_fp32_kernel<true, false>,
           {grid_of(ceil_div(p.M, plain::kTile), ceil_div(p.N, plain::kTile), p.matrices), plain::kThreads,
            sizeof(plain::Shared)},
           stream, p);
  } else {
    launch(tensor::grouped_kernel<true, false, T, C>,
           {grid_of(ceil_div(p.M, tensor::kRows), ceil_div(p.N, tensor::kColumns), p.matrices), tensor::kThreads,
            sizeof(tensor::Shared<T>)},
           stream, p);
  }
}

// Calls f(T{}, C{}) with the types of the operands and of c.
template <class F>
void with_types(DType work, DType c, F&& f) noexcept {
  with_work_type(work, [&]<class T>(T) {
    if (c == DType::F32) return f(T{}, float{});
    if constexpr (sizeof(T) == 2) f(T{}, T{});
  });
}

}  // namespace

void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b, Stream& s) noexcept {
  Context& x = context(s);
  if (c.dim(0) == 0 || c.dim(1) == 0) return;
  with_types(a.dtype, c.dtype, [&]<class T, class C>(T, C) {
    GroupedArgs<T, C> p = args_of<T, C>(c, a, b, offsets);
    p.M = c.dim(0), p.N = c.dim(1), p.K = a.dim(1), p.matrices = b.dim(0);
    if (trans_b) {
      multiply<true>(p, x.stream());
    } else {
      multiply<false>(p, x.stream());
    }
  });
  x.check(cudaGetLastError(), "grouped_matmul");
}

void grouped_matmul_grad(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                         Stream& s) noexcept {
  Context& x = context(s);
  if (c.numel() == 0) return;
  with_types(a.dtype, c.dtype, [&]<class T, class C>(T, C) {
    GroupedArgs<T, C> p = args_of<T, C>(c, a, b, offsets);
    p.M = a.dim(1), p.N = b.dim(1), p.K = a.dim(0), p.matrices = c.dim(0), p.accumulate = accumulate;
    gradient(p, x.stream());
  });
  x.check(cudaGetLastError(), "grouped_matmul_grad");
}

}  // namespace ds::cuda
