// SPDX-License-Identifier: Apache-2.0
// The biases of products of groups, and their gradients.

#include <algorithm>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kColumns = 256;  // of a task: whole vectors

// Calls f(first, end) for the rows of each group that uses matrix e, in order.
template <class F>
void for_groups(const TensorView& offsets, i64 e, i64 E, i64 rows, F&& f) noexcept {
  if (!offsets) return f(0, rows);
  const i32* const at = offsets.as<i32>();
  for (i64 g = e; g < offsets.numel() - 1; g += E) f(i64{at[g]}, i64{at[g + 1]});
}

// Calls f(e, first, end) for columns of each of E vectors, over threads.
template <class F>
void for_columns(Stream& stream, i64 E, i64 N, F&& f) noexcept {
  const i64 blocks = (N + kColumns - 1) / kColumns;
  stream.pool->parallel_for(E * blocks, [=](i64 task, int) {
    const i64 first = task % blocks * kColumns;
    f(task / blocks, first, std::min(N, first + kColumns));
  });
}

}  // namespace

void grouped_bias(TensorView y, TensorView bias, TensorView offsets, Stream& stream) noexcept {
  const i64 E = bias.dim(0), N = bias.dim(1);
  with_work_type(y.dtype, [&]<class T>(T) {
    for_columns(stream, E, N, [=](i64 e, i64 first, i64 last) {
      const T* const add = bias.as<T>() + e * N;
      for_groups(offsets, e, E, y.dim(0), [=](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i) {
          T* const row = y.as<T>() + i * y.stride[0];
          for_vectors(first, last, [=](i64 c, auto n) { store(row + c, load(row + c, n) + load(add + c, n), n); });
        }
      });
    });
  });
}

void grouped_bias_grad(TensorView dbias, TensorView dy, TensorView weights, TensorView offsets, bool accumulate,
                       Stream& stream) noexcept {
  const i64 E = dbias.dim(0), N = dbias.dim(1);
  const float* const weight = weights.as<float>();
  with_work_type(dy.dtype, [&]<class T>(T) {
    for_columns(stream, E, N, [=](i64 e, i64 first, i64 last) {
      float sums[kColumns] = {};
      float* const sum = sums - first;
      const bool wide = dbias.dtype == DType::F32;
      if (accumulate) {
        for_vectors(first, last, [=](i64 c, auto n) {
          store(sum + c, wide ? load(dbias.as<float>() + e * N + c, n) : load(dbias.as<T>() + e * N + c, n), n);
        });
      }
      for_groups(offsets, e, E, dy.dim(0), [=](i64 begin, i64 end) {
        for (i64 i = begin; i < end; ++i) {
          const T* const row = dy.as<T>() + i * dy.stride[0];
          const Vec by = broadcast(weight != nullptr ? weight[i] : 1.0f);
          for_vectors(first, last,
                      [=](i64 c, auto n) { store(sum + c, fma(by, load(row + c, n), load(sum + c, n)), n); });
        }
      });
      for_vectors(first, last, [=](i64 c, auto n) {
        if (wide) {
          store(dbias.as<float>() + e * N + c, load(sum + c, n), n);
        } else {
          store(dbias.as<T>() + e * N + c, load(sum + c, n), n);
        }
      });
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
