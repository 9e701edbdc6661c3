// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy. A chunk of tokens at a time: logits in fp32, then each row of them becomes a
// row of their gradient in the work dtype, in place, which feeds both backward products.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kBlock = 512, kWarps = kBlock / kWarp;
constexpr int kPacks = 4;                   // of eight logits, that a thread has at a time
constexpr i64 kTile = kBlock * kPacks * 8;  // logits that a block has at a time

struct RowShared {
  float top[kWarps];
  float sum[kWarps];
};

DS_DEVICE float exp_of(float x) { return fast_exp2(x * 1.4426950409f); }

struct RowArgs {
  float* logits;
  i64 stride, V;
  const i32* targets;
  float* losses;
  i32 ignore_index;
  float grad_scale;
  bool gradient;
};

// losses[row] = -log softmax(z)[target], and with `gradient` z becomes grad_scale * (softmax(z) - onehot(target)) of
// type E from the same address on. A tile is read by all threads before one of them writes it, and what it becomes lies
// below everything that is still to be read.
template <class E, bool kAligned>
__global__ void softmax_row_kernel(RowArgs p) {
  RowShared& shared = block_shared<RowShared>();
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const i64 row = block_index().x;
  float* const z = p.logits + row * p.stride;
  E* const dz = reinterpret_cast<E*>(z);
  const i64 target = p.targets[row], first = thread_index() * 8;
  constexpr i64 kStep = kBlock * 8;
  if (target == p.ignore_index) {
    if (thread_index() == 0) p.losses[row] = 0;
    const float zeros[8] = {};
    for (i64 j = first; p.gradient && j < p.V; j += kStep) store_some(dz + j, zeros, p.V - j, kAligned);
    return;
  }

  // The maximum and the sum of exponentials in one pass: the sum is rescaled when a tile raises the maximum. NaN never
  // is the maximum, and reaches the sum.
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float top = kLowest, sum = 0;
  for (i64 tile = first; tile < p.V; tile += kTile) {
    float x[kPacks][8];
    for (int i = 0; i < kPacks; ++i) load_some(x[i], z + tile + i * kStep, p.V - (tile + i * kStep), kAligned, kLowest);
    float higher = top;
    for (int i = 0; i < kPacks; ++i) {
      for (int e = 0; e < 8; ++e) higher = x[i][e] > higher ? x[i][e] : higher;
    }
    const float base = higher == kLowest ? 0 : higher;
    float part = 0;
    for (int i = 0; i < kPacks; ++i) {
      for (int e = 0; e < 8; ++e) part += exp_of(x[i][e] - base);
    }
    sum = sum * exp_of(top - base) + part;
    top = higher;
  }
  const float warp_top = warp_max(top);
  if (lane == 0) shared.top[warp] = warp_top;
  sync_block();
  float row_top = kLowest;
  for (int w = 0; w < kWarps; ++w) row_top = shared.top[w] > row_top ? shared.top[w] : row_top;
  const float warp_total = warp_sum(sum * exp_of(top - (row_top == kLowest ? 0 : row_top)));
  if (lane == 0) shared.sum[warp] = warp_total;
  sync_block();
  float row_sum = 0;
  for (int w = 0; w < kWarps; ++w) row_sum += shared.sum[w];
  if (row_top == kLowest) row_sum = std::numeric_limits<float>::quiet_NaN();  // no finite logit: inf - inf
  const float at_target = z[target];
  if (thread_index() == 0) p.losses[row] = (row_top - at_target) + std::log(row_sum);
  if (!p.gradient) return;

  const float scale = p.grad_scale / row_sum;
  const float d_target = p.grad_scale * (exp_of(at_target - row_top) / row_sum - 1.0f);
  for (i64 tile = 0; tile < p.V; tile += kTile) {
    float x[kPacks][8];
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + first + i * kStep;
      load_some(x[i], z + j, p.V - j, kAligned);
    }
    sync_block();
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + first + i * kStep;
      for (int e = 0; e < 8; ++e) x[i][e] = j + e == target ? d_target : exp_of(x[i][e] - row_top) * scale;
      store_some(dz + j, x[i], p.V - j, kAligned);
    }
  }
}

// Rows of logits with the distance `stride`, so many that they fit the workspace.
struct Layout {
  i64 rows, stride;
};
Layout layout_of(const TensorView& logits, i64 rows, i64 V) noexcept {
  // A vocabulary like 50257 would leave the rows unaligned, and the products with them slow: fewer rows, then, with
  // a few elements between them, unless there are so few that it would be a waste.
  constexpr i64 kUnit = 8, kFewRows = 16;
  const i64 stride = (V + kUnit - 1) / kUnit * kUnit, fit = rows * V / stride;
  if (V % kUnit == 0 || fit < kFewRows || reinterpret_cast<size_t>(logits.data) % 16 != 0) return {rows, V};
  return {fit, stride};
}

}  // namespace

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 T = h.dim(0), V = weight.dim(0);
  Context& ctx = context(stream);
  const Layout layout = layout_of(logits, p.chunk_tokens, V);
  i64 begin = 0;
  do {  // once at least: without tokens dweight and dbias are zero
    const i64 rows = std::min(layout.rows, T - begin);
    TensorView z = TensorView::of(logits.data, DType::F32, {rows, V});
    z.stride[0] = layout.stride;
    TensorView dz = z;  // rows of the work dtype that begin where the rows of z begin
    dz.dtype = h.dtype;
    dz.stride[0] = layout.stride * dtype_bytes(DType::F32) / dtype_bytes(h.dtype);
    matmul(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true}, stream);
    const RowArgs args{.logits = z.as<float>(),
                       .stride = layout.stride,
                       .V = V,
                       .targets = targets.as<i32>() + begin,
                       .losses = losses.as<float>() + begin,
                       .ignore_index = p.ignore_index,
                       .grad_scale = p.grad_scale,
                       .gradient = dh || dweight || dbias};
    const Launch grid{.grid = dim3(static_cast<unsigned>(rows)), .block = kBlock, .shared_bytes = sizeof(RowShared)};
    with_work_type(h.dtype, [&]<class E>(E) {
      if (aligned_rows(z.as<float>(), layout.stride, rows)) {
        launch(softmax_row_kernel<E, true>, grid, ctx.stream(), args);
      } else {
        launch(softmax_row_kernel<E, false>, grid, ctx.stream(), args);
      }
    });
    ctx.check(cudaGetLastError(), "linear_cross_entropy");
    if (dh) matmul(dh.rows(begin, rows), dz, weight, {}, {}, {}, {}, stream);
    if (dweight) {
      matmul(dweight, dz, h.rows(begin, rows), {}, {}, {}, {.trans_a = true, .accumulate = begin > 0}, stream);
    }
    if (dbias) column_sum_onto(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

}  // namespace ds::cuda
