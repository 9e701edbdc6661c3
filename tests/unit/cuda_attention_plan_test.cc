// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of the CUDA attention kernels, against its definition; no GPU takes part.

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <vector>

#include "cuda/attention.h"
#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda::attention {
namespace cuda_attention_plan_test {

bool visible(const AttentionParams& p, i64 i, i64 j, i64 T, i64 S) {
  const i64 position = i + S - T;
  return j >= 0 && j < S && i >= 0 && i < T && (!p.causal || j <= position) &&
         (p.window <= 0 || j > position - p.window);
}

template <class F>
void for_masks(F f) {
  constexpr int kLengths[][2] = {{1, 1}, {1, 9}, {9, 1}, {7, 7}, {5, 12}, {12, 5}, {16, 16}};
  for (const auto& [T, S] : kLengths) {
    for (bool causal : {false, true}) {
      for (i64 window : {i64{0}, i64{1}, i64{3}, i64{7}, i64{12}, i64{1} << 40}) {
        AttentionParams p;
        p.causal = causal;
        p.window = window;
        SCOPED_TRACE(::testing::Message() << "T " << T << " S " << S << " causal " << causal << " window " << window);
        f(Mask::of(T, S, p), p);
      }
    }
  }
}

TEST(CudaAttentionPlan, RowsAndKeysSeeEachOtherAsTheMaskSays) {
  for_masks([](const Mask& m, const AttentionParams& p) {
    for (int i = 0; i < m.T; ++i) {
      for (int j = 0; j < m.S; ++j) {
        EXPECT_EQ(m.keys_of_row(i).has(j), visible(p, i, j, m.T, m.S)) << i << " " << j;
        EXPECT_EQ(m.rows_of_key(j).has(i), visible(p, i, j, m.T, m.S)) << i << " " << j;
      }
    }
    for (int j = m.S; j < m.S + 9; ++j) EXPECT_TRUE(m.rows_of_key(j).empty());
    for (int i = m.T; i < m.T + 9; ++i) EXPECT_LE(m.keys_of_row(i).end, m.S);
  });
}

TEST(CudaAttentionPlan, TilesThatAreVisitedHoldAllThatIsVisible) {
  for_masks([](const Mask& m, const AttentionParams& p) {
    constexpr int kOwn = 4, kStep = 2;
    for (int own = 0; own < 20; own += kOwn) {
      for (bool keys : {false, true}) {  // does the block own keys?
        const Range range = {own, own + kOwn};
        const Visits v = visits(keys ? m.rows_of_keys(range) : m.keys_of_rows(range), kStep);
        std::set<int> visited;
        for (int n = 0; n < v.count; ++n) visited.insert(v.tile(n));
        EXPECT_EQ(static_cast<int>(visited.size()), v.count);
        for (int other = 0; other < 20; other += kStep) {
          bool any = false, all = true;
          for (int x = own; x < own + kOwn; ++x) {
            for (int y = other; y < other + kStep; ++y) {
              const int i = keys ? y : x, j = keys ? x : y;
              any |= visible(p, i, j, m.T, m.S);
              all &= i >= m.T || visible(p, i, j, m.T, m.S);
            }
          }
          EXPECT_TRUE(!any || visited.contains(other / kStep)) << own << " meets " << other;
          const Range met = {other, other + kStep}, rows = keys ? met : range;
          if (rows.begin < m.T) {
            EXPECT_EQ(m.all_visible(rows, keys ? range : met), all) << own << " meets " << other;
          }
        }
      }
    }
  });
}

TEST(CudaAttentionPlan, FullyMaskedTilesAreSkipped) {
  const Mask causal = Mask::of(1024, 1024, {});
  EXPECT_EQ(visits(causal.keys_of_rows({0, 128}), 64).count, 2);
  EXPECT_EQ(visits(causal.keys_of_rows({896, 1024}), 64).count, 16);
  EXPECT_EQ(visits(causal.rows_of_keys({896, 1024}), 64).first, 14);
  EXPECT_EQ(visits(causal.rows_of_keys({896, 1024}), 64).count, 2);
  AttentionParams p;
  p.window = 100;
  const Mask window = Mask::of(1024, 1024, p);
  EXPECT_EQ(visits(window.keys_of_rows({512, 640}), 64).first, 6);  // keys 413 .. 639
  EXPECT_EQ(visits(window.keys_of_rows({512, 640}), 64).count, 4);
  EXPECT_EQ(visits(window.rows_of_keys({0, 128}), 64).count, 4);              // rows 0 .. 226
  EXPECT_EQ(visits(Mask::of(70, 9, {}).keys_of_rows({0, 61}), 64).count, 0);  // no key is visible
  EXPECT_EQ(visits(Mask::of(0, 9, {}).rows_of_keys({0, 9}), 64).count, 0);    // nor any row
  EXPECT_EQ(visits(Mask::of(9, 0, {}).keys_of_rows({0, 9}), 64).count, 0);
}

TEST(CudaAttentionPlan, UnitsOfALayoutAreThoseOfTheStepsWithoutOne) {
  for (i64 block : {16, 32, 64, 128}) {
    for (int step : {32, 64}) {
      for (i64 at : {i64{0}, 3 * block}) {
        AttentionParams p;
        p.blocks = {.block = block, .count = 100, .layouts = 1};
        p.grid.row0 = 5, p.grid.col0 = at;
        const Layout layout = Layout::of(p, false);
        const int unit = 1 << layout.unit_shift(step);
        EXPECT_EQ(unit, std::min<i64>(block, step));
        for (const Range seen : {Range{0, 1}, Range{0, 64}, Range{70, 71}, Range{100, 333}}) {
          const Range units = layout.units(seen, step);
          EXPECT_EQ(units.begin * unit - layout.met0, visits(seen, step).first * step);
          EXPECT_GE(units.end * unit - layout.met0, seen.end);
          EXPECT_LT((units.end - 1) * unit - layout.met0, seen.end);
        }
        EXPECT_TRUE(layout.units({}, step).empty());
      }
    }
  }
}

TEST(CudaAttentionPlan, LayoutsAreReadFromBothSides) {
  static u64 keys[4 * 70 * 2], queries[4 * 70 * 2];
  AttentionParams p;
  p.grid.head0 = 1;
  p.blocks = {.block = 32, .count = 70, .layouts = 4, .keys = keys, .queries = queries};
  p.grid.row0 = 40, p.grid.col0 = 96;
  const Layout rows = Layout::of(p, false), columns = Layout::of(p, true);
  EXPECT_EQ(rows.bits_of(0, 0), keys + 70 * 2 + 1 * 2);
  EXPECT_EQ(rows.bits_of(2, 24), keys + 3 * 70 * 2 + 2 * 2);
  EXPECT_EQ(rows.block_begin(23), 32);
  EXPECT_EQ(rows.block_begin(24), 64);
  EXPECT_EQ(rows.met0, 96);
  EXPECT_EQ(columns.bits_of(0, 64), queries + 70 * 2 + 5 * 2);
  EXPECT_EQ(columns.met0, 40);
  p.blocks.layouts = 1;
  EXPECT_EQ(Layout::of(p, false).bits_of(2, 0), keys + 1 * 2) << "heads share it";
  EXPECT_TRUE(has_known_block(p));
  for (i64 block : {8, 24, 256}) {
    p.blocks.block = block;
    EXPECT_FALSE(has_known_block(p)) << block;
  }
  EXPECT_TRUE(has_known_block({}));
}

TEST(CudaAttentionPlan, EveryTileOfEveryHeadIsWorkedOnOnceLongestFirst) {
  for (bool last_first : {false, true}) {
    std::set<std::pair<int, int>> seen;
    for (unsigned block = 0; block < 5 * 7; ++block) {
      const Work w = work_of(block, 5, 7, last_first);
      EXPECT_EQ(w.tile, last_first ? 4 - static_cast<int>(block) / 7 : static_cast<int>(block) / 7);
      EXPECT_TRUE(w.head >= 0 && w.head < 7);
      seen.insert({w.tile, w.head});
    }
    EXPECT_EQ(seen.size(), 35u);
  }
}

template <int kD>
void expect_tiles_without_conflicts() {
  constexpr int kRows = 32, kChunks = kD / 8;
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int at = swizzled<kD>(row, chunk);
      EXPECT_EQ(at % 8, 0);
      EXPECT_EQ(at / kD, row) << "a row stays a row";
      places.insert(at);
      // The kernels add rows in multiples of 16 and flip even chunks.
      EXPECT_EQ(at, row / 16 * 16 * kD + row % 16 * kD + ((chunk / 2 * 2 ^ (chunk % 2 ^ swizzle_of<kD>(row))) * 8));
    }
  }
  EXPECT_EQ(static_cast<int>(places.size()), kRows * kChunks);
  for (int row = 0; row < kRows; row += 8) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::set<int> banks;  // groups of four: 16 bytes
      for (int r = 0; r < 8; ++r) banks.insert(swizzled<kD>(row + r, chunk) / 8 % 8);
      EXPECT_EQ(banks.size(), 8u) << "kD " << kD << " row " << row << " chunk " << chunk;
    }
  }
}

TEST(CudaAttentionPlan, EightRowsOfAChunkLieInAllBanks) {
  expect_tiles_without_conflicts<32>();
  expect_tiles_without_conflicts<64>();
  expect_tiles_without_conflicts<96>();
  expect_tiles_without_conflicts<128>();
  expect_tiles_without_conflicts<192>();
  expect_tiles_without_conflicts<256>();
}

template <int kD>
constexpr bool fits() {
  using F = ForwardPlan<kD>;
  using B = BackwardPlan<kD>;
  constexpr int kMost = 163 * 1024;  // shared memory of a block on sm_80
  constexpr bool shared =
      2 * kD * (F::kOwn + 4 * F::kStep) <= kMost && 2 * kD * (2 * B::kOwn + 4 * B::kStep) + 16 * B::kStep <= kMost;
  constexpr bool whole = F::kOwn * kD / 8 % F::kThreads == 0 && F::kStep * kD / 8 % F::kThreads == 0 &&
                         B::kOwn * kD / 8 % B::kThreads == 0 && B::kStep * kD / 8 % B::kThreads == 0;
  return shared && whole && F::kStep % 16 == 0 && B::kStep % 16 == 0 && kD % B::kColumns == 0 &&
         B::kColumns % 16 == 0 && B::kStep / 2 <= B::kThreads;
}
static_assert(fits<32>() && fits<64>() && fits<96>() && fits<128>() && fits<192>() && fits<256>());

TEST(CudaAttentionPlan, StatisticsReachAsFarAsTheTiles) {
  for (i64 T : {1, 64, 127, 128, 129, 1000}) {
    for (int own : {BackwardPlan<64>::kOwn, BackwardPlan<256>::kOwn, 32, 64}) {
      EXPECT_LE((T + own - 1) / own * own, padded_rows(T));
    }
  }
}

TEST(CudaAttentionPlan, ThresholdOfDropoutIsTheComparisonOfUniforms) {
  for (float p : {0.0f, 1e-8f, 0.1f, 0.3f, 0.5f, 0.75f, 0.999f, 1.0f}) {
    const u32 least = least_kept(p);
    for (i64 d = -3; d <= 3; ++d) {
      const i64 x = static_cast<i64>(least) + d;
      if (x < 0 || x >= i64{1} << 24) continue;
      EXPECT_EQ(RngKey::uniform(static_cast<u32>(x) << 8) >= p, x >= static_cast<i64>(least)) << p << " " << x;
    }
  }
}

TEST(CudaAttentionPlan, WholeChunksNeedAlignedStridesAndSizes) {
  alignas(16) static u16 data[4096];
  TensorView x = TensorView::of(data, DType::BF16, {2, 3, 4, 16});
  EXPECT_TRUE(has_whole_chunks(x));
  TensorView y = x;
  y.data = data + 1;
  EXPECT_FALSE(has_whole_chunks(y));
  y = x;
  y.stride[1] += 2;
  EXPECT_FALSE(has_whole_chunks(y));
  y = x;
  y.stride[0] += 2;
  EXPECT_FALSE(has_whole_chunks(y));
  y.shape[0] = 1;
  EXPECT_TRUE(has_whole_chunks(y)) << "the stride of one batch is not used";
  y = x;
  y.shape[3] = 12;
  EXPECT_FALSE(has_whole_chunks(y));
}

TEST(CudaAttention, ABuildWithoutCudnnStatesThat) {  // this program is linked without it
  Context context({.cudnn_attention = true});
  ASSERT_NE(context.cudnn_attention(), nullptr);
  EXPECT_EQ(context.cudnn_attention()->name(), "");
  EXPECT_EQ(context.cudnn_attention()->error(), "this build has no cuDNN");
  EXPECT_FALSE(context.cudnn_attention()->run({}));
  EXPECT_EQ(context.error(), nullptr);
}

}  // namespace cuda_attention_plan_test
}  // namespace ds::cuda::attention
