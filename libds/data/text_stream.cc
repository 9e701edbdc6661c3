// SPDX-License-Identifier: Apache-2.0
#include "data/text_stream.h"

#include <algorithm>

#include "data/tokenizer/unicode.h"

namespace ds {
namespace {

constexpr size_t kWindow = 64, kKept = 16;

// Whether what comes before these tokens can no longer matter to what they add to a text: it begins with a character,
// and decoders that strip blanks have found its first letter.
bool stands_alone(std::string_view text) {
  return !text.empty() && (static_cast<u8>(text[0]) & 0xC0) != 0x80 && text.find_first_not_of(" \t\r\n") != text.npos;
}

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, std::span<const i32> prompt)
    : tokenizer_(tokenizer), window_(prompt.begin(), prompt.end()) {
  known_ = tokenizer_.decode(window_).size();
}

std::string TextStream::push(i32 id) {
  window_.push_back(id);
  std::string added = take(false);
  if (window_.size() < kWindow) return added;
  // The window moves on where its text is known up to its end: then both have the same to come.
  const std::vector<i32> kept(window_.end() - kKept, window_.end());
  const std::string all = tokenizer_.decode(window_), text = tokenizer_.decode(kept);
  if (known_ == all.size() && stands_alone(text)) {
    window_ = kept;
    known_ = text.size();
  }
  return added;
}

std::string TextStream::end() { return take(true); }

std::string TextStream::take(bool all) {
  const std::string text = tokenizer_.decode(window_);
  const std::string_view whole = all ? std::string_view(text) : tokenizer::whole_characters(text);
  const size_t from = std::min(known_, whole.size());
  known_ = whole.size();
  return std::string(whole.substr(from));
}

}  // namespace ds
