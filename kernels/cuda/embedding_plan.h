// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the embedding gradient does before it adds: rows are sorted by id, 8 bits a pass, in tiles of keys that one
// block takes. This is the count of everything and the layout of its scratch memory:
//   counters | counts [256, tiles] | totals [256] | keys, rows [R] twice | starts of short runs [R], of long runs

#include "ds/kernels/ops.h"

namespace ds::cuda {

inline constexpr int kDigits = 256;
inline constexpr int kTileKeys = 1024;
// A run of equal ids that is longer than this is added by a block per slice of columns instead of a warp.
inline constexpr i64 kLongRun = 128;

// In scratch, zero at first. The order in which integers are drawn from these decides who adds a run, never how.
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
