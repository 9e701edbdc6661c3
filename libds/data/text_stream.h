// SPDX-License-Identifier: Apache-2.0
#pragma once
// The text of tokens as they are generated, in time that does not depend on how many there are.

#include <span>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace ds {

class TextStream {
 public:
  // `tokenizer` outlives it. `prompt`: the tokens before, whose text is not returned.
  TextStream(const Tokenizer& tokenizer, std::span<const i32> prompt);
  // The text that token `id` adds, including bytes of an incomplete character that earlier tokens held back.
  std::string push(i32 id);
  // Bytes that are still held back at the end.
  std::string end();

 private:
  std::string take(bool all);

  const Tokenizer& tokenizer_;
  // The text of a token depends on a few tokens before it (blanks between words, bytes of a character): those, and how
  // much of their text has been returned.
  std::vector<i32> window_;
  size_t known_ = 0;
};

}  // namespace ds
