// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which keys and values of a text are kept, and where: those that a token behind the prompt sees. All of it is known
// beforehand, for attention goes by place: when a page of keys is new and which token sees it last. A page that its
// last reader has seen leaves its place to the next new one. A text's last token is written, and sees nothing.

#include <vector>

#include "model/attention_pattern.h"

namespace ds::infer {

class KeptKeys {
 public:
  // Of attention with a sliding window (0: none) and a layout (null: none), of heads [head, head + heads) of that;
  // causal. The text has a prompt and `positions` tokens at most. Without layout and window, and where it saves no
  // memory, all is kept, and there are no pages.
  KeptKeys(const model::AttentionLayout* layout, i64 head, i64 heads, i64 window, i64 prompt, i64 positions);

  i64 rows() const noexcept { return rows_; }  // of keys, and of values, that there is room for
  i64 page() const noexcept { return page_; }  // positions; 0: row t is position t
  // Of each page the number of its place, or -1 where it is not kept.
  const std::vector<i32>& places() const noexcept { return places_; }

 private:
  i64 rows_, page_ = 0;
  std::vector<i32> places_;
};

}  // namespace ds::infer
