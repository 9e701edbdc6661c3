// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text to token ids and back, with the ids of the reference tokenizers.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

enum class SpecialToken : u8 { Bos, Eos, Unk, Pad, Cls, Sep, Mask };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of `text` (UTF-8), without the special tokens that some callers put around a text. Special tokens
  // that are spelt out in the text become their ids, as the reference does. Reentrant.
  virtual void encode(std::string_view text, std::vector<i32>& ids) const = 0;
  // The text of `ids`, bytes that may end inside a character; special tokens are spelt out.
  virtual std::string decode(std::span<const i32> ids) const = 0;

  virtual i64 vocab_size() const noexcept = 0;  // one more than the largest id, added tokens included
  virtual std::optional<i32> special(SpecialToken) const noexcept { return std::nullopt; }
  // Names the kind and all that the ids depend on: runs with equal identities see equal ids.
  virtual std::string identity() const = 0;
};

// "bytes", or a path: a directory with one of tokenizer.json, vocab.json + merges.txt, vocab.txt, tokenizer.model
// (looked for in this order), or such a file itself. Throws Errc::Io, Errc::Corrupt (file and what is wrong),
// Errc::Unavailable (a kind or a part of a pipeline that is not supported, named).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path);

}  // namespace ds
