// SPDX-License-Identifier: Apache-2.0
// The flat layouts of ZeRO, against the elements one by one.

#include "checkpoint/deepspeed_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace ds {
namespace deepspeed_layout_test {

TEST(DeepSpeedLayout, AParameterIsCutWhereThePartitionsEnd) {
  const std::vector<i64> partitions = {10, 10, 4};
  EXPECT_EQ(partitioned_pieces(7, 15, 2, partitions),
            (std::vector<FlatPiece>{{0, 3, 0, 2, 7}, {3, 10, 1, 2, 0}, {13, 2, 2, 2, 0}}));
  EXPECT_EQ(partitioned_pieces(10, 3, 0, partitions), (std::vector<FlatPiece>{{0, 3, 1, 0, 0}}));
  EXPECT_TRUE(partitioned_pieces(24, 0, 0, partitions).empty());
  EXPECT_THROW(partitioned_pieces(20, 5, 0, partitions), Error);
}

TEST(DeepSpeedLayout, RanksWithoutAnyElementAreSkipped) {
  EXPECT_EQ(partitioned_pieces(3, 2, 0, std::vector<i64>{4, 0, 4}),
            (std::vector<FlatPiece>{{0, 1, 0, 0, 3}, {1, 1, 2, 0, 0}}));
}

TEST(DeepSpeedLayout, ChunksAreOnePerRankAndTheLastIsPadded) {
  // 10 elements on 4 ranks: chunks of 3, the last of 1; they begin at 2 of flat tensors of 4 and 5 elements.
  EXPECT_EQ(chunked_pieces(2, 10, 4, std::vector<i64>{4, 5}), (std::vector<FlatPiece>{{0, 2, 0, 0, 2},
                                                                                      {2, 1, 0, 1, 0},
                                                                                      {3, 2, 1, 0, 2},
                                                                                      {5, 1, 1, 1, 0},
                                                                                      {6, 2, 2, 0, 2},
                                                                                      {8, 1, 2, 1, 0},
                                                                                      {9, 1, 3, 0, 2}}));
  // 5 elements on 4 ranks: chunks of 2, none for the last rank
  EXPECT_EQ(chunked_pieces(0, 5, 4, std::vector<i64>{2}),
            (std::vector<FlatPiece>{{0, 2, 0, 0, 0}, {2, 2, 1, 0, 0}, {4, 1, 2, 0, 0}}));
  EXPECT_THROW(chunked_pieces(1, 5, 4, std::vector<i64>{2}), Error);
}

TEST(DeepSpeedLayout, APartOfAParameterHasThePiecesWithinIt) {
  const std::vector<FlatPiece> pieces = {{0, 3, 0, 2, 7}, {3, 10, 1, 2, 0}, {13, 2, 2, 2, 5}};
  EXPECT_EQ(pieces_within(pieces, 0, 15), pieces);
  EXPECT_EQ(pieces_within(pieces, 0, 3), (std::vector<FlatPiece>{{0, 3, 0, 2, 7}}));
  EXPECT_EQ(pieces_within(pieces, 2, 12),
            (std::vector<FlatPiece>{{0, 1, 0, 2, 9}, {1, 10, 1, 2, 0}, {11, 1, 2, 2, 5}}));
  EXPECT_EQ(pieces_within(pieces, 5, 4), (std::vector<FlatPiece>{{0, 4, 1, 2, 2}}));
}

// Every layout, element by element: fill the flat tensors as DeepSpeed does, read them back by pieces.
TEST(DeepSpeedLayout, PiecesFindWhatWasPutThere) {
  const std::vector<i64> sizes = {7, 1, 12, 30, 2, 5};
  for (i64 ranks = 1; ranks <= 5; ++ranks) {
    const i64 total = std::accumulate(sizes.begin(), sizes.end(), i64{0});
    const i64 partition = align_up(total, 2 * ranks) / ranks;
    std::vector<i64> partitions, flat(static_cast<size_t>(ranks * partition), -1);
    for (i64 r = 0; r < ranks; ++r) partitions.push_back(std::clamp<i64>(total - r * partition, 0, partition));
    std::iota(flat.begin(), flat.begin() + total, i64{0});
    i64 offset = 0;
    for (const i64 n : sizes) {
      i64 next = 0;
      for (const FlatPiece& p : partitioned_pieces(offset, n, 0, partitions)) {
        EXPECT_EQ(p.begin, next);
        for (i64 i = 0; i < p.count; ++i) EXPECT_EQ(flat[p.rank * partition + p.offset + i], offset + p.begin + i);
        next += p.count;
      }
      EXPECT_EQ(next, n);
      offset += n;
    }

    std::vector<std::vector<i64>> own(static_cast<size_t>(ranks));  // stage 3: element of which parameter
    for (size_t s = 0; s < sizes.size(); ++s) {
      const i64 chunk = div_ceil(sizes[s], ranks);
      for (i64 r = 0; r < ranks; ++r) {
        for (i64 i = 0; i < chunk; ++i) own[r].push_back(static_cast<i64>(s) * 1000 + r * chunk + i);
      }
    }
    const i64 length = static_cast<i64>(own[0].size());
    const std::vector<i64> flats = {length / 3, length - length / 3};
    offset = 0;
    for (size_t s = 0; s < sizes.size(); ++s) {
      i64 next = 0;
      for (const FlatPiece& p : chunked_pieces(offset, sizes[s], ranks, flats)) {
        EXPECT_EQ(p.begin, next);
        for (i64 i = 0; i < p.count; ++i) {
          const i64 at = (p.flat == 0 ? 0 : flats[0]) + p.offset + i;
          EXPECT_EQ(own[p.rank][at], static_cast<i64>(s) * 1000 + p.begin + i);
        }
        next += p.count;
      }
      EXPECT_EQ(next, sizes[s]);
      offset += div_ceil(sizes[s], ranks);
    }
  }
}

}  // namespace deepspeed_layout_test
}  // namespace ds
