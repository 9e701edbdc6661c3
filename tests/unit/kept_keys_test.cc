// SPDX-License-Identifier: Apache-2.0
// The keys that a text keeps, compared with those that each token it writes looks at.

#include "infer/kept_keys.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>

namespace ds::testing {
namespace kept_keys_test {

using infer::KeptKeys;
using model::AttentionLayout;

struct Case {
  std::optional<AttentionLayout> layout;
  i64 head = 0, heads = 1, window = 0, prompt = 0, positions = 0;

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
  // Does a token from `first` on see a page?
  bool seen_from(i64 first, i64 p) const {
    for (i64 query = first; query < positions - 1; ++query) {
      for (i64 key = p * page(); key < std::min(positions, (p + 1) * page()); ++key) {
        if (sees(query, key)) return true;
      }
    }
    return false;
  }
};

void expect_keeps_what_is_seen(const Case& c) {
  const KeptKeys kept(c.layout ? &*c.layout : nullptr, c.head, c.heads, c.window, c.prompt, c.positions);
  const i64 count = (c.positions + c.page() - 1) / c.page();
  i64 most = 0;
  for (i64 query = c.prompt; query < c.positions - 1; ++query) {
    std::vector<bool> taken(static_cast<size_t>(count));
    i64 now = 0;
    for (i64 p = 0; p * c.page() <= query; ++p) {
      if (!c.seen_from(query, p)) continue;
      ++now;
      if (kept.page() == 0) continue;
      const i32 place = kept.places()[p];
      ASSERT_GE(place, 0) << query << " " << p;
      ASSERT_LE((place + 1) * c.page(), kept.rows());
      ASSERT_FALSE(taken[place]) << "token " << query << ": two pages in place " << place;
      taken[place] = true;
    }
    most = std::max(most, now);
  }
  if (kept.page() == 0) {
    EXPECT_EQ(kept.rows(), c.positions);
    EXPECT_GE(most * c.page(), c.positions) << "pages would have saved memory";
  } else {
    EXPECT_EQ(kept.page(), c.page());
    EXPECT_EQ(kept.rows(), most * c.page()) << "as few as can be";
    EXPECT_LT(kept.rows(), c.positions);
  }
}

TEST(KeptKeys, AreThoseThatALaterTokenSees) {
  std::mt19937 random(3);
  const auto draw = [&](i64 least, i64 most) { return least + static_cast<i64>(random() % (most - least + 1)); };
  i64 with_pages = 0;
  for (int n = 0; n < 150; ++n) {
    Case c;
    c.prompt = draw(1, 120);
    c.positions = c.prompt + draw(1, 120);
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
    expect_keeps_what_is_seen(c);
    if (HasFatalFailure() || HasFailure()) FAIL() << n;
    with_pages +=
        KeptKeys(c.layout ? &*c.layout : nullptr, c.head, c.heads, c.window, c.prompt, c.positions).page() > 0;
  }
  EXPECT_GT(with_pages, 50);
}

TEST(KeptKeys, AreAllWhereAllIsSeen) {
  const KeptKeys all(nullptr, 0, 1, 0, 10, 1000), wide(nullptr, 0, 1, 950, 10, 1000);
  EXPECT_EQ(all.rows(), 1000);
  EXPECT_EQ(all.page(), 0);
  EXPECT_EQ(wide.page(), 0);
  // One token is written, and sees nothing.
  EXPECT_EQ(KeptKeys(nullptr, 0, 1, 100, 999, 1000).rows(), 0);
  const KeptKeys narrow(nullptr, 0, 1, 100, 10, 1'000'000);
  EXPECT_EQ(narrow.rows(), 3 * 64);
  EXPECT_EQ(narrow.page(), 64);
}

}  // namespace kept_keys_test
}  // namespace ds::testing
