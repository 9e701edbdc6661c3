// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long the blocks of a sequence's cache are needed. Since attention depends only on positions, the last token that
// sees a key of a block is known in advance.

#include <vector>

#include "model/attention_pattern.h"

namespace ds::infer {

class BlockLives {
 public:
  static constexpr i64 kBlock = 64;  // positions, without a layout; else a block of the layout

  // For attention with a sliding window (0: none) and a layout (null: none), by whose heads [head, head + heads) it
  // goes; causal, over sequences of at most `positions`.
  BlockLives(const model::AttentionLayout* layout, i64 head, i64 heads, i64 window, i64 positions);

  i64 block() const noexcept { return block_; }
  i64 count() const noexcept { return std::ssize(last_readers_); }
  // The last position that sees a key of block b; -1: none.
  i64 last_reader(i64 b) const noexcept { return last_readers_[static_cast<size_t>(b)]; }
  // Whether a pass over positions from `first` on needs block b.
  bool needed(i64 b, i64 first) const noexcept { return last_reader(b) >= first; }
  bool all() const;  // all blocks are needed until the end
  // The most blocks that a sequence has at one time, if its passes have at most `tokens` new tokens.
  i64 most(i64 tokens) const;

 private:
  i64 block_, positions_;
  std::vector<i64> last_readers_;
};

}  // namespace ds::infer
