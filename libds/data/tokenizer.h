// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text to token ids and back, with the ids of the reference: AutoTokenizer of transformers for a directory whose files
// name a class; otherwise Hugging Face's tokenizers for tokenizer.json, vocab.json + merges.txt and vocab.txt, and
// SentencePiece for tokenizer.model.

#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

enum class SpecialToken : u8 { Bos, Eos, Unk, Pad, Cls, Sep, Mask };
inline constexpr SpecialToken kSpecialTokens[] = {SpecialToken::Bos, SpecialToken::Eos, SpecialToken::Unk,
                                                  SpecialToken::Pad, SpecialToken::Cls, SpecialToken::Sep,
                                                  SpecialToken::Mask};
inline constexpr size_t kNumSpecialTokens = std::size(kSpecialTokens);
std::string_view special_name(SpecialToken);  // "bos_token", as files call it

// A token that a text can spell out, or that has a role.
struct NamedToken {
  std::string role;  // special_name(), or "" for an added token
  std::string content;
  i32 id = 0;
  std::string source;  // the file, or the class of transformers, that names it
};

// A token that ends a generated text.
struct EndToken {
  i32 id = 0;
  std::string source;  // "FILE: eos_token_id", or "FILE: eos_token"
};

// Facts in the files of a tokenizer beside its ids.
struct TokenizerFacts {
  std::vector<NamedToken> named = {};          // special tokens, then the other added tokens by their ids
  std::vector<EndToken> ends = {};             // eos_token, and eos_token_id of the files; each once
  bool adds_eos = false;                       // the reference puts eos_token after a text
  std::vector<std::string> warnings = {};      // of the files, for every use
  std::vector<std::string> when_writing = {};  // for generation alone
};

// In the identity of a tokenizer, before the hash of what the files beside the vocabulary change.
inline constexpr std::string_view kOtherFiles = ", other files xxh3 ";
// In the identity of a tokenizer, before the names and hashes of the parts on which ids depend.
inline constexpr std::string_view kParts = ", parts ";
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

  // A token as its file spells it; empty if there is none.
  virtual std::string piece(i32 id) const = 0;
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

  const TokenizerFacts& facts() const noexcept { return facts_; }
  // Warnings for a user about the texts that have been encoded so far.
  virtual std::vector<std::string> warnings_of_texts() const { return {}; }

 protected:
  void add_eos_to_ends(const std::string& file);  // the tokenizer's own; once special() and facts_.named are known
  TokenizerFacts facts_;
};

// "bytes" (one token per byte), or a path: a directory with one of tokenizer.json, vocab.json + merges.txt, vocab.txt,
// tokenizer.model (looked for in this order), or such a file itself. The files beside it count too, as
// data/tokenizer/definition.h states. Throws Errc::Config (nothing there), Errc::Io, Errc::Corrupt (file and what is
// wrong), Errc::Unavailable (a kind or a part of a pipeline that is not supported, named).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path);

// Whether two identities are those of one tokenizer: all parts are the same on which the ids of texts depend. They may
// differ in the version of a library and in the form of files. Identities of older versions state no parts, so their
// files are compared.
bool is_same_tokenizer(std::string_view a, std::string_view b);
// Says how they differ, where they do: `saved_by` is "the run was started with" or the like.
std::string difference_of_tokenizers(std::string_view now, std::string_view saved, std::string_view saved_by);

// The tokens that end a generated text: those of the tokenizer, and eos_token_id of generation_config.json and
// config.json in `model_folder` (empty: none). Throws Errc::Corrupt, and Errc::Unavailable for one that is not among
// the vocab_size ids of the model.
std::vector<i32> end_tokens(const Tokenizer& tokenizer, const std::string& model_folder, i64 vocab_size);

}  // namespace ds
