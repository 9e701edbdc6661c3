// SPDX-License-Identifier: Apache-2.0
#include "infer/blocks.h"

#include <utility>

#include "base/check.h"

namespace ds::infer {

Blocks::Blocks(i64 count) : blocks_(static_cast<size_t>(count)) {
  for (i64 b = count; b-- > 0;) free_.push_back(narrow<i32>(b));
}

i32 Blocks::take() {
  i32 taken = -1;
  if (!free_.empty()) {
    taken = free_.back();
    free_.pop_back();
  } else if (!old_.empty()) {
    taken = old_.front();
    old_.pop_front();
    known_.erase(*std::exchange(blocks_[taken].known, std::nullopt));
  }
  if (taken >= 0) blocks_[taken].users = 1;
  return taken;
}

void Blocks::give_back(i32 block) {
  Block& b = blocks_[block];
  DS_ASSERT(b.users > 0);
  if (--b.users > 0) return;
  if (b.known) {
    b.old = old_.insert(old_.end(), block);
  } else {
    free_.push_back(block);
  }
}

i32 Blocks::remember(i32 block, Prefix prefix) {
  if (const i32 other = find(prefix); other >= 0) {
    give_back(block);
    return other;
  }
  blocks_[block].known = known_.emplace(std::move(prefix), block).first;
  return block;
}

i32 Blocks::find(const Prefix& prefix) {
  const auto known = known_.find(prefix);
  if (known == known_.end()) return -1;
  Block& b = blocks_[known->second];
  if (b.users++ == 0) old_.erase(b.old);
  return known->second;
}

}  // namespace ds::infer
