// SPDX-License-Identifier: Apache-2.0
#include "infer/block_lives.h"

#include <algorithm>
#include <bit>

namespace ds::infer {
namespace {

// The last block of queries before `end` that attends to a block of keys in any of some heads; -1: none.
i64 last_query_block(const model::AttentionLayout& layout, i64 head, i64 heads, i64 key, i64 end) {
  i64 last = -1;
  const bool differ = layout.layouts() > 1;
  for (i64 h = differ ? head : 0; h < (differ ? head + heads : 1); ++h) {
    const u64* const bits = layout.queries_of(h, key);
    for (i64 word = (end - 1) / 64; word >= 0 && last < 64 * word + 63; --word) {
      u64 some = bits[word];
      if (end < 64 * (word + 1)) some &= (u64{1} << end % 64) - 1;
      if (some != 0) {
        last = std::max(last, 64 * word + 63 - std::countl_zero(some));
        break;
      }
    }
  }
  return last;
}

}  // namespace

BlockLives::BlockLives(const model::AttentionLayout* layout, i64 head, i64 heads, i64 window, i64 positions)
    : block_(layout != nullptr ? layout->block() : kBlock), positions_(positions) {
  last_readers_.resize(static_cast<size_t>((positions + block_ - 1) / block_), positions - 1);
  for (i64 b = 0; b < count(); ++b) {
    i64& last = last_readers_[static_cast<size_t>(b)];
    if (window > 0) last = std::min(last, (b + 1) * block_ - 1 + window - 1);
    if (layout == nullptr) continue;
    const i64 query = last_query_block(*layout, head, heads, b, last / block_ + 1);
    last = std::min(last, (query + 1) * block_ - 1);
  }
}

bool BlockLives::all() const {
  return std::ranges::all_of(last_readers_, [&](i64 last) { return last == positions_ - 1; });
}

i64 BlockLives::most(i64 tokens) const {
  if (all()) return count();
  // Among passes that end in the same block, the one whose last token begins it needs most.
  i64 most = 0;
  for (i64 end = 1; end <= positions_; end += block_) {
    const i64 first = std::max<i64>(0, end - tokens);
    i64 now = 0;
    for (i64 b = 0; b * block_ < end; ++b) now += needed(b, first);
    most = std::max(most, now);
  }
  return most;
}

}  // namespace ds::infer
