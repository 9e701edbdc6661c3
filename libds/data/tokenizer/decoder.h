// SPDX-License-Identifier: Apache-2.0
#pragma once
// The "decoder" of a tokenizer.json: tokens, as the vocabulary spells them, back to text.

#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer/fields.h"
#include "data/tokenizer/text_bound.h"

namespace ds::tokenizer {

class Decoder {
 public:
  virtual ~Decoder() = default;
  // The text is the tokens that this leaves, one after the other. Bytes that are not (or not yet) UTF-8 stay what they
  // are, where the reference writes U+FFFD. Throws Errc::Unavailable where that is more text than TextBound allows.
  void apply(std::vector<std::string>& tokens) const;
  virtual void apply_within(std::vector<std::string>& tokens, const TextBound& bound) const = 0;
};

// ByteLevel WordPiece Metaspace Replace ByteFallback Fuse Strip Sequence; null puts blanks between tokens. Throws
// Errc::Unavailable, naming any other, and Errc::Corrupt.
std::unique_ptr<Decoder> make_decoder(const Json& part, const Place& place);

}  // namespace ds::tokenizer
