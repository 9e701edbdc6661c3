// SPDX-License-Identifier: Apache-2.0
#include "infer/blocks.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace ds::testing {
namespace blocks_test {

using infer::Blocks;

TEST(Blocks, AreTakenOnceAndComeBack) {
  Blocks blocks(3);
  std::vector<i32> taken;
  for (int i = 0; i < 3; ++i) taken.push_back(blocks.take());
  EXPECT_EQ(blocks.take(), -1);
  EXPECT_EQ(blocks.available(), 0);
  std::ranges::sort(taken);
  EXPECT_EQ(taken, (std::vector<i32>{0, 1, 2}));
  blocks.give_back(1);
  EXPECT_EQ(blocks.available(), 1);
  EXPECT_EQ(blocks.take(), 1);
}

TEST(Blocks, WithEqualPrefixesAreShared) {
  Blocks blocks(4);
  const i32 a = blocks.take(), b = blocks.take();
  EXPECT_EQ(blocks.remember(a, {-1, {1, 2}}), a);
  EXPECT_EQ(blocks.remember(b, {a, {3, 4}}), b);
  EXPECT_EQ(blocks.find({-1, {1, 2}}), a);
  EXPECT_EQ(blocks.find({-1, {3, 4}}), -1);
  EXPECT_EQ(blocks.find({a, {3, 4}}), b);
  // The same tokens, computed by two sequences at once: the second gets the block of the first.
  const i32 c = blocks.take();
  EXPECT_EQ(blocks.remember(c, {-1, {1, 2}}), a);
  EXPECT_EQ(blocks.available(), 2);
  // Those without users are found until their place is needed: the last of a sequence first.
  blocks.give_back(b), blocks.give_back(b);
  blocks.give_back(a), blocks.give_back(a), blocks.give_back(a);
  EXPECT_EQ(blocks.available(), 4);
  const i32 first = blocks.take(), second = blocks.take();
  EXPECT_TRUE(first != a && first != b && second != a && second != b);
  EXPECT_EQ(blocks.find({-1, {1, 2}}), a);
  EXPECT_EQ(blocks.find({a, {3, 4}}), b);
  blocks.give_back(b), blocks.give_back(a);
  EXPECT_EQ(blocks.take(), b);
  EXPECT_EQ(blocks.find({a, {3, 4}}), -1);
  EXPECT_EQ(blocks.take(), a);
  EXPECT_EQ(blocks.find({-1, {1, 2}}), -1);
  EXPECT_EQ(blocks.take(), -1);
}

// Sequences over few blocks: a block that is found always has the tokens that it was remembered by, and those before.
TEST(Blocks, AreNeverFoundForOtherTokens) {
  std::mt19937 random(3);
  Blocks blocks(12);
  std::vector<std::vector<i32>> written(12);  // all tokens of a text up to the end of the block
  std::vector<std::vector<i32>> sequences;    // blocks
  i64 found = 0;
  for (int n = 0; n < 20000; ++n) {
    if (sequences.size() == 3 || (random() % 3 == 0 && !sequences.empty())) {
      const size_t s = random() % sequences.size();
      for (size_t b = sequences[s].size(); b-- > 0;) blocks.give_back(sequences[s][b]);
      sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(s));
      continue;
    }
    std::vector<i32>& mine = sequences.emplace_back();
    std::vector<i32> text;
    bool finds = true;
    for (i64 length = 1 + random() % 4; length > 0; --length) {
      const Blocks::Prefix prefix{mine.empty() ? -1 : mine.back(), {static_cast<i32>(random() % 3)}};
      text.push_back(prefix.tokens[0]);
      if (const i32 block = finds ? blocks.find(prefix) : -1; block >= 0) {
        ASSERT_EQ(written[static_cast<size_t>(block)], text);
        mine.push_back(block);
        ++found;
        continue;
      }
      finds = false;
      const i32 fresh = blocks.take();
      ASSERT_GE(fresh, 0);
      written[static_cast<size_t>(fresh)] = text;
      const i32 block = blocks.remember(fresh, prefix);
      ASSERT_EQ(written[static_cast<size_t>(block)], text);
      mine.push_back(block);
    }
  }
  EXPECT_GT(found, 1000);
}

}  // namespace blocks_test
}  // namespace ds::testing
