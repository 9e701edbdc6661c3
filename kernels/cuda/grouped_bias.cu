// SPDX-License-Identifier: Apache-2.0
// The biases of products of groups, and their gradients. A thread has a column: of a row, or of a bias, whose rows it
// adds up in their order.

#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 128;
constexpr i64 kRows = 64;  // of a block at a time

struct GroupRows {
  const i32* offsets;  // null: all rows are one group
  i64 G, M;
  DS_DEVICE i64 begin(i64 g) const { return offsets != nullptr ? offsets[g] : 0; }
  DS_DEVICE i64 end(i64 g) const { return offsets != nullptr ? offsets[g + 1] : M; }
};
GroupRows group_rows(const TensorView& offsets, i64 M) noexcept {
  return {offsets.as<i32>(), offsets ? offsets.numel() - 1 : 1, M};
}

// Blocks: columns, groups, rows.
template <class T>
__global__ void grouped_bias_kernel(T* y, i64 stride, const T* bias, i64 E, i64 N, GroupRows groups) {
  const i64 c = i64{block_index().x} * kThreads + thread_index(), g = block_index().y;
  if (c >= N) return;
  const float add = load(bias + g % E * N + c);
  const i64 first = groups.begin(g) + i64{block_index().z} * kRows, step = i64{grid_size().z} * kRows;
  for (i64 block = first; block < groups.end(g); block += step) {
    const i64 end = block + kRows < groups.end(g) ? block + kRows : groups.end(g);
    for (i64 i = block; i < end; ++i) store(y + i * stride + c, load(y + i * stride + c) + add);
  }
}

template <class To, class T>
__global__ void grouped_bias_grad_kernel(To* dbias, const T* dy, i64 stride, const float* weights, i64 E, i64 N,
                                         GroupRows groups, bool accumulate) {
  const i64 c = i64{block_index().x} * kThreads + thread_index(), e = block_index().y;
  if (c >= N) return;
  float sum = accumulate ? load(dbias + e * N + c) : 0.0f;
  for (i64 g = e; g < groups.G; g += E) {
    for (i64 i = groups.begin(g); i < groups.end(g); ++i)
      sum += (weights != nullptr ? weights[i] : 1.0f) * load(dy + i * stride + c);
  }
  store(dbias + e * N + c, sum);
}

}  // namespace

void grouped_bias(TensorView y, TensorView bias, TensorView offsets, Stream& s) noexcept {
  Context& c = context(s);
  const i64 E = bias.dim(0), N = bias.dim(1), M = y.dim(0);
  const GroupRows groups = group_rows(offsets, M);
  const i64 slices = std::clamp<i64>(M / groups.G / kRows, 1, 64);
  if (M == 0 || N == 0) return;
  with_work_type(y.dtype, [&]<class T>(T) {
    launch(grouped_bias_kernel<T>,
           {dim3(static_cast<unsigned>(ceil_div(N, kThreads)), static_cast<unsigned>(groups.G),
                 static_cast<unsigned>(slices)),
            kThreads, 0},
           c.stream(), y.as<T>(), y.stride[0], bias.as<const T>(), E, N, groups);
  });
  c.check(cudaGetLastError(), "grouped_bias");
}

void grouped_bias_grad(TensorView dbias, TensorView dy, TensorView weights, TensorView offsets, bool accumulate,
                       Stream& s) noexcept {
  Context& c = context(s);
  const i64 E = dbias.dim(0), N = dbias.dim(1);
  const Launch launched{dim3(static_cast<unsigned>(ceil_div(N, kThreads)), static_cast<unsigned>(E)), kThreads, 0};
  with_work_type(dy.dtype, [&]<class T>(T) {
    const auto run = [&]<class To>(To) {
      launch(grouped_bias_grad_kernel<To, T>, launched, c.stream(), dbias.as<To>(), dy.as<const T>(), dy.stride[0],
             weights.as<const float>(), E, N, group_rows(offsets, dy.dim(0)), accumulate);
    };
    dbias.dtype == DType::F32 ? run(float{}) : run(T{});
  });
  c.check(cudaGetLastError(), "grouped_bias_grad");
}

}  // namespace ds::cuda
