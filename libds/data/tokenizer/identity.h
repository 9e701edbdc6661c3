// SPDX-License-Identifier: Apache-2.0
#pragma once
// The identity of a tokenizer, a line of text that checkpoints keep:
//
//     BPE of 900 ids, tokenizer.json xxh3 HASH, other files xxh3 HASH, parts model HASH normalizer HASH ...[, by
//     LIBRARY]
//
// Two tokenizers are the same if their parts are: these alone decide on the ids of texts. The hashes of files are of
// older versions, which stated nothing else, and are compared where one of two identities states no parts.

#include <bit>
#include <string>
#include <string_view>

#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

// A hash of values, in their order.
class Digest {
 public:
  void add(std::string_view text);
  void add(i64 value) { add(std::string_view(reinterpret_cast<const char*>(&value), sizeof value)); }
  void add(i32 value) { add(static_cast<i64>(value)); }
  void add(bool value) { add(static_cast<i64>(value)); }
  void add(double value) { add(std::bit_cast<i64>(value)); }
  u64 value() const noexcept { return value_; }

 private:
  u64 value_ = 0;
};

// A normalizer or a pre-tokenizer as a tokenizer.json would state it in full: with the values that a missing member
// has, without members that are null or do not change ids.
Json in_full(const Json& part);

// "tokenizer.json xxh3 0123456789abcdef": the names and the content of what was read.
std::string content_identity(const std::string& name, std::string_view content);
// kOtherFiles and a hash of what the files beside the vocabulary change; an empty object: nothing.
std::string other_files_identity(const Json& changes);
// kParts and the names and hashes of all parts on which ids depend.
std::string parts_identity(const Digest& model, const Json& normalizer, const Json& pre_tokenizer,
                           const Digest& added_tokens);

}  // namespace ds::tokenizer
