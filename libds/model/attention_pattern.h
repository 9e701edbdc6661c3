// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which keys a query attends to, by blocks: layouts of Child et al. ("Generating Long Sequences with Sparse
// Transformers"), Zaheer et al. ("Big Bird"), Beltagy et al. ("Longformer") by DeepSpeed's rules, or a file's.
//
// A layout is a pure function of its configuration, the number of heads and blocks, and a seed: it does not depend on
// ranks. It is independent of the element-wise masks (causal, sliding window) that an attention has besides.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ds/config.h"

namespace ds::model {

// Bits of [layouts, count, count], and the same transposed, as AttentionBlocks has them.
class AttentionLayout {
 public:
  AttentionLayout(i64 block, i64 count, i64 layouts, std::vector<u64> keys);

  i64 block() const noexcept { return block_; }      // tokens
  i64 count() const noexcept { return count_; }      // blocks of queries, and of keys
  i64 layouts() const noexcept { return layouts_; }  // 1: of all heads
  i64 words() const noexcept { return (count_ + 63) / 64; }
  bool has(i64 layout, i64 query, i64 key) const noexcept {
    return (keys_[row(layout, query) + static_cast<size_t>(key / 64)] >> (key % 64) & 1) != 0;
  }
  // Blocks that are there, of those that a causal mask leaves where `causal`: of all layouts.
  i64 present(bool causal) const noexcept;
  const u64* keys_of(i64 layout, i64 query) const noexcept { return &keys_[row(layout, query)]; }
  const u64* queries_of(i64 layout, i64 key) const noexcept { return &queries_[row(layout, key)]; }
  const std::vector<u64>& keys() const noexcept { return keys_; }        // [layouts, count, words()]
  const std::vector<u64>& queries() const noexcept { return queries_; }  // the same transposed

 private:
  size_t row(i64 layout, i64 i) const noexcept { return static_cast<size_t>((layout * count_ + i) * words()); }

  i64 block_, count_, layouts_;
  std::vector<u64> keys_, queries_;
};

// The layout of `tokens` tokens, of which the last block may have fewer than the others: of each head where the
// configuration says different_layout_per_head or a file has so many, else one of all. Requires a configuration that
// was resolved (config/sparse_attention), mode other than None; of counts that are beyond the blocks of this sequence
// there are as many as it has. Errc::Config: a file that is not a layout of these heads and blocks, has other entries
// than 0 and 1, or has a row without a key (of those that a causal mask leaves, where the configuration is
// unidirectional). Errc::Io: a file that cannot be read. Besides what formats/ has against an HDF5 file.
AttentionLayout make_attention_layout(const SparseAttentionConfig&, i64 heads, i64 tokens, u64 seed);
// That of a run, which the parts of its model share.
std::shared_ptr<const AttentionLayout> attention_layout_of(const Config&);

// All that an attention hides by place: a layout, a causal mask and a sliding window, block by block.
class AttentionPattern {
 public:
  // Without a layout every block is met, and `block` is a choice of who looks. window 0: none.
  AttentionPattern(std::shared_ptr<const AttentionLayout> layout, i64 block, i64 tokens, bool causal, i64 window);

  i64 block() const noexcept { return block_; }
  i64 count() const noexcept { return (tokens_ + block_ - 1) / block_; }
  // A block that is met: does every query of the one see every key of the other, or do some see some?
  struct Met {
    i64 block = 0;
    bool whole = false;
    bool operator==(const Met&) const = default;
  };
  std::vector<Met> keys_of(i64 head, i64 query) const;   // of a block of queries, ascending
  std::vector<Met> queries_of(i64 head, i64 key) const;  // of a block of keys, ascending
  double share(i64 head) const;                          // of all pairs of tokens, those that see each other
  // Errc::Config: a token that sees no key, where a layout meets a sliding window of a causal attention.
  void check_rows() const;

 private:
  struct Tokens {
    i64 first, last;
  };
  Tokens tokens_of(i64 block) const noexcept { return {block * block_, std::min(tokens_, (block + 1) * block_) - 1}; }
  // Nothing where no query sees a key.
  std::optional<Met> met(i64 head, i64 query, i64 key, i64 named) const noexcept;

  std::shared_ptr<const AttentionLayout> layout_;
  i64 block_, tokens_, window_;
  bool causal_;
};

}  // namespace ds::model
