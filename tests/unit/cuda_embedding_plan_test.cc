// SPDX-License-Identifier: Apache-2.0
#include "cuda/embedding_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace ds::cuda {
namespace cuda_embedding_plan_test {

TEST(EmbeddingPlan, TakesAPassForEveryEightBitsOfTheLargestId) {
  const std::pair<i64, int> passes[] = {{1, 1},     {2, 1},     {256, 1},    {257, 2},     {50257, 2},
                                        {65536, 2}, {65537, 3}, {128256, 3}, {1 << 24, 3}, {(1 << 24) + 1, 4}};
  for (const auto& [num_ids, want] : passes) EXPECT_EQ(EmbeddingPlan::of(1000, num_ids).num_passes, want) << num_ids;
  EXPECT_EQ(EmbeddingPlan::of(1000, i64{1} << 31).num_passes, 4);
}

TEST(EmbeddingPlan, TilesCoverAllRows) {
  for (const i64 rows : {i64{1}, i64{kTileKeys - 1}, i64{kTileKeys}, i64{kTileKeys + 1}, i64{1} << 20}) {
    const EmbeddingPlan p = EmbeddingPlan::of(rows, 50257);
    EXPECT_GE(p.num_tiles * kTileKeys, rows);
    EXPECT_LT((p.num_tiles - 1) * kTileKeys, rows);
  }
}

TEST(EmbeddingPlan, ScratchIsAlignedLargeEnoughAndDisjoint) {
  for (const i64 rows : {i64{1}, i64{127}, i64{4097}, i64{1} << 20}) {
    const EmbeddingPlan p = EmbeddingPlan::of(rows, 128256);
    const size_t n = static_cast<size_t>(rows) * sizeof(u32);
    const size_t counts = static_cast<size_t>(kDigits * p.num_tiles) * sizeof(u32);
    // A long run has more than kLongRun rows, so there are fewer than rows / kLongRun of them.
    const size_t long_runs = static_cast<size_t>(rows / kLongRun) * sizeof(u32);
    std::vector<std::pair<size_t, size_t>> parts = {{p.counters, sizeof(RunCounters)},
                                                    {p.counts, counts},
                                                    {p.totals, kDigits * sizeof(u32)},
                                                    {p.keys[0], n},
                                                    {p.keys[1], n},
                                                    {p.rows[0], n},
                                                    {p.rows[1], n},
                                                    {p.short_runs, n},
                                                    {p.long_runs, long_runs}};
    std::sort(parts.begin(), parts.end());
    size_t end = 0;
    for (const auto& [at, bytes] : parts) {
      EXPECT_EQ(at % 256, 0u);
      EXPECT_GE(at, end);
      end = at + bytes;
    }
    EXPECT_LE(end, p.bytes);
    EXPECT_LT(p.bytes, 6 * n + 16 * 1024);
  }
}

}  // namespace cuda_embedding_plan_test
}  // namespace ds::cuda
