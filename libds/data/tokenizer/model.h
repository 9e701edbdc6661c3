// SPDX-License-Identifier: Apache-2.0
#pragma once
// The "model" of a tokenizer.json: a vocabulary, and how a word becomes ids.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer/fields.h"
#include "data/tokenizer/identity.h"

namespace ds::tokenizer {

// Tokens as the file spells them, and their ids, 0 .. 2^31 - 1. Two tokens with one id are Errc::Corrupt.
class Vocabulary {
 public:
  Vocabulary(const Json& object, const Place& place);
  // The ids are the places in the list. A token that stands there twice is Errc::Corrupt.
  Vocabulary(const std::vector<std::string>& list, const Place& place);

  std::optional<i32> id(std::string_view token) const;
  const std::string* token(i32 id) const;            // null: no token has it
  i64 num_ids() const noexcept { return num_ids_; }  // one more than the largest
  i64 num_tokens() const noexcept { return static_cast<i64>(ids_.size()); }
  const auto& ids() const noexcept { return ids_; }
  void digest(Digest& digest) const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const noexcept;
  };
  std::unordered_map<std::string, i32, Hash, std::equal_to<>> ids_;
  std::unordered_map<i32, const std::string*> tokens_;
  i64 num_ids_ = 0;
};

class Model {
 public:
  virtual ~Model() = default;
  // Appends the ids of a word that is not empty: UTF-8, or any bytes when byte-level. Reentrant.
  virtual void encode(std::string_view word, std::vector<i32>& ids) const = 0;
  const Vocabulary& vocabulary() const noexcept { return vocabulary_; }
  virtual std::string_view kind() const noexcept = 0;
  virtual std::optional<std::string> unk_token() const = 0;
  // A word is the same to the model as its parts, cut before each of these characters that stands behind another one;
  // empty: there is no such character.
  virtual std::string_view cuts_before() const noexcept { return {}; }
  // Adds all that ids depend on.
  virtual void digest(Digest& digest) const;

 protected:
  explicit Model(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  Vocabulary vocabulary_;
};

// BPE, WordPiece and Unigram. byte_level: words are bytes, and the vocabulary spells them in GPT-2's alphabet. Throws
// Errc::Unavailable, naming any other kind, and Errc::Corrupt.
std::unique_ptr<Model> make_model(const Json& part, const Place& place, bool byte_level);
std::unique_ptr<Model> make_bpe(Fields& fields, Vocabulary vocabulary, bool byte_level);
std::unique_ptr<Model> make_word_piece(Fields& fields, Vocabulary vocabulary);
std::unique_ptr<Model> make_unigram(Fields& fields);

}  // namespace ds::tokenizer
