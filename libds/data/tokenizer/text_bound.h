// SPDX-License-Identifier: Apache-2.0
#pragma once
// How much text the parts of a tokenizer file may make of a text: a file of a few lines whose replacements feed each
// other asks for any amount.

#include "base/check.h"

namespace ds::tokenizer {

class TextBound {
 public:
  explicit TextBound(size_t bytes) : from_(bytes), most_(kLeast + kGrowth * bytes) {}
  // Throws Errc::Unavailable.
  void check(size_t bytes) const {
    DS_CHECK(bytes <= most_, Errc::Unavailable,
             "the tokenizer makes more than {} bytes of a text of {}: no tokenizer for texts does that", most_, from_);
  }

 private:
  // One character becomes 11 bytes for each of its own at most, by Unicode's compatibility forms; a mark for a blank
  // is three.
  static constexpr size_t kGrowth = 16, kLeast = size_t{1} << 16;
  size_t from_, most_;
};

}  // namespace ds::tokenizer
