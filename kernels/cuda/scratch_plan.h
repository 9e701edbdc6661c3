// SPDX-License-Identifier: Apache-2.0
#pragma once
// The temporary memory of ops, for the kernels that take it and for plan/scratch.cc, which predicts it. It depends on
// arguments only, not on the GPU.

#include <algorithm>
#include <bit>

#include "cuda/attention.h"
#include "ds/kernels/ops.h"

namespace ds::cuda::scratch {

// ---- own_attention_bwd: two numbers for each row of a head, which is padded
constexpr i64 attention_bwd_bytes(i64 B, i64 T, i64 H) noexcept {
  return B * H * attention::padded_rows(T) * 2 * dtype_bytes(DType::F32);
}

// ---- attention by row: sums of parts
constexpr i64 attention_rows_bytes(const attention::RowPlan& plan, i64 Dv) noexcept {
  return plan.sums * attention::RowPlan::row_floats(Dv) * dtype_bytes(DType::F32);
}

// ---- evoformer attention: the bases of M sequences; statistics of M x H x T rows, and their sums for dbias1
constexpr i64 evoformer_bases_bytes(i64 M) noexcept { return M * dtype_bytes(DType::F32); }
constexpr i64 evoformer_stats_bytes(i64 rows) noexcept { return rows * 2 * dtype_bytes(DType::F32); }
constexpr i64 evoformer_columns_bytes(i64 rows) noexcept { return rows * dtype_bytes(DType::F32); }

// ---- linear_cross_entropy by row: the maximum, the sum and the target's logit of each row of a chunk
constexpr i64 row_stats_bytes(i64 rows) noexcept { return 3 * rows * dtype_bytes(DType::F32); }

// ---- column_sum: slices of rows, whose sums are added in order
struct Slices {
  i64 column_blocks, rows, count;

  static constexpr i64 kColumns = 256;  // of a block of the first stage
  static constexpr int kWarps = 8;      // of a block
  static constexpr Slices of(i64 R, i64 N) noexcept {
    const auto up = [](i64 a, i64 b) { return (a + b - 1) / b; };
    // About 1024 blocks, if that leaves each warp some rows and the second stage few enough slices.
    const i64 blocks = up(N, kColumns), wanted = std::clamp<i64>(1024 / std::max<i64>(blocks, 1), 1, 256);
    const i64 unit = 4 * kWarps, rows = std::max<i64>(up(up(R, wanted), unit) * unit, unit);
    return {blocks, rows, std::max<i64>(up(R, rows), 1)};
  }
  constexpr i64 bytes(i64 N) const noexcept { return count * N * dtype_bytes(DType::F32); }
};

// ---- norms, backward
// The packs of thread t of a group begin at columns (t + p * group) * width, p = 0, 1, ... width: elements of a pack.
struct NormPlan {
  int group = 0;  // threads per row: a power of two up to a warp, or several warps
  int packs = 0;  // per thread; 0: the row does not fit
  int rows = 0;   // per block at a time
  constexpr int block() const noexcept { return group * rows; }
};
inline constexpr int kNormBackwardPacks = 2, kNormBackwardThreads = 512;
inline constexpr int kNormShortThreads = 384;  // per block, in the backward pass with one pack per thread

constexpr int norm_group(i64 C, int elems) noexcept {
  constexpr i64 kWarpThreads = 32;
  const i64 threads = (C + elems - 1) / elems;
  return static_cast<int>(threads <= kWarpThreads ? static_cast<i64>(std::bit_ceil(static_cast<u64>(threads)))
                                                  : (threads + kWarpThreads - 1) / kWarpThreads * kWarpThreads);
}
constexpr NormPlan norm_backward_plan(i64 C, int width) noexcept {
  if (C > i64{width} * kNormBackwardPacks * kNormBackwardThreads) return {};
  if (const int group = norm_group(C, width); group <= 256) return {group, 1, kNormShortThreads / group};
  return {norm_group(C, width * kNormBackwardPacks), kNormBackwardPacks, 1};
}

// Strips of rows for the sums over rows: enough blocks, by their registers, to fill an H100 once.
struct NormStrips {
  i64 rows, count;

  static constexpr NormStrips of(i64 R, const NormPlan& p) noexcept {
    constexpr i64 kMultiprocessors = 132;
    const i64 blocks = p.packs == 0 ? 64 : kMultiprocessors * std::max(1, (p.packs == 1 ? 768 : 512) / p.block());
    const i64 rows = std::max({(R + blocks - 1) / blocks, static_cast<i64>(p.rows), i64{1}});
    return {rows, (R + rows - 1) / rows};
  }
  // parts: dweight, and dbias of a layernorm.
  constexpr i64 bytes(i64 C, i64 parts) const noexcept { return count * parts * C * dtype_bytes(DType::F32); }
};

// ---- reductions of a tensor
inline constexpr int kReduceThreads = 256;  // of a block
inline constexpr int kReduceInFlight = 4;   // 16-byte loads of a thread before it uses the first
inline constexpr i64 kMostReduceBlocks = 1 << 14;
// Blocks for so many loads, if the GPU does not limit them.
constexpr i64 reduce_blocks(i64 packs) noexcept {
  return std::clamp<i64>((packs + kReduceThreads * kReduceInFlight - 1) / (kReduceThreads * kReduceInFlight), 1,
                         kMostReduceBlocks);
}
constexpr i64 packs_of(i64 n, DType t) noexcept { return (n * dtype_bytes(t) + 15) / 16; }
inline constexpr i64 kSumTile = 1 << 15;  // elements of a partial result of sum
inline constexpr int kFoldSources = 128;  // of one launch of fold
constexpr i64 sum_tiles(i64 n) noexcept { return std::max<i64>(1, (n + kSumTile - 1) / kSumTile); }

// ---- router_stats: entropies are one sum here
constexpr i64 router_sums(i64 E) noexcept { return RouterStats{E}.size() - 1; }
// slices of tokens, whose sums are added in order
struct RouterSlices {
  static constexpr int kStep = 32;  // tokens that a block has at a time
  static constexpr i64 kMost = 256;
  i64 rows, count;

  static constexpr RouterSlices of(i64 R) noexcept {
    const i64 steps = (R + kStep - 1) / kStep, rows = kStep * std::max<i64>(1, (steps + kMost - 1) / kMost);
    return {rows, (R + rows - 1) / rows};
  }
  constexpr i64 bytes(i64 E) const noexcept {
    return std::max<i64>(1, count) * router_sums(E) * dtype_bytes(DType::F64);
  }
};

// ---- sort_choices: each expert's choices in each slice
inline constexpr i64 kChoiceSlice = 4096;
constexpr i64 choice_slices(i64 n) noexcept { return (n + kChoiceSlice - 1) / kChoiceSlice; }
constexpr i64 choice_bytes(i64 n, i64 E) noexcept {
  return std::max<i64>(1, choice_slices(n)) * E * dtype_bytes(DType::U32);
}

}  // namespace ds::cuda::scratch
