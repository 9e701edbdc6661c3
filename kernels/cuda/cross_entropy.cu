// SPDX-License-Identifier: Apache-2.0
// Linear layer and softmax cross-entropy, a chunk of tokens at a time: logits in fp32 or the work dtype, then each row
// becomes, in place, a row of its gradient in the work dtype, which both backward products read. A row that fits the
// shared memory of a block is read from device memory once. A vocabulary in parts takes the same steps, one op for
// each.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/context.h"
#include "cuda/cross_entropy_plan.h"
#include "cuda/logits.h"
#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "cuda/scratch_plan.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kBlock = kSoftmaxBlock, kWarps = kBlock / kWarp;
constexpr int kPacks = 4;              // of eight logits, per thread at a time
constexpr int kStep = kBlock * 8;      // logits from one pack of a thread to its next
constexpr i64 kTile = kPacks * kStep;  // logits per block at a time

constexpr float kLowest = -std::numeric_limits<float>::infinity();

DS_DEVICE float exp_of(float x) { return fast_exp2(x * 1.4426950409f); }

// The logits of a row, by tiles. A thread has the same packs of every tile, wherever they are.
//   arrive(tile)  all threads call it before the first load of a tile, in ascending order
//   load          x = the packs of this thread; `rest` beyond the end of the row
//   at(j)         one logit, after a barrier that follows the arrival of all tiles
//   leave(tile)   all threads call it after their last load of a tile and before they store results of it, in ascending
//                 order. The results may be stored over the logits in device memory, below all that are still to be
//                 read.

// In device memory. Z: type of the logits, here and below.
template <bool kAligned, class Z>
struct RowInMemory {
  const Z* z;
  i64 V;

  DS_DEVICE void arrive(i64) const {}
  DS_DEVICE void load(float (&x)[kPacks][8], i64 tile, float rest) const {
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + thread_index() * 8 + i * kStep;
      load_some(x[i], z + j, V - j, kAligned, rest);
    }
  }
  DS_DEVICE float at(i64 j) const { return ds::cuda::load(z + j); }
  DS_DEVICE void leave(i64) const { sync_block(); }
};

// In shared memory, where each tile that is left makes room for that of the next row. A warp copies what its own
// threads load, so that only they wait for it.
template <class Z>
struct RowInShared {
  static constexpr int kEach = kPack<Z>;    // logits in 16 bytes
  static constexpr int kSides = 8 / kEach;  // 16-byte parts of a pack

  Z* kept;
  int V;
  const Z* next;  // in device memory; null: there is none

  // The place of part `unit` of a row. Threads load packs; if these are twice as long as a part, adjacent threads would
  // collide in the banks of shared memory if every other four packs were not stored with their halves swapped.
  static DS_DEVICE int place(int unit) { return kEach * (kSides == 1 ? unit : unit ^ (unit >> 3 & 1)); }

  // Starts the copy of a tile of the next row.
  DS_DEVICE void fetch(i64 tile) const {
    if (next != nullptr) {
      const int first =
          static_cast<int>(tile) / kEach + thread_index() / kWarp * kWarp * kSides + thread_index() % kWarp;
      DS_UNROLL
      for (int i = 0; i < kSides * kPacks; ++i) {
        const int unit = first + i / kSides * (kStep / kEach) + i % kSides * kWarp;
        if (kEach * unit < V) copy_async_16(kept + place(unit), next + kEach * unit, true);
      }
    }
    copies_commit();
  }

  DS_DEVICE void arrive(i64 tile) const {
    switch ((V - 1 - tile) / kTile) {  // later tiles
      case 0: copies_wait<0>(); break;
      case 1: copies_wait<1>(); break;
      case 2: copies_wait<2>(); break;
      default: copies_wait<3>(); break;
    }
    sync_warp();
  }
  DS_DEVICE void load(float (&x)[kPacks][8], i64 tile, float rest) const {
    DS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int j = static_cast<int>(tile) + thread_index() * 8 + i * kStep, count = V - j;
      float part[kSides][kEach] = {};
      DS_UNROLL
      for (int side = 0; side < kSides; ++side) {
        if (count > 0) load16(part[side], kept + place(j / kEach + side));
      }
      DS_UNROLL
      for (int e = 0; e < 8; ++e) x[i][e] = part[e / kEach][e % kEach];
      if (count >= 8) continue;
      DS_UNROLL
      for (int e = 0; e < 8; ++e) x[i][e] = e < count ? x[i][e] : rest;
    }
  }
  DS_DEVICE float at(i64 j) const { return ds::cuda::load(kept + place(static_cast<int>(j / kEach)) + j % kEach); }
  DS_DEVICE void leave(i64 tile) const {
    sync_warp();
    fetch(tile);
  }
};

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
// position of the target and `own_logit` its logit, or any position outside. dz may start at the same address as the
// row in device memory.
template <class E, bool kAligned, class Row>
DS_DEVICE void write_gradient(E* dz, const Row& row, float top, float sum, i64 own, float own_logit,
                              const LossTerms& t) {
  const float of_softmax = t.z_loss == 0 ? 1.0f : 1 + 2 * t.z_loss * (top + std::log(sum));
  const float scale = t.grad_scale * of_softmax / sum, less = t.grad_scale * t.each;
  const float at_own = t.grad_scale * (of_softmax * exp_of(own_logit - top) / sum - (1 - t.smoothing) - t.each);
  for (i64 tile = 0; tile < row.V; tile += kTile) {
    float x[kPacks][8];
    row.load(x, tile, 0);
    row.leave(tile);
    DS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + thread_index() * 8 + i * kStep;
      DS_UNROLL
      for (int e = 0; e < 8; ++e) x[i][e] = j + e == own ? at_own : exp_of(x[i][e] - top) * scale - less;
      store_some(dz + j, x[i], row.V - j, kAligned);
    }
  }
}
template <class E, bool kAligned>
DS_DEVICE void write_zeros(E* dz, i64 V) {
  const float zeros[8] = {};
  for (i64 j = thread_index() * 8; j < V; j += kStep) store_some(dz + j, zeros, V - j, kAligned);
}

template <class Z>
struct RowArgs {
  Z* logits;
  i64 rows, stride, V;
  const i32* targets;
  float* losses;
  i32 ignore_index;
  LossTerms terms;
  bool gradient;

  DS_DEVICE bool ignored(i64 row) const { return targets[row] == ignore_index; }
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
template <class Row>
DS_DEVICE float total_share(const Row& row, float top) {
  float total = 0;
  for (i64 tile = 0; tile + thread_index() * 8 < row.V; tile += kTile) {
    float x[kPacks][8];
    row.load(x, tile, top);
    for (int i = 0; i < kPacks; ++i) {
      float part = 0;
      for (int e = 0; e < 8; ++e) part += x[i][e] - top;
      total += part;
    }
  }
  return total;
}

// losses[r] and, with `gradient`, the gradient of type E in place of row r, of which `row` are the logits.
template <class E, bool kAligned, class Z, class Row>
DS_DEVICE void softmax_row(const RowArgs<Z>& p, i64 r, const Row& row, SoftmaxSums& shared) {
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  E* const dz = reinterpret_cast<E*>(p.logits + r * p.stride);
  const i64 target = p.targets[r];
  if (p.ignored(r)) {
    if (thread_index() == 0) p.losses[r] = 0;
    if (p.gradient) write_zeros<E, kAligned>(dz, p.V);
    return;
  }

  // Maximum and sum of exponentials in one pass: the sum is rescaled when a tile raises the maximum. NaN is never the
  // maximum, but reaches the sum.
  float top = kLowest, sum = 0;
  for (i64 tile = 0; tile < p.V; tile += kTile) {
    row.arrive(tile);
    if (tile + thread_index() * 8 >= p.V) continue;
    float x[kPacks][8];
    row.load(x, tile, kLowest);
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
  const float own_logit = row.at(target);  // while all threads are in this row
  float row_top = kLowest;
  for (int w = 0; w < kWarps; ++w) row_top = shared.top[w] > row_top ? shared.top[w] : row_top;
  const float warp_total = warp_sum(sum * exp_of(top - (row_top == kLowest ? 0 : row_top)));
  if (lane == 0) shared.sum[warp] = warp_total;
  sync_block();
  float row_sum = 0;
  for (int w = 0; w < kWarps; ++w) row_sum += shared.sum[w];
  if (row_top == kLowest) row_sum = std::numeric_limits<float>::quiet_NaN();  // no finite logit: inf - inf
  const LossTerms& terms = p.terms;
  float at_target = own_logit - row_top;
  if (terms.smoothing > 0) {
    sync_block();  // the shared sums have been read
    const float all = block_sum(total_share(row, row_top), shared.sum);
    at_target = (1 - terms.smoothing) * at_target + terms.each * all;
  }
  if (thread_index() == 0) p.losses[r] = loss_of(row_sum, at_target, row_top, terms);
  if (p.gradient) write_gradient<E, kAligned>(dz, row, row_top, row_sum, target, own_logit, terms);
}

// A block for each row, which stays in device memory.
template <class E, bool kAligned, class Z>
__global__ void softmax_row_kernel(RowArgs<Z> p) {
  const i64 r = block_index().x;
  const RowInMemory<kAligned, Z> row{p.logits + r * p.stride, p.V};
  softmax_row<E, kAligned>(p, r, row, block_shared<SoftmaxSums>());
}

// A block for several rows, which come to shared memory one after the other.
template <class E, class Z>
__global__ void __launch_bounds__(kBlock, kKeptBlocks) kept_rows_kernel(RowArgs<Z> p) {
  SoftmaxSums& shared = block_shared<SoftmaxSums>();
  const i64 blocks = grid_size().x;
  // The logits of an ignored row are not needed.
  const auto source = [&](i64 r) { return r < p.rows && !p.ignored(r) ? p.logits + r * p.stride : nullptr; };
  RowInShared<Z> row{reinterpret_cast<Z*>(&shared + 1), static_cast<int>(p.V), source(block_index().x)};
  for (i64 tile = 0; tile < p.V; tile += kTile) row.fetch(tile);
  for (i64 r = block_index().x; r < p.rows; r += blocks) {
    row.next = source(r + blocks);
    softmax_row<E, true>(p, r, row, shared);
    if (p.gradient && !p.ignored(r)) continue;  // the gradient has left the tiles
    for (i64 tile = 0; tile < p.V; tile += kTile) row.leave(tile);
  }
}

// ---- a vocabulary in parts ----

struct PartShared {
  float part[kWarps];
};

// Calls f(x) for all logits of a row in packs of eight; beyond its end they are -inf.
template <bool kAligned, class Z, class F>
DS_DEVICE void for_packs(const Z* z, i64 V, F&& f) {
  for (i64 tile = thread_index() * 8; tile < V; tile += kTile) {
    float x[kPacks][8];
    for (int i = 0; i < kPacks; ++i) {
      const i64 j = tile + i * kBlock * 8;
      load_some(x[i], z + j, V - j, kAligned, kLowest);
    }
    for (int i = 0; i < kPacks; ++i) f(x[i]);
  }
}

template <bool kAligned, class Z>
__global__ void vocab_max_kernel(float* max, const Z* z, i64 stride, i64 V) {
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

template <class Z>
struct PartArgs {
  const Z* z;
  i64 stride, V;
  const float* max;
  const i32* targets;
  i64 first_id;
  float *sum, *at_target;
  i32 ignore_index;
  LossTerms terms;
};

template <bool kAligned, class Z>
__global__ void vocab_sums_kernel(PartArgs<Z> p) {
  PartShared& shared = block_shared<PartShared>();
  const i64 row = block_index().x;
  const Z* const z = p.z + row * p.stride;
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
  float hit = ignored || own < 0 || own >= p.V ? 0 : load(z + own) - top;
  if (p.terms.smoothing > 0 && !ignored) {
    sync_block();  // the shared sums have been read
    hit = (1 - p.terms.smoothing) * hit +
          p.terms.each * block_sum(total_share(RowInMemory<kAligned, Z>{z, p.V}, top), shared.part);
  }
  if (thread_index() != 0) return;
  p.sum[row] = sum;
  p.at_target[row] = hit;
}

template <class E, class Z>
struct GradArgs {
  float* losses;  // null: not wanted
  E* dz;          // null: not wanted
  i64 dz_stride;
  PartArgs<Z> part;
};

template <class E, bool kAligned, class Z>
__global__ void vocab_grad_kernel(GradArgs<E, Z> a) {
  const PartArgs<Z>& p = a.part;
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
    const RowInMemory<kAligned, Z> z{p.z + row * p.stride, p.V};
    const i64 own = target - p.first_id;
    write_gradient<E, kAligned>(dz, z, top, sum, own, own >= 0 && own < p.V ? z.at(own) : top, p.terms);
  }
}

template <class Z>
PartArgs<Z> part_of(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets,
                    i64 first_id, const CrossEntropyParams& p) noexcept {
  return {.z = z.as<Z>(),
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

// Calls f(E{}, Z{}) with the types of the gradients and of the logits: fp32, or the same.
template <class F>
void with_types(DType gradient, DType logits, F&& f) noexcept {
  with_work_type(gradient, [&]<class E>(E) { logits == DType::F32 ? f(E{}, float{}) : f(E{}, E{}); });
}

// Losses and gradients of logits as the ops for parts of a vocabulary compute them.
void losses_by_row(TensorView losses, TensorView dz, TensorView z, TensorView targets, CrossEntropyParams p,
                   Stream& stream) noexcept {
  const i64 rows = z.dim(0);
  if (rows == 0) return;
  void* const stats = context(stream).scratch(static_cast<size_t>(scratch::row_stats_bytes(rows)));
  if (stats == nullptr) return;
  const auto stat = [&](i64 i) { return TensorView::of(static_cast<float*>(stats) + i * rows, DType::F32, {rows}); };
  p.vocab = z.dim(1);
  vocab_max(stat(0), z, stream);
  vocab_sums(stat(1), stat(2), z, stat(0), targets, 0, p, stream);
  vocab_grad(losses, dz, z, stat(1), stat(2), stat(0), targets, 0, p, stream);
}

}  // namespace

// ---- a whole vocabulary ----

void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 T = h.dim(0), V = weight.dim(0);
  Context& ctx = context(stream);
  const LogitsLayout layout = LogitsLayout::of(logits, p.chunk_tokens, V);
  i64 begin = 0;
  do {  // at least once: without tokens dweight and dbias are zero
    const i64 rows = std::min(layout.rows, T - begin);
    TensorView z = TensorView::of(logits.data, logits.dtype, {rows, V});
    z.stride[0] = layout.stride;
    const TensorView dz = gradient_rows(z, h.dtype);
    matmul(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true, .rowwise = p.rowwise}, stream);
    const bool gradient = dh || dweight || dbias;
    if (p.rowwise) {
      losses_by_row(losses.rows(begin, rows), gradient ? dz : TensorView{}, z, targets.rows(begin, rows), p, stream);
    } else {
      with_types(h.dtype, logits.dtype, [&]<class E, class Z>(E, Z) {
        const bool aligned = aligned_rows(z.as<Z>(), layout.stride, rows);
        const RowArgs<Z> args{.logits = z.as<Z>(),
                              .rows = rows,
                              .stride = layout.stride,
                              .V = V,
                              .targets = targets.as<i32>() + begin,
                              .losses = losses.as<float>() + begin,
                              .ignore_index = p.ignore_index,
                              .terms = terms_of(p, V),
                              .gradient = gradient};
        const SoftmaxPlan plan = SoftmaxPlan::of(rows, layout.stride, V, sizeof(Z), gradient || p.label_smoothing > 0,
                                                 aligned, ctx.most_shared_bytes(), ctx.num_multiprocessors());
        launch(plan.kept ? kept_rows_kernel<E, Z>
               : aligned ? softmax_row_kernel<E, true, Z>
                         : softmax_row_kernel<E, false, Z>,
               one_block_per_row(plan.blocks, plan.shared_bytes), ctx.stream(), args);
      });
    }
    ctx.check(cudaGetLastError(), "linear_cross_entropy");
    if (dh) matmul(dh.rows(begin, rows), dz, weight, {}, {}, {}, {}, stream);
    if (dweight) {
      matmul(dweight, dz, h.rows(begin, rows), {}, {}, {}, {.trans_a = true, .accumulate = p.add_dweight || begin > 0},
             stream);
    }
    if (dbias) column_sum(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

void vocab_max(TensorView max, TensorView z, Stream& stream) noexcept {
  Context& c = context(stream);
  const Launch grid = one_block_per_row(z.dim(0), sizeof(PartShared));
  with_work_type(z.dtype, [&]<class Z>(Z) {
    const bool aligned = aligned_rows(z.as<Z>(), z.stride[0], z.dim(0));
    launch(aligned ? vocab_max_kernel<true, Z> : vocab_max_kernel<false, Z>, grid, c.stream(), max.as<float>(),
           z.as<Z>(), z.stride[0], z.dim(1));
  });
  c.check(cudaGetLastError(), "vocab_max");
}

void vocab_sums(TensorView sum, TensorView at_target, TensorView z, TensorView max, TensorView targets, i64 first_id,
                const CrossEntropyParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  const Launch grid = one_block_per_row(z.dim(0), sizeof(PartShared));
  with_work_type(z.dtype, [&]<class Z>(Z) {
    const bool aligned = aligned_rows(z.as<Z>(), z.stride[0], z.dim(0));
    launch(aligned ? vocab_sums_kernel<true, Z> : vocab_sums_kernel<false, Z>, grid, c.stream(),
           part_of<Z>(sum, at_target, z, max, targets, first_id, p));
  });
  c.check(cudaGetLastError(), "vocab_sums");
}

void vocab_grad(TensorView losses, TensorView dz, TensorView z, TensorView sum, TensorView at_target, TensorView max,
                TensorView targets, i64 first_id, const CrossEntropyParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = z.dim(0);
  with_types(dz ? dz.dtype : z.dtype, z.dtype, [&]<class E, class Z>(E, Z) {
    const GradArgs<E, Z> args{.losses = losses.as<float>(),
                              .dz = dz.as<E>(),
                              .dz_stride = dz.stride[0],
                              .part = part_of<Z>(sum, at_target, z, max, targets, first_id, p)};
    const bool aligned = aligned_rows(z.as<Z>(), z.stride[0], R) && aligned_rows(dz.as<E>(), dz.stride[0], R);
    launch(aligned ? vocab_grad_kernel<E, true, Z> : vocab_grad_kernel<E, false, Z>, one_block_per_row(R, 0),
           c.stream(), args);
  });
  c.check(cudaGetLastError(), "vocab_grad");
}

}  // namespace ds::cuda
