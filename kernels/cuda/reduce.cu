// SPDX-License-Identifier: Apache-2.0
// The fold of several sources, reductions of a whole tensor to numbers that stay on the device, and the verdict on
// them. Nothing here waits for the host: exponents and sums are read from device memory.

#include "cuda/context.h"
#include "cuda/scratch_plan.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

using scratch::kFoldSources, scratch::kSumTile;

constexpr int kThreads = scratch::kReduceThreads, kWarps = kThreads / kWarp;
constexpr int kInFlight = scratch::kReduceInFlight;
constexpr int kBlocksPerSm = 8;  // as many of these small kernels' blocks as a multiprocessor holds

i64 num_blocks(i64 packs, const Context& context) noexcept {
  return std::min(scratch::reduce_blocks(packs), i64{kBlocksPerSm} * context.num_multiprocessors());
}
Launch over(i64 blocks, size_t shared_bytes = 0) noexcept {
  return {dim3(static_cast<unsigned>(blocks)), kThreads, shared_bytes};
}

// Calls f(pack) for all packs of x[n] that belong to this thread; the last pack is padded with zeros.
template <class T, class F>
DS_DEVICE void for_packs(const T* x, i64 n, bool wide, F f) {
  constexpr int P = kPack<T>;
  const i64 step = i64{grid_size().x} * kThreads * P;
  for (i64 at = (i64{block_index().x} * kThreads + thread_index()) * P; at < n; at += kInFlight * step) {
    float packs[kInFlight][P];
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k) load_some(packs[k], x + at + k * step, n - at - k * step, wide);
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k) f(packs[k]);
  }
}

// ---- fold ----

// The pointers of one launch; a longer list takes several launches.
struct FoldSources {
  const void* data[kFoldSources];
  int count;
};

// dst = ((init + s0) + s1) + ...; init null: the fold starts with s0. Every thread reads its elements of all sources
// before it writes them, so dst may be any of the sources.
template <class T>
__global__ void fold_kernel(float* dst, const float* init, FoldSources sources, i64 n, bool wide) {
  constexpr int P = kPack<T>;
  const i64 at = (i64{block_index().x} * kThreads + thread_index()) * P;
  if (at >= n) return;
  float sum[P];
  int first = 0;
  if (init != nullptr) {
    load_some(sum, init + at, n - at, wide);
  } else {
    load_some(sum, static_cast<const T*>(sources.data[first++]) + at, n - at, wide);
  }
  for (; first + kInFlight <= sources.count; first += kInFlight) {
    float x[kInFlight][P];
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k)
      load_some(x[k], static_cast<const T*>(sources.data[first + k]) + at, n - at, wide);
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      DS_UNROLL
      for (int j = 0; j < P; ++j) sum[j] += x[k][j];
    }
  }
  for (; first < sources.count; ++first) {
    float x[P];
    load_some(x, static_cast<const T*>(sources.data[first]) + at, n - at, wide);
    DS_UNROLL
    for (int j = 0; j < P; ++j) sum[j] += x[j];
  }
  store_some(dst + at, sum, n - at, wide);
}

// ---- reductions ----

// i64 sum or maximum over a block; the result is thread 0's.
struct BlockNumbers {
  i64 of_warp[kWarps];
};
template <class F>
DS_DEVICE i64 block_reduce(i64 x, BlockNumbers& shared, F f) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = f(x, warp_shuffle_xor(x, mask));
  if (thread_index() % kWarp == 0) shared.of_warp[thread_index() / kWarp] = x;
  sync_block();
  x = shared.of_warp[0];
  for (int w = 1; w < kWarps; ++w) x = f(x, shared.of_warp[w]);
  sync_block();
  return x;
}
DS_DEVICE i64 block_sum(i64 x, BlockNumbers& shared) {
  return block_reduce(x, shared, [](i64 a, i64 b) { return a + b; });
}

template <class T>
__global__ void max_abs_kernel(i64* result, const T* x, i64 n, bool wide) {
  u32 largest = 0;
  for_packs(x, n, wide, [&](const float(&pack)[kPack<T>]) {
    DS_UNROLL
    for (int j = 0; j < kPack<T>; ++j) {
      const u32 bits = std::bit_cast<u32>(pack[j]) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
    }
  });
  const i64 found =
      block_reduce(i64{largest}, block_shared<BlockNumbers>(), [](i64 a, i64 b) { return a > b ? a : b; });
  if (thread_index() == 0) atomic_max(result, found);
}

// One warp per row.
template <class T>
__global__ void nonzero_rows_kernel(u8* flags, const T* x, i64 R, i64 C, bool wide) {
  constexpr int P = kPack<T>;
  const i64 warps = i64{grid_size().x} * kWarps, lane = thread_index() % kWarp;
  for (i64 r = i64{block_index().x} * kWarps + thread_index() / kWarp; r < R; r += warps) {
    u32 any = 0;
    for (i64 c = lane * P; c < C; c += kWarp * P) {
      float pack[P];
      load_some(pack, x + r * C + c, C - c, wide);
      DS_UNROLL
      for (int j = 0; j < P; ++j) any |= std::bit_cast<u32>(pack[j]) & 0x7FFFFFFFu;
    }
    const u32 found = warp_ballot(any != 0);
    if (lane == 0) flags[r] = found != 0 ? 1 : 0;
  }
}

// Each block stores its sum in `partials`. Squares are integers below 2^50, rounded once: adding 2^52 leaves the
// integer, rounded to even, in the low bits of the mantissa.
template <class T>
__global__ void sum_squares_kernel(ExactSum* partials, const T* x, i64 n, const i64* max_abs, bool wide) {
  const u32 max_bits = static_cast<u32>(*max_abs);
  if (max_bits >= 0x7F800000u) return;
  // 2^(25 - exponent), built from its bits.
  const double scale = std::bit_cast<double>(static_cast<i64>(1023 + 25 - ExactSum::exponent_of(max_bits)) << 52);
  ExactSum sum;
  for_packs(x, n, wide, [&](const float(&pack)[kPack<T>]) {
    i64 units = 0;
    DS_UNROLL
    for (int j = 0; j < kPack<T>; ++j) {
      const double scaled = static_cast<double>(pack[j]) * scale;
      units += std::bit_cast<i64>(std::fma(scaled, scaled, 0x1p52)) - std::bit_cast<i64>(0x1p52);
    }
    sum.hi += units >> 32;
    sum.lo += units & 0xFFFFFFFF;
  });
  BlockNumbers& shared = block_shared<BlockNumbers>();
  sum.hi = block_sum(sum.hi, shared);
  sum.lo = block_sum(sum.lo, shared);
  if (thread_index() == 0) partials[block_index().x] = sum;
}

__global__ void add_squares_kernel(i64* result, const ExactSum* partials, i64 count, const i64* max_abs) {
  if (static_cast<u32>(*max_abs) >= 0x7F800000u) return;
  ExactSum sum;
  for (i64 i = thread_index(); i < count; i += kThreads) {
    sum.hi += partials[i].hi;
    sum.lo += partials[i].lo;
  }
  BlockNumbers& shared = block_shared<BlockNumbers>();
  sum.hi = block_sum(sum.hi, shared);
  sum.lo = block_sum(sum.lo, shared);
  if (thread_index() == 0) {
    result[0] += sum.hi + (sum.lo >> 32);
    result[1] += sum.lo & 0xFFFFFFFF;
  }
}

// Tile by tile, so that the order depends only on n.
struct SumShared {
  double of_warp[kWarps];
};

// out[tile] = factor * the sum of x's tile: over a thread's elements, then the warp's lanes, then the warps.
template <class T>
__global__ void sum_kernel(double* out, const T* x, i64 n, i64 tile, double factor) {
  const i64 begin = i64{block_index().x} * tile, end = begin + tile < n ? begin + tile : n;
  double sums[kInFlight] = {};
  for (i64 at = begin + thread_index(); at < end; at += kInFlight * kThreads) {
    double terms[kInFlight];
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k)
      terms[k] = at + k * kThreads < end ? static_cast<double>(x[at + k * kThreads]) : 0.0;
    DS_UNROLL
    for (int k = 0; k < kInFlight; ++k) sums[k] += terms[k];
  }
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  static_assert(kInFlight == 4);
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += warp_shuffle_xor(sum, mask);
  SumShared& shared = block_shared<SumShared>();
  if (thread_index() % kWarp == 0) shared.of_warp[thread_index() / kWarp] = sum;
  sync_block();
  if (thread_index() != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += shared.of_warp[w];
  out[block_index().x] = sum * factor;
}

__global__ void norm_ratios_kernel(float* factors, const i64* largest, const i64* sums, i64 K, float low, float high,
                                   bool unit) {
  for (i64 k = thread_index(); k < K; k += kWarp) factors[k] = norm_ratio(largest, sums, k, K, low, high, unit);
}
__global__ void judge_kernel(GradVerdict* verdict, const i64* max_abs, const i64* sum, JudgeParams p) {
  if (thread_index() == 0) *verdict = judge_gradients(*max_abs, {sum[0], sum[1]}, p);
}

}  // namespace

void fold(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 n = dst.numel();
  if (n == 0) return;
  // A list of several launches writes dst before all sources have been read. If dst is one of the later sources, the
  // sum is kept in scratch until then.
  const auto late = sources.subspan(std::min<size_t>(sources.size(), kFoldSources));
  const bool overtaken = std::any_of(late.begin(), late.end(), [&](const TensorView& s) { return s.data == dst.data; });
  float* const waiting = overtaken ? static_cast<float*>(c.scratch(static_cast<size_t>(n) * sizeof(float))) : nullptr;
  if (overtaken && waiting == nullptr) return;
  const float* init = accumulate ? dst.as<float>() : nullptr;
  while (!sources.empty()) {
    FoldSources now{};
    now.count = static_cast<int>(std::min<size_t>(sources.size(), kFoldSources));
    bool wide = all_aligned(16, {dst.data});
    for (int k = 0; k < now.count; ++k) {
      now.data[k] = sources[static_cast<size_t>(k)].data;
      wide = wide && all_aligned(16, {now.data[k]});
    }
    const DType dtype = sources[0].dtype;
    sources = sources.subspan(static_cast<size_t>(now.count));
    float* const out = sources.empty() || !overtaken ? dst.as<float>() : waiting;
    with_work_type(dtype, [&]<class T>(T) {
      const i64 packs = (n + kPack<T> - 1) / kPack<T>;
      launch(fold_kernel<T>, over((packs + kThreads - 1) / kThreads), c.stream(), out, init, now, n, wide);
    });
    c.check(cudaGetLastError(), "fold");
    init = out;
  }
}

void max_abs(TensorView result, TensorView x, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 n = x.numel();
  if (n == 0) return;
  with_work_type(x.dtype, [&]<class T>(T) {
    launch(max_abs_kernel<T>, over(num_blocks((n + kPack<T> - 1) / kPack<T>, c), sizeof(BlockNumbers)), c.stream(),
           result.as<i64>(), x.as<T>(), n, all_aligned(16, {x.data}));
  });
  c.check(cudaGetLastError(), "max_abs");
}

void nonzero_rows(TensorView flags, TensorView x, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = x.dim(0), C = x.dim(1);
  if (R == 0) return;
  with_work_type(x.dtype, [&]<class T>(T) {
    launch(nonzero_rows_kernel<T>, over(num_blocks(R * kWarp, c)), c.stream(), flags.as<u8>(), x.as<T>(), R, C,
           C % kPack<T> == 0 && all_aligned(16, {x.data}));
  });
  c.check(cudaGetLastError(), "nonzero_rows");
}

void sum_squares(TensorView result, TensorView x, TensorView max_abs, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 n = x.numel();
  if (n == 0) return;
  with_work_type(x.dtype, [&]<class T>(T) {
    const i64 packs = scratch::packs_of(n, x.dtype), blocks = num_blocks(packs, c);
    // As much as for any number of multiprocessors, so that it can be predicted.
    auto* const partials =
        static_cast<ExactSum*>(c.scratch(static_cast<size_t>(scratch::reduce_blocks(packs)) * sizeof(ExactSum)));
    if (partials == nullptr) return;
    launch(sum_squares_kernel<T>, over(blocks, sizeof(BlockNumbers)), c.stream(), partials, x.as<T>(), n,
           max_abs.as<i64>(), all_aligned(16, {x.data}));
    c.check(cudaGetLastError(), "sum_squares");
    launch(add_squares_kernel, over(1, sizeof(BlockNumbers)), c.stream(), result.as<i64>(), partials, blocks,
           max_abs.as<i64>());
    c.check(cudaGetLastError(), "sum_squares, partial sums");
  });
}

void sum(TensorView result, TensorView x, double factor, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 n = x.numel(), tiles = scratch::sum_tiles(n);
  double* out = result.as<double>();
  if (tiles > 1) {
    auto* const partials = static_cast<double*>(c.scratch(static_cast<size_t>(tiles) * sizeof(double)));
    if (partials == nullptr) return;
    launch(sum_kernel<float>, over(tiles, sizeof(SumShared)), c.stream(), partials, x.as<float>(), n, kSumTile, 1.0);
    c.check(cudaGetLastError(), "sum");
    launch(sum_kernel<double>, over(1, sizeof(SumShared)), c.stream(), out, partials, tiles, tiles, factor);
  } else {
    launch(sum_kernel<float>, over(1, sizeof(SumShared)), c.stream(), out, x.as<float>(), n, kSumTile, factor);
  }
  c.check(cudaGetLastError(), "sum");
}

void judge(GradVerdict* verdict, TensorView max_abs, TensorView sum, const JudgeParams& p, Stream& stream) noexcept {
  Context& c = context(stream);
  launch(judge_kernel, {dim3(1), kWarp, 0}, c.stream(), verdict, max_abs.as<i64>(), sum.as<i64>(), p);
  c.check(cudaGetLastError(), "judge");
}

void norm_ratios(TensorView factors, TensorView largest, TensorView sums, float low, float high,
                 Stream& stream) noexcept {
  Context& c = context(stream);
  launch(norm_ratios_kernel, {dim3(1), kWarp, 0}, c.stream(), factors.as<float>(), largest.as<i64>(), sums.as<i64>(),
         factors.numel(), low, high, largest.numel() == factors.numel());
  c.check(cudaGetLastError(), "norm_ratios");
}

}  // namespace ds::cuda
