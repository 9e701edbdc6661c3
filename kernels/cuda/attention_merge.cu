// SPDX-License-Identifier: Apache-2.0
// Merges the attention to one block of keys with that to the previous blocks. Half a warp per row: all of its lanes
// read the row's statistics before one of them writes.

#include <cmath>
#include <limits>

#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 16, kRows = kThreads / kLanes;
constexpr int kWidth = 4;  // elements of a lane at a time

template <class E>
struct MergeArgs {
  float* o;
  const E* part;
  float* lse;
  const float* lse_part;
  i64 o_stride[3], part_stride[3], lse_stride[2], lse_part_stride[2];
  i64 rows, T_, H, D;  // rows: of all tokens and heads
  bool first;
  bool aligned;  // every pack is whole and aligned to its size

  MergeArgs(TensorView to, TensorView to_lse, TensorView from, TensorView from_lse, bool first_block) noexcept
      : o(to.as<float>()),
        part(from.as<E>()),
        lse(to_lse.as<float>()),
        lse_part(from_lse.as<float>()),
        rows(to.dim(0) * to.dim(1) * to.dim(2)),
        T_(to.dim(1)),
        H(to.dim(2)),
        D(to.dim(3)),
        first(first_block),
        aligned(D % kWidth == 0 && all_aligned(kWidth * sizeof(float), {o}) &&
                all_aligned(kWidth * sizeof(E), {part})) {
    for (int d = 0; d < 3; ++d) {
      o_stride[d] = to.stride[static_cast<size_t>(d)];
      part_stride[d] = from.stride[static_cast<size_t>(d)];
      aligned &= to.dim(d) == 1 || (o_stride[d] % kWidth == 0 && part_stride[d] % kWidth == 0);
    }
    for (int d = 0; d < 2; ++d) {
      lse_stride[d] = to_lse.stride[static_cast<size_t>(d)];
      lse_part_stride[d] = from_lse.stride[static_cast<size_t>(d)];
    }
  }
};

template <class E>
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeArgs<E> a) {
  constexpr float kNothing = std::numeric_limits<float>::infinity();  // the log-sum-exp over no keys
  const i64 row = i64{block_index().x} * kRows + thread_index() / kLanes;
  const int lane = thread_index() % kLanes;
  const bool there = row < a.rows;
  const i64 token = row / a.H, h = row - token * a.H, b = token / a.T_, t = token - b * a.T_;
  float* const lse = a.lse + (b * a.lse_stride[0] + h * a.lse_stride[1] + t);
  float part = 0, before = 0;
  if (there) {
    part = a.lse_part[b * a.lse_part_stride[0] + h * a.lse_part_stride[1] + t];
    before = a.first ? kNothing : *lse;
  }
  sync_warp();  // all have read
  if (!there || (part == kNothing && !a.first)) return;
  float keep = 0, add = 1, sum = part;
  if (before != kNothing) {
    const float top = before > part ? before : part;
    const float mine = std::exp(before - top), other = std::exp(part - top), total = mine + other;
    keep = mine / total;
    add = other / total;
    sum = top + std::log(total);
  }
  if (lane == 0) *lse = sum;
  float* const to = a.o + (b * a.o_stride[0] + t * a.o_stride[1] + h * a.o_stride[2]);
  const E* const from = a.part + (b * a.part_stride[0] + t * a.part_stride[1] + h * a.part_stride[2]);
  for (i64 d = lane * kWidth; d < a.D; d += kLanes * kWidth) {
    Pack<float, kWidth> x;
    Pack<E, kWidth> y;
    float merged[kWidth], other[kWidth];
    if (a.aligned) {
      y.load(from + d);
    } else {
      y.load_some(from, d, 0, a.D);
    }
    y.get(other);
    if (before == kNothing) {
      DS_UNROLL for (int e = 0; e < kWidth; ++e) merged[e] = other[e];
    } else {
      if (a.aligned) {
        x.load(to + d);
      } else {
        x.load_some(to, d, 0, a.D);
      }
      x.get(merged);
      DS_UNROLL for (int e = 0; e < kWidth; ++e) merged[e] = std::fma(other[e], add, merged[e] * keep);
    }
    x.set(merged);
    if (a.aligned) {
      x.store(to + d);
    } else {
      x.store_some(to, d, 0, a.D);
    }
  }
}

}  // namespace

void attention_merge(TensorView o, TensorView lse, TensorView o_part, TensorView lse_part, bool first,
                     Stream& s) noexcept {
  Context& c = context(s);
  with_work_type(o_part.dtype, [&]<class E>(E) {
    const MergeArgs<E> args(o, lse, o_part, lse_part, first);
    const dim3 grid(static_cast<unsigned>(ceil_div(args.rows, kRows)));
    launch(merge_kernel<E>, {grid, kThreads, 0}, c.stream(), args);
  });
  c.check(cudaGetLastError(), "attention_merge");
}

}  // namespace ds::cuda
