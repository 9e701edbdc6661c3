// SPDX-License-Identifier: Apache-2.0
#pragma once
// Plans which keys and values of a sequence are cached, and where: those that a token after the prompt sees. Since
// attention depends only on positions, everything is known in advance: when a page of keys is written, and which token
// reads it last. After its last read a page's place is reused for the next new page. The last token of a sequence is
// written but sees nothing.

#include <vector>

#include "model/attention_pattern.h"

namespace ds::infer {

class KeptKeys {
 public:
  // For attention with a sliding window (0: none) and a layout (null: none), of whose heads it uses [head, head +
  // heads); causal. The sequence has a prompt and at most `positions` tokens. Without layout and window, or if paging
  // saves no memory, everything is kept, and there are no pages.
  KeptKeys(const model::AttentionLayout* layout, i64 head, i64 heads, i64 window, i64 prompt, i64 positions);

  i64 rows() const noexcept { return rows_; }  // rows of keys, and of values, to allocate
  i64 page() const noexcept { return page_; }  // positions per page; 0: row t is position t
  // The place of each page, or -1 if it is not kept.
  const std::vector<i32>& places() const noexcept { return places_; }

 private:
  i64 rows_, page_ = 0;
  std::vector<i32> places_;
};

}  // namespace ds::infer
