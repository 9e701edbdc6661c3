// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm. A group of threads owns a row and keeps it in registers, so each direction reads and writes
// memory once. The gradients of weight and bias are summed per strip of rows, each thread's own columns in registers,
// and a second kernel folds the strips in order. The assignment of rows to threads and the number of strips depend only
// on R and C, never on the device, and so do the bits. Rows too long for registers are read several times.

#include "cuda/elementwise.h"
#include "cuda/scratch_plan.h"

namespace ds::cuda {
namespace {

using Plan = scratch::NormPlan;
using Strips = scratch::NormStrips;
using scratch::norm_backward_plan, scratch::norm_group;

constexpr int kForwardPacks = 4, kForwardThreads = 512;
constexpr int kBackwardPacks = scratch::kNormBackwardPacks, kBackwardThreads = scratch::kNormBackwardThreads;
constexpr int kShortThreads = scratch::kNormShortThreads;
constexpr int kLongThreads = 1024;

constexpr Plan forward_plan(i64 C, int width) noexcept {
  constexpr int kThreads = 128;
  const int packs = C <= width * kWarp ? 1 : kForwardPacks;
  if (C > i64{width} * packs * kForwardThreads) return {};
  const int group = norm_group(C, width * packs);
  return {group, packs, std::max(1, kThreads / group)};
}

// The sums of a group, on all of its threads, in a fixed order. All threads of the block must call this together;
// `turn` counts the calls.
struct GroupSums {
  float2 of_warp[2][kLongThreads / kWarp];
};
DS_DEVICE float2 group_sum(float2 x, int group, GroupSums& shared, int turn) {
  DS_UNROLL for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    if (mask < group) x.x += warp_shuffle_xor(x.x, mask), x.y += warp_shuffle_xor(x.y, mask);
  }
  if (group <= kWarp) return x;
  // Two sets of slots alternate: a thread that writes one again has passed a barrier after all had read it.
  float2* const slots = shared.of_warp[turn & 1];
  const int warp = thread_index() / kWarp, warps = group / kWarp, first = warp / warps * warps;
  if (thread_index() % kWarp == 0) slots[warp] = x;
  sync_block();
  x = slots[first];
  for (int w = 1; w < warps; ++w) x.x += slots[first + w].x, x.y += slots[first + w].y;
  return x;
}
DS_DEVICE float group_sum(float x, int group, GroupSums& shared, int turn) {
  return group_sum(make_float2(x, 0), group, shared, turn).x;
}

// A pack of a row of C elements; no elements if C is 0. Aligned rows consist of whole packs.
template <bool kAligned, class T, int kWidth>
DS_DEVICE void load_part(Pack<T, kWidth>& pack, const T* row, int first, int C) {
  if (!kAligned || first >= C) {
    pack.load_some(row, first, 0, kAligned ? 0 : C);
  } else {
    pack.load(row + first);
  }
}
template <bool kAligned, class T, int kWidth>
DS_DEVICE void store_part(const Pack<T, kWidth>& pack, T* row, int first, int C) {
  if (!kAligned) {
    pack.store_some(row, first, 0, C);
  } else if (first < C) {
    pack.store(row + first);
  }
}

template <class T>
struct ForwardArgs {
  T* y;
  float *mean, *rstd;
  const T *x, *weight, *bias;
  i64 R, C;
  float inv_C, eps;
  int group, rows;
};

template <class T, bool kCentred, bool kAligned, int kPacks>
__global__ void __launch_bounds__(kForwardThreads) forward_kernel(ForwardArgs<T> a) {
  constexpr int kWidth = kPack<T>;
  auto& shared = block_shared<GroupSums>();
  const int row_lane = thread_index() / a.group, lane = thread_index() % a.group;
  const i64 r = i64{block_index().x} * a.rows + row_lane;
  const int C = r < a.R ? static_cast<int>(a.C) : 0, first = lane * kWidth, step = a.group * kWidth;

  Pack<T, kWidth> raw[kPacks];
  float x[kPacks][kWidth];
  DS_UNROLL for (int p = 0; p < kPacks; ++p) load_part<kAligned>(raw[p], a.x + r * a.C, first + p * step, C);
  DS_UNROLL for (int p = 0; p < kPacks; ++p) raw[p].get(x[p]);

  float mean = 0, squares = 0;
  if constexpr (kCentred) {
    float sum = 0;
    DS_UNROLL for (int p = 0; p < kPacks; ++p) { DS_UNROLL for (int e = 0; e < kWidth; ++e) sum += x[p][e]; }
    mean = group_sum(sum, a.group, shared, 0) * a.inv_C;
  }
  DS_UNROLL for (int p = 0; p < kPacks; ++p) {
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      x[p][e] = first + p * step + (kAligned ? 0 : e) < C ? x[p][e] - mean : 0.0f;
      squares = std::fma(x[p][e], x[p][e], squares);
    }
  }
  const float rstd = reciprocal_sqrt(std::fma(group_sum(squares, a.group, shared, 1), a.inv_C, a.eps));
  if (lane == 0 && C > 0) {
    if constexpr (kCentred) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
  DS_UNROLL for (int p = 0; p < kPacks; ++p) {
    const int at = first + p * step;
    float w[kWidth], b[kWidth];
    load_part<kAligned>(raw[p], a.weight, at, C);
    raw[p].get(w);
    if constexpr (kCentred) {
      load_part<kAligned>(raw[p], a.bias, at, C);
      raw[p].get(b);
    }
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      const float xhat = x[p][e] * rstd;
      x[p][e] = kCentred ? std::fma(xhat, w[e], b[e]) : xhat * w[e];
    }
    raw[p].set(x[p]);
    store_part<kAligned>(raw[p], a.y + r * a.C, at, C);
  }
}

// One block per row, which is read once per sum and once for the result.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kLongThreads) long_forward_kernel(ForwardArgs<T> a) {
  auto& shared = block_shared<GroupSums>();
  const i64 r = block_index().x;
  const T* const x = a.x + r * a.C;
  T* const y = a.y + r * a.C;
  float mean = 0, squares = 0;
  if constexpr (kCentred) {
    float sum = 0;
    for (i64 c = thread_index(); c < a.C; c += kLongThreads) sum += load(x + c);
    mean = group_sum(sum, kLongThreads, shared, 0) * a.inv_C;
  }
  for (i64 c = thread_index(); c < a.C; c += kLongThreads) {
    const float d = load(x + c) - mean;
    squares = std::fma(d, d, squares);
  }
  const float rstd = reciprocal_sqrt(std::fma(group_sum(squares, kLongThreads, shared, 1), a.inv_C, a.eps));
  if (thread_index() == 0) {
    if constexpr (kCentred) a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
  for (i64 c = thread_index(); c < a.C; c += kLongThreads) {
    const float xhat = (load(x + c) - mean) * rstd, w = load(a.weight + c);
    store(y + c, kCentred ? std::fma(xhat, w, load(a.bias + c)) : xhat * w);
  }
}

template <bool kCentred>
void norm_fwd(const char* name, TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight,
              TensorView bias, float eps, Stream& s) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  Context& c = context(s);
  with_work_type(x.dtype, [&]<class T>(T) {
    const Plan plan = forward_plan(C, kPack<T>);
    const ForwardArgs<T> args{y.as<T>(),
                              mean.as<float>(),
                              rstd.as<float>(),
                              x.as<T>(),
                              weight.as<T>(),
                              bias.as<T>(),
                              R,
                              C,
                              1.0f / static_cast<float>(C),
                              eps,
                              plan.group,
                              plan.rows};
    if (plan.packs == 0) {
      launch(long_forward_kernel<T, kCentred>, {dim3(static_cast<unsigned>(R)), kLongThreads, sizeof(GroupSums)},
             c.stream(), args);
      return;
    }
    const auto go = [&](auto kernel) {
      launch(kernel, {dim3(static_cast<unsigned>(ceil_div(R, plan.rows))), plan.block(), sizeof(GroupSums)}, c.stream(),
             args);
    };
    const bool aligned = C % kPack<T> == 0 && all_aligned(16, {y.data, x.data, weight.data, bias.data}),
               one = plan.packs == 1;
    if (aligned) {
      one ? go(forward_kernel<T, kCentred, true, 1>) : go(forward_kernel<T, kCentred, true, kForwardPacks>);
    } else {
      one ? go(forward_kernel<T, kCentred, false, 1>) : go(forward_kernel<T, kCentred, false, kForwardPacks>);
    }
  });
  c.check(cudaGetLastError(), name);
}

template <class T>
struct BackwardArgs {
  T* dx;
  const T *dy, *residual, *x, *weight;
  const float *mean, *rstd;
  float* partial;  // [strip][dweight, dbias][C]
  i64 R, C, strip_rows;
  float inv_C;
  int group, rows;
};

struct BackwardShared {
  GroupSums sums;
  float columns[kPack<bf16> * kShortThreads];  // one pack per thread
};

// dx of one element: from xhat and g = dy weight, the row means of g and g xhat, and the residual's gradient.
DS_DEVICE float dx_of(float g, float xhat, float rstd, float mean_g, float mean_gx, float residual) {
  return std::fma(rstd, g - std::fma(xhat, mean_gx, mean_g), residual);
}

// The data that a thread reads of a row before its sums.
template <class T, bool kCentred, bool kAligned, int kPacks>
struct BackwardRow {
  Pack<T, kPack<T>> dy[kPacks], x[kPacks];
  float mean, rstd;

  // C: 0 past the end; then nothing is read and everything is zero.
  DS_DEVICE void load(const BackwardArgs<T>& a, i64 r, int first, int step, int C) {
    DS_UNROLL for (int p = 0; p < kPacks; ++p) {
      load_part<kAligned>(dy[p], a.dy + r * a.C, first + p * step, C);
      load_part<kAligned>(x[p], a.x + r * a.C, first + p * step, C);
    }
    mean = kCentred && C > 0 ? a.mean[r] : 0.0f;
    rstd = C > 0 ? a.rstd[r] : 0.0f;
  }
};

// A block processes its strip, `rows` rows at a time, with the next ones in flight while it sums these.
template <class T, bool kCentred, bool kAligned, int kPacks>
__global__ void __launch_bounds__(kPacks == 1 ? kShortThreads : kBackwardThreads, kPacks == 1 && kAligned ? 2 : 1)
    backward_kernel(BackwardArgs<T> a) {
  constexpr int kWidth = kPack<T>;
  auto& shared = block_shared<BackwardShared>();
  const int row_lane = thread_index() / a.group, lane = thread_index() % a.group;
  const int first = lane * kWidth, step = a.group * kWidth;
  const i64 begin = i64{block_index().x} * a.strip_rows, end = std::min(begin + a.strip_rows, a.R);
  const auto columns = [&](i64 r) { return r < end ? static_cast<int>(a.C) : 0; };

  Pack<T, kWidth> weight[kPacks];
  DS_UNROLL for (int p = 0; p < kPacks; ++p)
      load_part<kAligned>(weight[p], a.weight, first + p * step, static_cast<int>(a.C));
  float dweight[kPacks][kWidth] = {}, dbias[kPacks][kWidth] = {};

  BackwardRow<T, kCentred, kAligned, kPacks> row, next;
  if (kAligned) row.load(a, begin + row_lane, first, step, columns(begin + row_lane));
  int turn = 0;
  for (i64 base = begin; base < end; base += a.rows) {
    const i64 r = base + row_lane;
    const int C = columns(r);
    Pack<T, kWidth> residual[kPacks];
    if (kAligned) {
      next.load(a, r + a.rows, first, step, columns(r + a.rows));
    } else {
      row.load(a, r, first, step, C);
    }
    if (a.residual != nullptr) {
      DS_UNROLL for (int p = 0; p < kPacks; ++p) {
        load_part<kAligned>(residual[p], a.residual + r * a.C, first + p * step, C);
      }
    }
    const float scale = row.rstd, shift = row.mean;
    float2 sums = make_float2(0, 0);
    DS_UNROLL for (int p = 0; p < kPacks; ++p) {
      float dy[kWidth], x[kWidth], w[kWidth];
      row.dy[p].get(dy);
      row.x[p].get(x);
      weight[p].get(w);
      DS_UNROLL for (int e = 0; e < kWidth; ++e) {
        const float xhat = (x[e] - shift) * scale, g = dy[e] * w[e];
        if constexpr (kCentred) sums.x += g, dbias[p][e] += dy[e];
        sums.y = std::fma(g, xhat, sums.y);
        dweight[p][e] = std::fma(dy[e], xhat, dweight[p][e]);
      }
    }
    sums = group_sum(sums, a.group, shared.sums, turn++);
    const float mean_g = sums.x * a.inv_C, mean_gx = sums.y * a.inv_C;
    DS_UNROLL for (int p = 0; p < kPacks; ++p) {
      float dy[kWidth], x[kWidth], w[kWidth], add[kWidth] = {};
      row.dy[p].get(dy);
      row.x[p].get(x);
      weight[p].get(w);
      if (a.residual != nullptr) residual[p].get(add);
      DS_UNROLL for (int e = 0; e < kWidth; ++e) {
        x[e] = dx_of(dy[e] * w[e], (x[e] - shift) * scale, scale, mean_g, mean_gx, add[e]);
      }
      row.x[p].set(x);
      store_part<kAligned>(row.x[p], a.dx + r * a.C, first + p * step, C);
    }
    if (kAligned) row = next;
  }

  // The row lanes of the block, in order; then to memory.
  constexpr int kParts = kCentred ? 2 : 1;
  DS_UNROLL for (int part = 0; part < kParts; ++part) {
    float(&sum)[kPacks][kWidth] = part == 0 ? dweight : dbias;
    if constexpr (kPacks == 1) {
      sync_block();
      DS_UNROLL for (int i = 0; i < kWidth; ++i) { shared.columns[i * block_size() + thread_index()] = sum[0][i]; }
      sync_block();
      if (row_lane != 0) continue;
      DS_UNROLL for (int i = 0; i < kWidth; ++i) {
        for (int k = 1; k < a.rows; ++k) sum[0][i] += shared.columns[i * block_size() + k * a.group + lane];
      }
    }
    float* const to = a.partial + (i64{block_index().x} * kParts + part) * a.C;
    DS_UNROLL for (int p = 0; p < kPacks; ++p) {
      DS_UNROLL for (int e = 0; e < kWidth; ++e) {
        if (first + p * step + e < a.C) to[first + p * step + e] = sum[p][e];
      }
    }
  }
}

// Rows too long for registers: first the sums over rows, one thread per column and strip.
template <class T, bool kCentred>
__global__ void __launch_bounds__(256) long_columns_kernel(BackwardArgs<T> a) {
  constexpr i64 kParts = kCentred ? 2 : 1;
  const i64 c = i64{block_index().x} * block_size() + thread_index(), strip = block_index().y;
  if (c >= a.C) return;
  const i64 begin = strip * a.strip_rows, end = std::min(begin + a.strip_rows, a.R);
  float dweight = 0, dbias = 0;
  for (i64 r = begin; r < end; ++r) {
    const float dy = load(a.dy + r * a.C + c), shift = kCentred ? a.mean[r] : 0.0f;
    dweight = std::fma(dy, (load(a.x + r * a.C + c) - shift) * a.rstd[r], dweight);
    dbias += dy;
  }
  a.partial[strip * kParts * a.C + c] = dweight;
  if constexpr (kCentred) a.partial[(strip * kParts + 1) * a.C + c] = dbias;
}

// Then dx, one block per row.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kLongThreads) long_backward_kernel(BackwardArgs<T> a) {
  auto& shared = block_shared<GroupSums>();
  const i64 r = block_index().x, row = r * a.C;
  const float shift = kCentred ? a.mean[r] : 0.0f, scale = a.rstd[r];
  float2 sums = make_float2(0, 0);
  for (i64 c = thread_index(); c < a.C; c += kLongThreads) {
    const float g = load(a.dy + row + c) * load(a.weight + c);
    if constexpr (kCentred) sums.x += g;
    sums.y = std::fma(g, (load(a.x + row + c) - shift) * scale, sums.y);
  }
  sums = group_sum(sums, kLongThreads, shared, 0);
  for (i64 c = thread_index(); c < a.C; c += kLongThreads) {
    const float g = load(a.dy + row + c) * load(a.weight + c), xhat = (load(a.x + row + c) - shift) * scale;
    const float add = a.residual != nullptr ? load(a.residual + row + c) : 0.0f;
    store(a.dx + row + c, dx_of(g, xhat, scale, sums.x * a.inv_C, sums.y * a.inv_C, add));
  }
}

// A block sums the strips of 32 columns: first slices of the strips, then the slices, both in order.
constexpr int kFoldSlices = 16;
struct FoldShared {
  float slice[kFoldSlices][kWarp];
};
template <class T>
struct FoldArgs {
  T *dweight, *dbias;
  const float* partial;
  i64 strips, C;
};
template <class T>
__global__ void __launch_bounds__(kFoldSlices* kWarp) fold_kernel(FoldArgs<T> a) {
  auto& shared = block_shared<FoldShared>();
  const int lane = thread_index() % kWarp, slice = thread_index() / kWarp;
  const i64 c = i64{block_index().x} * kWarp + lane, part = block_index().y, parts = grid_size().y;
  float sum = 0;
  if (c < a.C) {
    for (i64 strip = slice; strip < a.strips; strip += kFoldSlices) sum += a.partial[(strip * parts + part) * a.C + c];
  }
  shared.slice[slice][lane] = sum;
  sync_block();
  if (slice == 0 && c < a.C) {
    for (int k = 1; k < kFoldSlices; ++k) sum += shared.slice[k][lane];
    store((part == 0 ? a.dweight : a.dbias) + c, sum);
  }
}

template <bool kCentred>
void norm_bwd(const char* name, TensorView dx, TensorView dweight, TensorView dbias, TensorView dy,
              TensorView residual_grad, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
              Stream& s) noexcept {
  constexpr i64 kParts = kCentred ? 2 : 1;
  const i64 R = x.dim(0), C = x.dim(1);
  const Plan plan = norm_backward_plan(C, 16 / static_cast<int>(dtype_bytes(x.dtype)));
  const Strips strips = Strips::of(R, plan);
  Context& c = context(s);
  float* const partial = static_cast<float*>(c.scratch(static_cast<size_t>(strips.bytes(C, kParts))));
  if (partial == nullptr && strips.count > 0) return;

  with_work_type(x.dtype, [&]<class T>(T) {
    const BackwardArgs<T> args{dx.as<T>(),
                               dy.as<T>(),
                               residual_grad.as<T>(),
                               x.as<T>(),
                               weight.as<T>(),
                               mean.as<float>(),
                               rstd.as<float>(),
                               partial,
                               R,
                               C,
                               strips.rows,
                               1.0f / static_cast<float>(C),
                               plan.group,
                               plan.rows};
    if (plan.packs == 0) {
      const dim3 grid(static_cast<unsigned>(ceil_div(C, 256)), static_cast<unsigned>(strips.count));
      launch(long_columns_kernel<T, kCentred>, {grid, 256, 0}, c.stream(), args);
      launch(long_backward_kernel<T, kCentred>, {dim3(static_cast<unsigned>(R)), kLongThreads, sizeof(GroupSums)},
             c.stream(), args);
      return;
    }
    const auto go = [&](auto kernel, size_t shared_bytes) {
      launch(kernel, {dim3(static_cast<unsigned>(strips.count)), plan.block(), shared_bytes}, c.stream(), args);
    };
    const bool aligned =
        C % kPack<T> == 0 && all_aligned(16, {dx.data, dy.data, residual_grad.data, x.data, weight.data});
    const bool one = plan.packs == 1;
    constexpr size_t kBytes = sizeof(BackwardShared);
    if (aligned) {
      one ? go(backward_kernel<T, kCentred, true, 1>, kBytes)
          : go(backward_kernel<T, kCentred, true, kBackwardPacks>, kBytes);
    } else {
      one ? go(backward_kernel<T, kCentred, false, 1>, kBytes)
          : go(backward_kernel<T, kCentred, false, kBackwardPacks>, kBytes);
    }
  });
  with_work_type(dweight.dtype, [&]<class T>(T) {
    const dim3 grid(static_cast<unsigned>(ceil_div(C, kWarp)), static_cast<unsigned>(kParts));
    const FoldArgs<T> args{dweight.as<T>(), dbias.as<T>(), partial, strips.count, C};
    launch(fold_kernel<T>, {grid, kFoldSlices * kWarp, sizeof(FoldShared)}, c.stream(), args);
  });
  c.check(cudaGetLastError(), name);
}

}  // namespace

void layernorm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                   float eps, Stream& s) noexcept {
  norm_fwd<true>("layernorm_fwd", y, mean, rstd, x, weight, bias, eps, s);
}

void rmsnorm_fwd(TensorView y, TensorView rstd, TensorView x, TensorView weight, float eps, Stream& s) noexcept {
  norm_fwd<false>("rmsnorm_fwd", y, {}, rstd, x, weight, {}, eps, s);
}

void layernorm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                   TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream& s) noexcept {
  norm_bwd<true>("layernorm_bwd", dx, dweight, dbias, dy, residual_grad, x, weight, mean, rstd, s);
}

void rmsnorm_bwd(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                 TensorView weight, TensorView rstd, Stream& s) noexcept {
  norm_bwd<false>("rmsnorm_bwd", dx, dweight, {}, dy, residual_grad, x, weight, {}, rstd, s);
}

}  // namespace ds::cuda
