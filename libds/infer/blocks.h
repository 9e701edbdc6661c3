// SPDX-License-Identifier: Apache-2.0
#pragma once
// The blocks of one CacheSpace: which sequences have which. Blocks of equal prefixes may be shared, and are found again
// after their sequences have ended, until their place is needed.

#include <list>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "ds/integers.h"

namespace ds::infer {

class Blocks {
 public:
  explicit Blocks(i64 count);

  i64 available() const noexcept { return std::ssize(free_) + std::ssize(old_); }
  // A block for a sequence; -1: none is left.
  i32 take();
  // One sequence less has the block. A sequence gives back its last block first.
  void give_back(i32 block);

  // Tokens of a whole block, after those of another one (-1: none), which the same sequence has.
  struct Prefix {
    i32 before = -1;
    std::vector<i32> tokens;
    auto operator<=>(const Prefix&) const = default;
  };
  // The sequence has filled the block with these tokens, and others that begin with them will share it. Returns the
  // block that the sequence has from now on: another one if a block with these tokens is known already.
  i32 remember(i32 block, Prefix prefix);
  // A remembered block, which one more sequence then has; -1: none.
  i32 find(const Prefix& prefix);

 private:
  struct Block {
    i64 users = 0;
    std::optional<std::map<Prefix, i32>::iterator> known;  // if it is remembered
    std::list<i32>::iterator old;                          // of a remembered one without users
  };

  std::vector<Block> blocks_;
  std::vector<i32> free_;
  std::map<Prefix, i32> known_;
  // Remembered, without users; the place of the first is taken next. Sequences give their last blocks back first, so a
  // block is before the one that its prefix names.
  std::list<i32> old_;
};

}  // namespace ds::infer
