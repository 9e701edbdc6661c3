// SPDX-License-Identifier: Apache-2.0
#pragma once
// SentencePiece's models (unigram, BPE, word, char), run by its library.

#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizer/model.h"

namespace ds::tokenizer {

// The content of a tokenizer.model.
class SentencePieceFile {
 public:
  // Throws Errc::Corrupt, or Errc::Unavailable for a tiktoken file.
  SentencePieceFile(std::string path, std::string bytes);

  struct Piece {
    std::string text;
    bool is_control, is_user_defined;
  };
  const std::string& path() const noexcept { return path_; }
  std::string content_identity() const;
  std::vector<Piece> pieces() const;
  std::optional<i32> special(SpecialToken) const;
  // Whether the library changes more of a text than its blanks: by rules, or by removing blanks.
  bool normalizes() const;

  bool is_unigram() const;

  // By SentencePiece itself, as it prepares and reads a text.
  std::unique_ptr<Tokenizer> tokenizer(std::vector<EndToken> ends) const;
  // As the model of a pipeline. as_is: words are whole texts, which the library prepares; otherwise they are prepared
  // already, and the library adds and removes nothing.
  std::unique_ptr<Model> model(bool as_is) const;

 private:
  std::string path_, bytes_;
};

// After the identity of a tokenizer: the library and its version.
std::string by_sentence_piece();

}  // namespace ds::tokenizer
