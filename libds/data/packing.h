// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples of whole documents: only documents longer than a sample are cut. Best fit decreasing (Ding et al.: "Fewer
// Truncations Improve Language Modeling", 2024): from the longest document to the shortest, each goes into the sample
// with the least remaining room that is enough. A document longer than a sample is cut after every seq_length tokens,
// and its rest is packed like the others.

#include <vector>

#include "data/data.h"

namespace ds {

class Packing {
 public:
  // Reads the stream once. A document ends after `document_token`, and after the last token. Takes 16 bytes for each
  // document and 8 for each sample. Throws as TokenStream::read, and Errc::Config if no document has two tokens, so
  // that none could be predicted.
  Packing(const TokenStream& stream, i64 seq_length, i32 document_token, i64 vocab_size);

  i64 num_samples() const noexcept { return std::ssize(first_) - 1; }
  i64 num_documents() const noexcept { return num_documents_; }
  // Inputs are the documents one after another, filled up with `document_token`. The target of a token is the next
  // token of its document, as TokenStream::read_targets returns it; the last token and the filling have no target.
  void make_sample(const TokenStream& stream, i64 sample, i64 vocab_size, std::span<i32> inputs,
                   std::span<i32> targets) const;
  // As TokenStream::will_need, for the tokens of a sample.
  void will_need(const TokenStream& stream, i64 sample) const noexcept;

 private:
  // Tokens of the stream.
  struct Piece {
    i64 begin;
    i32 count;
    bool goes_on;  // the document continues after it
  };
  void add_document(i64 begin, i64 count);
  void pack();

  i64 seq_length_, num_documents_ = 0;
  i32 document_token_;
  std::vector<Piece> pieces_;  // sample by sample
  std::vector<i64> first_;     // piece of each sample, and behind the last one
};

}  // namespace ds
