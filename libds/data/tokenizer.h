// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text to token ids and back, with the ids of the reference tokenizers: Hugging Face's tokenizers for tokenizer.json,
// vocab.json + merges.txt and vocab.txt; SentencePiece for tokenizer.model.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

enum class SpecialToken : u8 { Bos, Eos, Unk, Pad, Cls, Sep, Mask };

// Before the library and its version, at the end of the identity of a tokenizer that a library runs: versions may give
// other ids, as where pieces tie, and need not.
inline constexpr std::string_view kByLibrary = ", by ";

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of `text`, without the special tokens that some callers put around a text. Special tokens that are
  // spelt out in the text become their ids, as the reference does. What is not UTF-8 counts as U+FFFD, one for each
  // maximal part, as Python's errors="replace" reads it; "bytes" takes every byte as it is. Reentrant. Throws
  // Errc::Unavailable when a regular expression of the tokenizer needs too many steps.
  virtual void encode(std::string_view text, std::vector<i32>& ids) const = 0;
  // The text of `ids`, bytes that may end inside a character; special tokens are spelt out, ids without a token are
  // left out. The text of the first ids is a prefix of the text of all of them, up to whole characters.
  virtual std::string decode(std::span<const i32> ids) const = 0;

  virtual i64 vocab_size() const noexcept = 0;  // one more than the largest id, added tokens included
  virtual std::optional<i32> special(SpecialToken) const noexcept { return std::nullopt; }
  // Whether the reference puts Bos before a prompt.
  virtual bool adds_bos() const noexcept { return false; }
  // Names the kind and all that the ids depend on, the version of a library last: runs with equal identities see equal
  // ids.
  virtual std::string identity() const = 0;

  // The first place after `from` where `text` can be cut so that the ids of the two parts are together those of the
  // whole; text.size() if none is known.
  virtual size_t cut_after(std::string_view text, size_t from) const noexcept {
    static_cast<void>(from);
    return text.size();
  }
};

// "bytes" (one token per byte), or a path: a directory with one of tokenizer.json, vocab.json + merges.txt, vocab.txt,
// tokenizer.model (looked for in this order), or such a file itself. Throws Errc::Config (nothing there), Errc::Io,
// Errc::Corrupt (file and what is wrong), Errc::Unavailable (a kind or a part of a pipeline that is not supported,
// named).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path);

}  // namespace ds
