// SPDX-License-Identifier: Apache-2.0
// Gradients of the matrices of grouped products. A block has a tile of a matrix and adds up the rows of its groups.

#include "cuda/ops.h"
#include "cuda/product_tiles.h"
#include "cuda/row_matmul.h"

namespace ds::cuda {
namespace {

using product::Inner;
using product::Matrix;

// c[e] [M,N] += a^T b of the rows of the groups of e: a [K,M], b [K,N], for K rows of all groups.
template <class T, class C>
struct GradArgs {
  Matrix<C> c;
  Matrix<const T> a, b;
  const i32* offsets;
  i64 groups, matrices = 0;
  i64 M = 0, N = 0, K = 0;
  bool accumulate = false;

  DS_DEVICE Inner inner() const { return Inner::of_matrix(offsets, groups, block_index().z, matrices, K); }
};

template <class C>
DS_DEVICE void put(C* to, float x, bool accumulate) {
  store(to, accumulate ? load(to) + x : x);
}

using namespace product::tensor;
constexpr int kRows = 64;

template <class T>
struct Shared {
  Stage<kRows, T> stages[2];
};

template <class T, class C>
DS_DEVICE void load_stage(Stage<kRows, T>& to, const GradArgs<T, C>& p, int row, int column, const Inner& inner) {
  using attention::Head;
  const int at = static_cast<int>(inner.at), end = static_cast<int>(inner.end);
  attention::load_tile<kRows, kStep, kThreads>(to.a, Head<const T>{p.a.data + row, p.a.ld, p.a.whole_chunks}, at, end,
                                               static_cast<int>(p.M) - row);
  attention::load_tile<kColumns, kStep, kThreads>(to.b, Head<const T>{p.b.data + column, p.b.ld, p.b.whole_chunks}, at,
                                                  end, static_cast<int>(p.N) - column);
}

template <class T, class C>
__global__ void __launch_bounds__(kThreads) grad_kernel(GradArgs<T, C> p) {
  using S = Shape<kRows>;
  Shared<T>& shared = block_shared<Shared<T>>();
  const int warp = thread_index() / kWarp;
  const i64 row = i64{block_index().x} * kRows, column = i64{block_index().y} * kColumns;
  float x[S::kM][S::kN][4];
  DS_UNROLL
  for (int m = 0; m < S::kM; ++m) attention::clear(x[m]);

  const auto load_next = [&](int stage, const Inner& inner) {
    load_stage(shared.stages[stage], p, static_cast<int>(row), static_cast<int>(column), inner);
  };
  Inner inner = p.inner();
  bool more = inner.settle();
  if (!more && p.accumulate) return;  // -0 stays, too
  if (more) load_next(0, inner);
  copies_commit();
  for (int stage = 0; more; stage ^= 1) {
    inner.at += kStep;
    more = inner.settle();
    if (more) load_next(stage ^ 1, inner);
    copies_commit();
    copies_wait<1>();
    sync_block();
    multiply_stage<kRows, true, false>(x, shared.stages[stage], S::row(warp), S::column(warp));
    sync_block();
  }
  copies_wait<0>();
  const i64 warp_row = row + S::row(warp), warp_column = column + S::column(warp);
  if constexpr (sizeof(C) == 2) {
    if (!p.accumulate)
      return store_sums(shared.stages[0].a + warp * 16 * S::kWarpColumns, x,
                        attention::Head<C>{p.c.at(block_index().z, 0, 0), p.c.ld, p.c.whole_chunks}, warp_row, p.M,
                        warp_column, p.N);
  }
  for_sums(x, warp_row, warp_column, [&](i64 r, i64 c, float sum) {
    if (r < p.M && c < p.N) put(p.c.at(block_index().z, r, c), sum, p.accumulate);
  });
}

__global__ void __launch_bounds__(product::plain::kThreads) grad_fp32_kernel(GradArgs<float, float> p) {
  using namespace product::plain;
  auto& shared = block_shared<product::plain::Shared>();
  const i64 row = i64{block_index().x} * kTile, column = i64{block_index().y} * kTile;
  float sum[kEach][kEach] = {};
  Inner inner = p.inner();
  bool more = inner.settle();
  if (!more && p.accumulate) return;
  while (more) {
    fill<false>(shared.a, [&](int k, int i) {
      return row + i < p.M && inner.at + k < inner.end ? *p.a.at(0, inner.at + k, row + i) : 0.0f;
    });
    fill<false>(shared.b, [&](int k, int i) {
      return column + i < p.N && inner.at + k < inner.end ? *p.b.at(0, inner.at + k, column + i) : 0.0f;
    });
    sync_block();
    multiply_step(sum, shared);
    sync_block();
    inner.at += product::plain::kStep;
    more = inner.settle();
  }
  for_sums(sum, row, column, [&](i64 r, i64 c, float x) {
    if (r < p.M && c < p.N) put(p.c.at(block_index().z, r, c), x, p.accumulate);
  });
}

template <class T, class C>
void run(const GradArgs<T, C>& p, cudaStream_t stream) noexcept {
  const auto grid = [&](i64 rows, i64 columns) {
    return dim3(static_cast<unsigned>(ceil_div(p.M, rows)), static_cast<unsigned>(ceil_div(p.N, columns)),
                static_cast<unsigned>(p.matrices));
  };
  if constexpr (sizeof(T) == 4) {
    using namespace product;
    launch(grad_fp32_kernel, {grid(plain::kTile, plain::kTile), plain::kThreads, sizeof(plain::Shared)}, stream, p);
  } else {
    launch(grad_kernel<T, C>, {grid(kRows, kColumns), kThreads, sizeof(Shared<T>)}, stream, p);
  }
}

}  // namespace

void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b, Stream& s) noexcept {
  row_matmul({.c = c, .a = a, .b = b, .bias = {}, .preact = {}, .residual = {}, .params = {.trans_b = trans_b}},
             offsets, s);
}

void grouped_matmul_grad(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                         Stream& s) noexcept {
  Context& x = context(s);
  if (c.numel() == 0) return;
  with_work_type(a.dtype, [&]<class T>(T) {
    const auto start = [&]<class C>(C) {
      run(GradArgs<T, C>{.c = Matrix<C>::of(c),
                         .a = Matrix<const T>::of(a),
                         .b = Matrix<const T>::of(b),
                         .offsets = offsets.as<i32>(),
                         .groups = offsets ? offsets.numel() - 1 : 1,
                         .matrices = c.dim(0),
                         .M = a.dim(1),
                         .N = b.dim(1),
                         .K = a.dim(0),
                         .accumulate = accumulate},
          x.stream());
    };
    if constexpr (sizeof(T) == 2) {
      if (c.dtype != DType::F32) return start(T{});
    }
    start(float{});
  });
  x.check(cudaGetLastError(), "grouped_matmul_grad");
}

}  // namespace ds::cuda
