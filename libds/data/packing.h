// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples of whole documents: as many as fit, so that none is cut but what is longer than a sample. Best fit decreasing
// (Ding et al.: "Fewer Truncations Improve Language Modeling", 2024): documents by length, the longest first, each into
// the sample with the least room that has enough. What is longer than a sample is cut behind every seq_length tokens,
// and what is left of it is packed like the others.

#include <vector>

#include "data/data.h"

namespace ds {

class Packing {
 public:
  // Reads the stream once: a document ends behind `document_token`, and behind the last token. Takes 16 bytes for each
  // document, and for each sample 8. Throws as TokenStream::read, and Errc::Config where there is no document of two
  // tokens, of which one could be predicted.
  Packing(const TokenStream& stream, i64 seq_length, i32 document_token, i64 vocab_size);

  i64 num_samples() const noexcept { return std::ssize(first_) - 1; }
  i64 num_documents() const noexcept { return num_documents_; }
  // Inputs are the documents one behind the other, and then `document_token`. The target of a token is the one behind
  // it in its document, as TokenStream::read_targets has it; of the last one, and of what fills up, there is none.
  void make_sample(const TokenStream& stream, i64 sample, i64 vocab_size, std::span<i32> inputs,
                   std::span<i32> targets) const;
  // The tokens of a sample are read soon.
  void will_need(const TokenStream& stream, i64 sample) const noexcept;

 private:
  // Tokens of the stream.
  struct Piece {
    i64 begin;
    i32 count;
    bool goes_on;  // with the token behind it
  };
  void add_document(i64 begin, i64 count);
  void pack();

  i64 seq_length_, num_documents_ = 0;
  i32 document_token_;
  std::vector<Piece> pieces_;  // sample by sample
  std::vector<i64> first_;     // piece of each sample, and behind the last one
};

}  // namespace ds
