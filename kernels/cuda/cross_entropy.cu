// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy, a chunk of tokens at a time: logits in fp32, then each row becomes, in place,
// a row of its gradient in the work dtype, which both backward products read. A vocabulary in parts takes the same
// steps, one op for each.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kBlock = 512, kWarps = kBlock / kWarp;
constexpr int kPacks = 4;                   // of eight logits, per thread at a time
constexpr i64 kTile = kBlock * kPacks * 8;  // logits per block at a time

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct RowShared {
  float top[kWarps];
  float sum[kWarps];
};

DS_DEVICE float exp_of(float x) { return fast_exp2(x * 1.4426950409f); }

// The parts of a loss that do not depend on its target.
struct LossTerms {
  float grad_scale, smoothing, z_loss;
  float each;  // per id: smoothing over all of them
};

LossTerms terms_of(const CrossEntropyParams& p, i64 vocab) noexcept {
  return {.grad_scale = p.grad_scale,
          .smoothing = p.label_smoothing,
          .z_loss = p.z_loss,
          .each = p.label_smoothing == 0 ? 0 : p.label_smoothing / static_cast<float>(vocab)};
}

DS_DEVICE float loss_of(float sum, float at_target, float top, const LossTerms& t) {
  const float log_sum = std::log(sum), loss = log_sum - at_target;
  return t.z_loss == 0 ? loss : loss + t.z_loss * (top + log_sum) * (top + log_sum);
}

// dz = grad_scale * ((1 + 2 z_loss lse) e^(z - top)/sum - (1 - smoothing) onehot(own) - each), where own is the
// position of the target, or any outside. dz may start at the same address as z: all threads read a tile before one of
// them writes it, and its results are stored below everything that is still to be read.
template <class E, bool kAligned>
DS_DEVICE void write_gradient(E* dz, const float* z, i64 V, float top, float sum, i64 own, const LossTerms& t) {
  constexpr i64 kStep = kBlock * 8;
  const i64 first = thread_index() * 8;
  const float of_softmax = t.z_loss == 0 ? 1.0f : 1 + 2 * t.z_loss * (top + std::log(sum));
  const float scale = t.grad_scale * of_softmax / sum, less = t.grad_scale * t.each;
  // Read before any thread passes the first barrier, while it is still a logit.
  const float mine = own >= 0 && own < V ? exp_of(z[own] - top) : 0;
  const float at_own = t.grad_scale * (of_softmax * mine / sum - (1 - t.smoothing) - t.each);
  for (i64 tile = 0; tile < V; tile += kTile) {
    float x[kPacks][8];
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + first + i * kStep;
      load_some(x[i], z + j, V - j, kAligned);
    }
    sync_block();
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + first + i * kStep;
      for (int e = 0; e < 8; ++e) x[i][e] = j + e == own ? at_own : exp_of(x[i][e] - top) * scale - less;
      store_some(dz + j, x[i], V - j, kAligned);
    }
  }
}
template <class E, bool kAligned>
DS_DEVICE void write_zeros(E* dz, i64 V) {
  const float zeros[8] = {};
  for (i64 j = thread_index() * 8; j < V; j += kBlock * 8) store_some(dz + j, zeros, V - j, kAligned);
}

struct RowArgs {
  float* logits;
  i64 stride, V;
  const i32* targets;
  float* losses;
  i32 ignore_index;
  LossTerms terms;
  bool gradient;
};

// The sum over the block, the same for all threads; `part`: memory of its warps, which no thread may read before a
// barrier.
DS_DEVICE float block_sum(float x, float* part) {
  x = warp_sum(x);
  if (thread_index() % kWarp == 0) part[thread_index() / kWarp] = x;
  sync_block();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += part[w];
  return sum;
}

// A thread's share of the sum of z - top over a row.
template <bool kAligned>
DS_DEVICE float total_share(const float* z, i64 V, float top) {
  float total = 0;
  for (i64 tile = thread_index() * 8; tile < V; tile += kTile) {
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + i * kBlock * 8;
      float x[8], part = 0;
      load_some(x, z + j, V - j, kAligned, top);
      for (int e = 0; e < 8; ++e) part += x[e] - top;
      total += part;
    }
  }
  return total;
}

// losses[row]; with `gradient`, z becomes its gradient of type E in place.
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
    if (p.gradient) write_zeros<E, kAligned>(dz, p.V);
    return;
  }

  // Maximum and sum of exponentials in one pass: the sum is rescaled when a tile raises the maximum. NaN is never the
  // maximum, but reaches the sum.
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
  const LossTerms& terms = p.terms;
  float at_target = z[target] - row_top;
  if (terms.smoothing > 0) {
    sync_block();  // the shared sums have been read
    const float all = block_sum(total_share<kAligned>(z, p.V, row_top), shared.sum);
    at_target = (1 - terms.smoothing) * at_target + terms.each * all;
  }
  if (thread_index() == 0) p.losses[row] = loss_of(row_sum, at_target, row_top, terms);
  if (!p.gradient) return;

  write_gradient<E, kAligned>(dz, z, p.V, row_top, row_sum, target, terms);
}

// ---- a vocabulary in parts ----

struct PartShared {
  float part[kWarps];
};

// Calls f(x) for all logits of a row in packs of eight; beyond its end they are -inf.
template <bool kAligned, class F>
DS_DEVICE void for_packs(const float* z, i64 V, F&& f) {
  for (i64 tile = thread_index() * 8; tile < V; tile += kTile) {
    float x[kPacks][8];
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + i * kBlock * 8;
      load_some(x[i], z + j, V - j, kAligned, kLowest);
    }
    for (int i = 0; i < kPacks; ++i) f(x[i]);
  }
}

template <bool kAligned>
__global__ void vocab_max_kernel(float* max, const float* z, i64 stride, i64 V) {
  PartShared& shared = block_shared<PartShared>();
  const i64 row = block_index().x;
  float top = kLowest;
  for_packs<kAligned>(z + row * stride, V, [&](const float(&x)[8]) {
    for (int e = 0; e < 8; ++e) top = x[e] > top ? x[e] : top;
  });
  top = warp_max(top);
  if (thread_index() % kWarp == 0) shared.part[thread_index() / kWarp] = top;
  sync_block();
  if (thread_index() != 0) return;
  for (int w = 0; w < kWarps; ++w) top = shared.part[w] > top ? shared.part[w] : top;
  max[row] = top;
}

struct PartArgs {
  const float* z;
  i64 stride, V;
  const float* max;
  const i32* targets;
  i64 first_id;
  float *sum, *at_target;
  i32 ignore_index;
  LossTerms terms;
};

template <bool kAligned>
__global__ void vocab_sums_kernel(PartArgs p) {
  PartShared& shared = block_shared<PartShared>();
  const i64 row = block_index().x;
  const float* const z = p.z + row * p.stride;
  const i32 target = p.targets[row];
  const float top = p.max[row];
  const bool ignored = target == p.ignore_index;
  float sum = 0;
  for_packs<kAligned>(z, ignored ? 0 : p.V, [&](const float(&x)[8]) {
    // Beyond the end of the row, -inf - top is -inf, or NaN if no logit is finite, like those of the row.
    float part = 0;
    for (int e = 0; e < 8; ++e) part += exp_of(x[e] - top);
    sum += part;
  });
  sum = block_sum(sum, shared.part);
  const i64 own = target - p.first_id;
  float hit = ignored || own < 0 || own >= p.V ? 0 : z[own] - top;
  if (p.terms.smoothing > 0 && !ignored) {
    sync_block();  // the shared sums have been read
    hit = (1 - p.terms.smoothing) * hit + p.terms.each * block_sum(total_share<kAligned>(z, p.V, top), shared.part);
  }
  if (thread_index() != 0) return;
  p.sum[row] = sum;
  p.at_target[row] = hit;
}

template <class E>
struct GradArgs {
  float* losses;  // null: not wanted
  E* dz;          // null: not wanted
  i64 dz_stride;
  PartArgs part;
};

template <class E, bool kAligned>
__global__ void vocab_grad_kernel(GradArgs<E> a) {
  const PartArgs& p = a.part;
  const i64 row = block_index().x;
  const i32 target = p.targets[row];
  const bool ignored = target == p.ignore_index;
  const float sum = p.sum[row], top = p.max[row];
  if (thread_index() == 0 && a.losses != nullptr)
    a.losses[row] = ignored ? 0 : loss_of(sum, p.at_target[row], top, p.terms);
  if (a.dz == nullptr) return;
  E* const dz = a.dz + row * a.dz_stride;
  if (ignored) {
    write_zeros<E, kAligned>(dz, p.V);
  } else {
    write_gradient<E, kAligned>(dz, p.z + row * p.stride, p.V, top, sum, target - p.first_id, p.terms);
  }
}

PartArgs part_of(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                 const CrossEntropyParams& p) noexcept {
  return {.z = z.as<float>(),
          .stride = z.stride[0],
          .V = z.dim(1),
          .max = max.as<float>(),
          .targets = targets.as<i32>(),
          .first_id = first_id,
          .sum = sum.as<float>(),
          .at_target = at_target.as<float>(),
          .ignore_index = p.ignore_index,
          .terms = terms_of(p, p.vocab)};
}

Launch one_block_per_row(i64 rows, size_t shared_bytes) noexcept {
  return {.grid = dim3(static_cast<unsigned>(rows)), .block = kBlock, .shared_bytes = shared_bytes};
}

// ---- a whole vocabulary ----

// Rows of logits at distance `stride`, as many as fit the workspace.
struct Layout {
  i64 rows, stride;
};
Layout layout_of(const TensorView& logits, i64 rows, i64 V) noexcept {
  // A vocabulary such as 50257 would leave rows unaligned and their products slow. Therefore use fewer rows with a few
  // unused elements between them, unless there are so few rows that this wastes too much.
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
  do {  // at least once: without tokens dweight and dbias are zero
    const i64 rows = std::min(layout.rows, T - begin);
    TensorView z = TensorView::of(logits.data, DType::F32, {rows, V});
    z.stride[0] = layout.stride;
    const TensorView dz = gradient_rows(z, h.dtype);
    matmul(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true}, stream);
    const RowArgs args{.logits = z.as<float>(),
                       .stride = layout.stride,
                       .V = V,
                       .targets = targets.as<i32>() + begin,
                       .losses = losses.as<float>() + begin,
                       .ignore_index = p.ignore_index,
                       .terms = terms_of(p, V),
                       .gradient = dh || dweight || dbias};
    const Launch grid = one_block_per_row(rows, sizeof(RowShared));
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
    if (dbias) column_sum(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

void vocab_max(TensorView max, TensorView z, Stream& stream) noexcept {
  Context& c = context(stream);
  const Launch grid = one_block_per_row(z.dim(0), sizeof(PartShared));
  const bool aligned = aligned_rows(z.as<float>(), z.stride[0], z.dim(0));
  launch(aligned ? vocab_max_kernel<true> : vocab_max_kernel<false>, grid, c.stream(), max.as<float>(), z.as<float>(),
         z.stride[0], z.dim(1));
  c.check(cudaGetLastError(), "vocab_max");
}

void vocab_sums(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                const CrossEntropyParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  const Launch grid = one_block_per_row(z.dim(0), sizeof(PartShared));
  const bool aligned = aligned_rows(z.as<float>(), z.stride[0], z.dim(0));
  launch(aligned ? vocab_sums_kernel<true> : vocab_sums_kernel<false>, grid, c.stream(),
         part_of(sum, at_target, z, max, targets, first_id, p));
  c.check(cudaGetLastError(), "vocab_sums");
}

void vocab_grad(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                TensorView targets, i64 first_id, const CrossEntropyParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = z.dim(0);
  with_work_type(dz ? dz.dtype : DType::F32, [&]<class E>(E) {
    const GradArgs<E> args{.losses = losses.as<float>(),
                           .dz = dz.as<E>(),
                           .dz_stride = dz.stride[0],
                           .part = part_of(sum, at_target, z, max, targets, first_id, p)};
    const bool aligned = aligned_rows(z.as<float>(), z.stride[0], R) && aligned_rows(dz.as<E>(), dz.stride[0], R);
    launch(aligned ? vocab_grad_kernel<E, true> : vocab_grad_kernel<E, false>, one_block_per_row(R, 0), c.stream(),
           args);
  });
  c.check(cudaGetLastError(), "vocab_grad");
}

}  // namespace ds::cuda
