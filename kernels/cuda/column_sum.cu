// SPDX-License-Identifier: Apache-2.0
// Sums of columns in two stages: blocks sum slices of rows into fp32 rows in scratch memory, which are then summed in
// order. The slices, and therefore the bits, depend only on the shape.

#include <algorithm>

#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/scratch_plan.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

using scratch::Slices;

constexpr int kWarps = Slices::kWarps, kBlock = kWarps * kWarp;
constexpr i64 kColumns = Slices::kColumns;
static_assert(kColumns == kWarp * 8);

struct SliceSums {
  float sum[kWarps][kColumns];
};

// partial[slice][N] = sums of the rows of slice block_index().y. Each warp takes every kWarps-th row.
template <class T>
__global__ void slice_sums_kernel(float* partial, const T* x, i64 R, i64 N, i64 stride, i64 slice_rows, bool aligned) {
  SliceSums& shared = block_shared<SliceSums>();
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const i64 first_column = block_index().x * kColumns, column = first_column + lane * 8;
  const i64 begin = block_index().y * slice_rows, end = begin + slice_rows < R ? begin + slice_rows : R;
  float sum[8] = {};
  constexpr int kUnroll = 4;  // loads in flight
  for (i64 r = begin + warp; r < end; r += kUnroll * kWarps) {
    float y[kUnroll][8];
    for (int u = 0; u < kUnroll; ++u) {
      const bool inside = r + u * kWarps < end;
      load_some(y[u], x + (r + u * kWarps) * stride + column, inside ? N - column : 0, aligned);
    }
    for (int u = 0; u < kUnroll; ++u) {
      for (int e = 0; e < 8; ++e) sum[e] += y[u][e];
    }
  }
  store_some(&shared.sum[warp][lane * 8], sum, 8, /*aligned=*/true);
  sync_block();
  const i64 mine = first_column + thread_index();
  if (mine < N) {
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += shared.sum[w][thread_index()];
    partial[block_index().y * N + mine] = total;
  }
}

struct FinalSums {
  float sum[kWarps][kWarp];
};

// A block has 32 columns, a warp every kWarps-th slice of them.
template <class T>
__global__ void final_sums_kernel(T* out, const float* partial, i64 slices, i64 N, bool accumulate) {
  FinalSums& shared = block_shared<FinalSums>();
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const i64 column = i64{block_index().x} * kWarp + lane;
  float sum = 0;
  if (column < N) {
    for (i64 s = warp; s < slices; s += kWarps) sum += partial[s * N + column];
  }
  shared.sum[warp][lane] = sum;
  sync_block();
  if (warp == 0 && column < N) {
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += shared.sum[w][lane];
    store(out + column, accumulate ? load(out + column) + total : total);
  }
}

}  // namespace

void column_sum(TensorView out, TensorView x, bool accumulate, Stream& stream) noexcept {
  const i64 R = x.dim(0), N = out.numel();
  if (N == 0) return;
  Context& ctx = context(stream);
  const Slices slices = Slices::of(R, N);
  float* const partial = static_cast<float*>(ctx.scratch(static_cast<size_t>(slices.bytes(N))));
  if (partial == nullptr) return;
  with_work_type(x.dtype, [&]<class T>(T) {
    const Launch first{.grid = dim3(static_cast<unsigned>(slices.column_blocks), static_cast<unsigned>(slices.count)),
                       .block = kBlock,
                       .shared_bytes = sizeof(SliceSums)};
    launch(slice_sums_kernel<T>, first, ctx.stream(), partial, x.as<T>(), R, N, x.stride[0], slices.rows,
           aligned_rows(x.as<T>(), x.stride[0], R));
    const Launch second{
        .grid = dim3(static_cast<unsigned>(ceil_div(N, kWarp))), .block = kBlock, .shared_bytes = sizeof(FinalSums)};
    if (out.dtype == DType::F32) {
      launch(final_sums_kernel<float>, second, ctx.stream(), out.as<float>(), partial, slices.count, N, accumulate);
    } else {
      launch(final_sums_kernel<T>, second, ctx.stream(), out.as<T>(), partial, slices.count, N, accumulate);
    }
  });
  ctx.check(cudaGetLastError(), "column_sum");
}

}  // namespace ds::cuda
