// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples of whole documents: only documents longer than a sample are cut. Best fit decreasing (Ding et al.: "Fewer
// Truncations Improve Language Modeling", 2024): from the longest document to the shortest, each goes into the sample
// with the least remaining room that is enough. A document longer than a sample is cut after every seq_length tokens,
// and its rest is packed like the others. Where documents begin is the stream's knowledge.

#include <vector>

#include "data/data.h"

namespace ds {

class Packing {
 public:
  // Reads the stream once. Takes 16 bytes for each document and 8 for each sample. Throws as
  // TokenStream::for_each_document, and Errc::Config if no document has two tokens, so that none could be predicted.
  Packing(const TokenStream& stream, i64 seq_length);

  i64 num_samples() const noexcept { return std::ssize(first_) - 1; }
  i64 num_documents() const noexcept { return num_documents_; }  // that predict a token
  i64 num_cut() const noexcept { return num_cut_; }              // that are too long, or that data.split cuts
  i64 num_tokens() const noexcept;                               // that samples hold, without their filling
  // Documents that data.document_token does not end and that another one follows in their sample.
  i64 num_exposed() const noexcept;
  // Inputs are the documents one after another, filled up with data.document_token, or 0. The target of a token is the
  // next token of its document, as TokenStream::read_targets returns it. That of the last token is the document_token
  // that begins the next document; if there is none, it has no target, nor has the filling.
  void make_sample(const TokenStream& stream, i64 sample, i64 vocab_size, std::span<i32> inputs,
                   std::span<i32> targets) const;
  // begins[t] = the place in the sample at which the document of token t begins. Each token of the filling is a
  // document.
  void find_documents(i64 sample, std::span<i32> begins) const noexcept;
  // As TokenStream::will_need, for the tokens of a sample.
  void will_need(const TokenStream& stream, i64 sample) const noexcept;

 private:
  // Tokens of the stream.
  struct Piece {
    i64 begin;
    i32 count;
    bool has_next;  // the token after it is the target of its last one
    bool has_end;   // data.document_token ends it
  };
  // Returns the number of its pieces.
  i64 add_document(i64 begin, i64 count, bool has_next, bool has_end);
  void pack();

  i64 seq_length_, num_documents_ = 0, num_cut_ = 0;
  i32 filling_;
  std::vector<Piece> pieces_;  // sample by sample
  std::vector<i64> first_;     // piece of each sample, and behind the last one
};

}  // namespace ds
