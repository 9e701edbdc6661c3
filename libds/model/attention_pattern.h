// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which keys a query attends to, by blocks: layouts of Child et al. ("Generating Long Sequences with Sparse
// Transformers"), Zaheer et al. ("Big Bird"), Beltagy et al. ("Longformer") by DeepSpeed's rules, or a file's.
//
// A layout is a pure function of its configuration, the number of heads and blocks, and a seed: it does not depend on
// ranks. It is independent of the element-wise masks (causal, sliding window) that an attention has besides.

#include <string>
#include <vector>

#include "ds/config.h"

namespace ds::model {

// Bits of [layouts, count, count], and the same transposed, as AttentionBlocks has them.
class AttentionLayout {
 public:
  AttentionLayout(i64 block, i64 count, i64 layouts);  // no block meets another
  AttentionLayout(i64 block, i64 count, i64 layouts, std::vector<u64> keys);

  i64 block() const noexcept { return block_; }      // tokens
  i64 count() const noexcept { return count_; }      // blocks of queries, and of keys
  i64 layouts() const noexcept { return layouts_; }  // 1: of all heads
  i64 words() const noexcept { return (count_ + 63) / 64; }
  bool has(i64 layout, i64 query, i64 key) const noexcept {
    return (keys_[row(layout, query) + static_cast<size_t>(key / 64)] >> (key % 64) & 1) != 0;
  }
  void set(i64 layout, i64 query, i64 key) noexcept;
  // Blocks that are there, of those that a causal mask leaves where `causal`: of all layouts.
  i64 present(bool causal) const noexcept;
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

}  // namespace ds::model
