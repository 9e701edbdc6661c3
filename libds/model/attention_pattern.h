// SPDX-License-Identifier: Apache-2.0
#pragma once
// Block patterns of attention, by blocks of keys and queries: the layouts of Child et al. ("Generating Long Sequences
// with Sparse Transformers"), Zaheer et al. ("Big Bird") and Beltagy et al. ("Longformer") by DeepSpeed's rules, or one
// read from a file.
//
// A layout is a pure function of its configuration, the numbers of heads and blocks, and a seed; it does not depend on
// ranks. It is independent of the element-wise masks (causal, sliding window) that an attention may have in addition.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ds/config.h"

namespace ds::model {

// Bits [layouts, count, count] and their transpose, in the format of AttentionBlocks.
class AttentionLayout {
 public:
  AttentionLayout(i64 block, i64 count, i64 layouts, std::vector<u64> keys);

  i64 block() const noexcept { return block_; }      // tokens
  i64 count() const noexcept { return count_; }      // blocks of queries, and of keys
  i64 layouts() const noexcept { return layouts_; }  // 1: the same for all heads
  i64 words() const noexcept { return (count_ + 63) / 64; }
  bool has(i64 layout, i64 query, i64 key) const noexcept {
    return (keys_[row(layout, query) + static_cast<size_t>(key / 64)] >> (key % 64) & 1) != 0;
  }
  // Number of present blocks in all layouts; if `causal`, without those hidden by a causal mask.
  i64 present(bool causal) const noexcept;
  const u64* keys_of(i64 layout, i64 query) const noexcept { return &keys_[row(layout, query)]; }
  const u64* queries_of(i64 layout, i64 key) const noexcept { return &queries_[row(layout, key)]; }
  const std::vector<u64>& keys() const noexcept { return keys_; }        // [layouts, count, words()]
  const std::vector<u64>& queries() const noexcept { return queries_; }  // transposed

 private:
  size_t row(i64 layout, i64 i) const noexcept { return static_cast<size_t>((layout * count_ + i) * words()); }

  i64 block_, count_, layouts_;
  std::vector<u64> keys_, queries_;
};

// The layout of `tokens` tokens; the last block may have fewer than the others. There is one layout per head if the
// configuration has different_layout_per_head or a file contains that many, else one for all heads. Requires a resolved
// configuration (config/sparse_attention) with a mode other than None. Counts that exceed the number of blocks in this
// sequence are reduced to it. Throws Errc::Config for a file that is not a layout of these heads and blocks, has
// entries other than 0 and 1, or has a row without a key (among those that a causal mask leaves if the configuration is
// unidirectional); Errc::Io for a file that cannot be read; and the errors of formats/ for an HDF5 file.
AttentionLayout make_attention_layout(const SparseAttentionConfig&, i64 heads, i64 tokens, u64 seed);
// The layout of a run, shared by the parts of its model.
std::shared_ptr<const AttentionLayout> attention_layout_of(const Config&);

// Everything that hides keys from a query by position (a layout, a causal mask, a sliding window), block by block.
class AttentionPattern {
 public:
  // Without a layout every block is present, and `block` is the caller's choice. window 0: none.
  AttentionPattern(std::shared_ptr<const AttentionLayout> layout, i64 block, i64 tokens, bool causal, i64 window);

  i64 block() const noexcept { return block_; }
  i64 count() const noexcept { return (tokens_ + block_ - 1) / block_; }
  // A present block; `whole`: every query sees every key, else some queries see some keys.
  struct Met {
    i64 block = 0;
    bool whole = false;
    bool operator==(const Met&) const = default;
  };
  std::vector<Met> keys_of(i64 head, i64 query) const;   // for a block of queries, ascending
  std::vector<Met> queries_of(i64 head, i64 key) const;  // for a block of keys, ascending
  double share(i64 head) const;                          // share of all pairs of tokens in which the query sees the key
  // Throws Errc::Config for a token that sees no key, which a layout combined with a causal sliding window can cause.
  void check_rows() const;

 private:
  struct Tokens {
    i64 first, last;
  };
  Tokens tokens_of(i64 block) const noexcept { return {block * block_, std::min(tokens_, (block + 1) * block_) - 1}; }
  // Empty if no query sees a key.
  std::optional<Met> met(i64 head, i64 query, i64 key, i64 named) const noexcept;

  std::shared_ptr<const AttentionLayout> layout_;
  i64 block_, tokens_, window_;
  bool causal_;
};

}  // namespace ds::model
