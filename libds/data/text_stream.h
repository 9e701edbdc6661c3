// SPDX-License-Identifier: Apache-2.0
#pragma once
// The text of tokens as they come, in time that does not grow with how many there were.

#include <span>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace ds {

class TextStream {
 public:
  // `tokenizer` outlives it; `prompt`: the tokens before, whose text is not given again.
  TextStream(const Tokenizer& tokenizer, std::span<const i32> prompt);
  // What token `id` adds to the text, and what those before have held back: bytes of a character that was not whole.
  std::string push(i32 id);
  // What is still held back at the end.
  std::string end();

 private:
  std::string take(bool all);

  const Tokenizer& tokenizer_;
  // What a token adds depends on a few before it: blanks between words, bytes of one character. These, and how much of
  // their text is known.
  std::vector<i32> window_;
  size_t known_ = 0;
};

}  // namespace ds
