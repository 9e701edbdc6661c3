// SPDX-License-Identifier: Apache-2.0
// How long blocks of keys are needed, compared with the keys that each token sees.

#include "infer/block_lives.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>

namespace ds::testing {
namespace block_lives_test {

using infer::BlockLives;
using model::AttentionLayout;

struct Case {
  std::optional<AttentionLayout> layout;
  i64 head = 0, heads = 1, window = 0, positions = 0;

  i64 page() const { return layout ? layout->block() : 64; }
  bool sees(i64 query, i64 key) const {
    if (key > query || (window > 0 && key <= query - window)) return false;
    if (!layout) return true;
    const i64 i = query / layout->block(), j = key / layout->block();
    if (layout->layouts() == 1) return layout->has(0, i, j);
    for (i64 h = head; h < head + heads; ++h) {
      if (layout->has(h, i, j)) return true;
    }
    return false;
  }
};

BlockLives lives_of(const Case& c) { return {c.layout ? &*c.layout : nullptr, c.head, c.heads, c.window, c.positions}; }

void expect_lives_as_long_as_it_is_seen(const Case& c) {
  const BlockLives lives = lives_of(c);
  ASSERT_EQ(lives.block(), c.page());
  ASSERT_EQ(lives.count(), (c.positions + c.page() - 1) / c.page());
  std::vector<i64> last(static_cast<size_t>(lives.count()), -1);
  for (i64 p = 0; p < lives.count(); ++p) {
    for (i64 query = c.positions; query-- > 0 && last[p] < 0;) {
      for (i64 key = p * c.page(); key < std::min(c.positions, (p + 1) * c.page()); ++key) {
        if (c.sees(query, key)) last[p] = query;
      }
    }
    // A block of queries may be seen to its end, and the last block of keys may be cut.
    ASSERT_GE(lives.last_reader(p), last[p]) << p;
    ASSERT_LT(lives.last_reader(p), last[p] + c.page()) << p;
  }
  for (const i64 tokens : {i64{1}, i64{7}, i64{40}, c.positions}) {
    i64 most = 0;
    for (i64 end = 1; end <= c.positions; ++end) {
      i64 now = 0;
      for (i64 p = 0; p * c.page() < end; ++p) now += lives.last_reader(p) >= std::max<i64>(0, end - tokens);
      most = std::max(most, now);
    }
    ASSERT_EQ(lives.most(tokens), most) << tokens;
  }
}

TEST(BlockLives, EndWithTheLastTokenThatSeesAKey) {
  std::mt19937 random(3);
  const auto draw = [&](i64 least, i64 most) { return least + static_cast<i64>(random() % (most - least + 1)); };
  i64 ends = 0;
  for (int n = 0; n < 150; ++n) {
    Case c;
    c.positions = draw(2, 240);
    if (n % 3 != 0) {
      const i64 block = i64{16} << draw(0, 1), blocks = (c.positions + block - 1) / block + draw(0, 70);
      const i64 words = (blocks + 63) / 64, layouts = n % 2 == 0 ? 1 : 4, few = draw(2, 12);
      std::vector<u64> bits(static_cast<size_t>(layouts * blocks * words));
      for (i64 row = 0; row < layouts * blocks; ++row) {
        for (i64 j = 0; j < blocks; ++j) {
          if (j == row % blocks || draw(0, few) == 0) bits[row * words + j / 64] |= u64{1} << j % 64;
        }
      }
      c.layout.emplace(block, blocks, layouts, bits);
      if (layouts > 1) c.head = draw(0, 2), c.heads = draw(1, 4 - c.head);
    }
    if (n % 3 == 0 || n % 4 == 0) c.window = draw(1, 150);
    expect_lives_as_long_as_it_is_seen(c);
    if (HasFatalFailure() || HasFailure()) FAIL() << n;
    ends += !lives_of(c).all();
  }
  EXPECT_GT(ends, 50);
}

TEST(BlockLives, LastToTheEndWhereAllIsSeen) {
  EXPECT_TRUE(BlockLives(nullptr, 0, 1, 0, 1000).all());
  EXPECT_TRUE(BlockLives(nullptr, 0, 1, 1000, 1000).all());
  EXPECT_EQ(BlockLives(nullptr, 0, 1, 0, 1000).most(1), 16);
  const BlockLives narrow(nullptr, 0, 1, 100, 1'000'000);
  EXPECT_EQ(narrow.most(1), 3);
  EXPECT_EQ(narrow.most(512), 11);
}

}  // namespace block_lives_test
}  // namespace ds::testing
