// SPDX-License-Identifier: Apache-2.0
#pragma once
// The preparation of the embedding gradient: rows are sorted by id, 8 bits per pass, in tiles of keys, one per block.
// This file computes all counts, and the layout of scratch memory:
//   counters | counts [256, tiles] | totals [256] | keys, rows [R] twice | starts of short runs [R], of long runs

#include "ds/kernels/ops.h"

namespace ds::cuda {

inline constexpr int kDigits = 256;
inline constexpr int kTileKeys = 1024;
// Longer runs of equal ids are added by one block per slice of columns instead of one warp.
inline constexpr i64 kLongRun = 128;

// In scratch, initially zero. The order of drawing from these decides which block adds a run, but never how.
struct RunCounters {
  u32 num_short, num_long;
  u32 ticket;
  u32 padding;
};

struct EmbeddingPlan {
  i64 num_rows;
  i64 num_tiles;
  int num_passes;
  // Offsets in bytes.
  size_t counters, counts, totals, keys[2], rows[2], short_runs, long_runs;
  size_t bytes;

  static constexpr EmbeddingPlan of(i64 num_rows, i64 num_ids) noexcept {
    EmbeddingPlan p{};
    p.num_rows = num_rows;
    p.num_tiles = (num_rows + kTileKeys - 1) / kTileKeys;
    p.num_passes = 1;
    while (p.num_passes < 4 && (num_ids - 1) >> (8 * p.num_passes) != 0) ++p.num_passes;
    const auto take = [&p](size_t bytes) {
      const size_t at = p.bytes;
      p.bytes += (bytes + 255) / 256 * 256;
      return at;
    };
    const size_t row_bytes = static_cast<size_t>(num_rows) * sizeof(u32);
    p.counters = take(sizeof(RunCounters));
    p.counts = take(static_cast<size_t>(kDigits * p.num_tiles) * sizeof(u32));
    p.totals = take(kDigits * sizeof(u32));
    for (int i = 0; i < 2; ++i) {
      p.keys[i] = take(row_bytes);
      p.rows[i] = take(row_bytes);
    }
    p.short_runs = take(row_bytes);
    p.long_runs = take(row_bytes / kLongRun + sizeof(u32));
    return p;
  }
};

}  // namespace ds::cuda
