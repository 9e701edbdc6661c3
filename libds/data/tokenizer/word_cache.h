// SPDX-License-Identifier: Apache-2.0
#pragma once
// A thread's cache of the words that it has encoded: text repeats most of them.

#include <xxhash.h>

#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds::tokenizer {

class WordCache {
 public:
  static constexpr size_t kLongestWord = 64;  // bytes; longer ones hardly come again

  // The ids of `word`, appended, by encode(word, ids) the first time. `owner` tells tokenizers apart.
  template <class Encode>
  void append(u64 owner, std::string_view word, std::vector<i32>& ids, Encode&& encode) {
    if (word.size() > kLongestWord) return encode(word, ids);
    if (owner != owner_ || text_.size() > kTextBytes) clear(owner);
    const u64 hash = XXH3_64bits(word.data(), word.size());
    Slot& slot = slots_[hash & (kSlots - 1)];
    if (slot.hash != hash || slot.bytes != word.size() ||
        std::memcmp(text_.data() + slot.text, word.data(), word.size()) != 0) {
      const size_t before = ids.size();
      encode(word, ids);
      slot = {hash, static_cast<u32>(text_.size()), static_cast<u32>(ids_.size()), static_cast<u16>(word.size()),
              static_cast<u16>(ids.size() - before)};
      text_.insert(text_.end(), word.begin(), word.end());
      ids_.insert(ids_.end(), ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end());
      return;
    }
    const i32* const found = ids_.data() + slot.ids;
    ids.insert(ids.end(), found, found + slot.num_ids);
  }

 private:
  static constexpr size_t kSlots = 1 << 16;
  static constexpr size_t kTextBytes = 4 << 20;  // then it starts anew
  struct Slot {
    u64 hash = 0;
    u32 text = 0, ids = 0;       // where they begin
    u16 bytes = 0, num_ids = 0;  // bytes 0: free
  };
  void clear(u64 owner) {
    slots_.assign(kSlots, {});
    text_.clear();
    ids_.clear();
    owner_ = owner;
  }
  u64 owner_ = 0;  // none
  std::vector<Slot> slots_;
  std::vector<char> text_;
  std::vector<i32> ids_;
};

}  // namespace ds::tokenizer
