// SPDX-License-Identifier: Apache-2.0
#include "zero/layout.h"

#include <gtest/gtest.h>

#include <numeric>

namespace ds::zero {
namespace layout_test {

using Rows = std::vector<model::ParamRow>;

Rows rows(std::initializer_list<i64> sizes) {
  Rows r;
  for (i64 n : sizes) r.push_back({.name = "p", .shape = {n}});
  return r;
}

Layout make(const std::vector<Rows>& units, LayoutOptions options) {
  std::vector<std::span<const model::ParamRow>> spans(units.begin(), units.end());
  return Layout::make(spans, options);
}

TEST(Layout, EveryElementHasOneOwner) {
  const std::vector<Rows> units = {rows({10, 700, 1}), rows({3}), rows({128, 4096, 77, 5})};
  for (int stage = 0; stage <= 3; ++stage) {
    for (int P = 1; P <= 9; ++P) {
      const Layout layout = make(units, {P, stage, 100, 150});
      std::vector<std::vector<int>> owners;
      for (const RowPlace& r : layout.rows()) owners.emplace_back(r.numel, 0);
      for (int rank = 0; rank < P; ++rank) {
        for (const Piece& p : layout.owned_pieces(rank)) {
          for (i64 i = 0; i < p.count; ++i) ++owners[p.param][p.begin + i];
          EXPECT_GE(p.shard_offset, 0);
          EXPECT_LE(p.shard_offset + p.count, layout.shard_elems());
        }
      }
      for (const auto& row : owners)
        EXPECT_EQ(std::accumulate(row.begin(), row.end(), 0), static_cast<int>(row.size()));
    }
  }
}

TEST(Layout, OwnershipDoesNotDependOnTheStageBelowThree) {
  const std::vector<Rows> units = {rows({1000, 24}), rows({333})};
  const Layout one = make(units, {3, 1, 0, 0}), two = make(units, {3, 2, 0, 0}), zero = make(units, {3, 0, 0, 0});
  for (int rank = 0; rank < 3; ++rank) {
    const auto a = one.owned_pieces(rank), b = two.owned_pieces(rank), c = zero.owned_pieces(rank);
    ASSERT_EQ(a.size(), b.size());
    ASSERT_EQ(a.size(), c.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].param, c[i].param);
      EXPECT_EQ(a[i].begin, c[i].begin);
      EXPECT_EQ(a[i].count, c[i].count);
      EXPECT_EQ(a[i].shard_offset, b[i].shard_offset);
    }
  }
}

TEST(Layout, PadsEveryUnitToWholeSlices) {
  const Layout layout = make({rows({10, 7, 20})}, {4, 2, 0, 0});
  EXPECT_EQ(layout.segments()[0].slice, 128);
  EXPECT_EQ(layout.units()[0].padded, 512);
  EXPECT_EQ(layout.shard_elems(), 128);
  EXPECT_EQ(layout.owned_pieces(0).size(), 3u);  // all of it fits rank 0
  EXPECT_TRUE(layout.owned_pieces(3).empty());   // more ranks than slices
}

TEST(Layout, StageThreeKeepsSmallRowsWholeUntilTheModelThreshold) {
  const Layout layout = make({rows({50, 5000, 60, 45}), rows({40})}, {2, 3, 60, 150});
  ASSERT_EQ(layout.segments_of(0).size(), 2u);
  EXPECT_TRUE(layout.segments_of(0)[0].persistent);
  EXPECT_EQ(layout.segments_of(0)[0].numel, 50 + 60);  // 45 more would exceed 150
  EXPECT_EQ(layout.segments_of(0)[1].numel, 5000 + 45);
  EXPECT_EQ(layout.segments_of(1)[0].numel, 40);
  EXPECT_TRUE(layout.segments_of(1)[0].persistent);
}

// The shares of a vocabulary differ by a row; what lies beside them must not.
TEST(Layout, IsAlikeOnAllRanksOfATensorParallelGroup) {
  for (i64 threshold = 4000; threshold < 4300; threshold += 10) {
    const auto of = [&](i64 numel) {
      Rows unit = rows({512, numel, 32});
      unit[1].room = 4160;
      return make({unit, rows({4150, 7})}, {2, 3, threshold, 8400});
    };
    const Layout most = of(4160), fewer = of(4128);
    ASSERT_EQ(most.segments().size(), fewer.segments().size()) << threshold;
    for (size_t s = 0; s < most.segments().size(); ++s) {
      EXPECT_EQ(most.segments()[s].slice, fewer.segments()[s].slice) << threshold;
      EXPECT_EQ(most.segments()[s].persistent, fewer.segments()[s].persistent) << threshold;
    }
    for (size_t r = 0; r < most.rows().size(); ++r)
      EXPECT_EQ(most.rows()[r].offset, fewer.rows()[r].offset) << threshold;
  }
}

}  // namespace layout_test
}  // namespace ds::zero
