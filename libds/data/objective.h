// SPDX-License-Identifier: Apache-2.0
#pragma once
// Defines a sample of T positions: the tokens of the stream that it takes, and the inputs and targets made of them. A
// target of kIgnoredTarget counts in no loss. Objectives are immutable and reentrant, and what they draw depends on the
// key alone.
//
//   next token          inputs t0 .. t(T-1), targets t1 .. tT, of which those that the stream marks as no target do not
//                       count, nor those across the border of documents that are kept apart, unless
//                       DocumentRule::predicts(): samples share one token with their neighbour. Or whole documents:
//                       data/packing
//   masked tokens       [CLS] t0 .. t(T-3) [SEP], samples share nothing; [CLS] is in the first document, [SEP] in the
//                       last one, or alone where a token ends that. Devlin et al., "BERT" (2018), 3.1: of the
//                       positions that hold no special token, `probability` is chosen, rounded and at least one; a
//                       chosen one becomes [MASK] with probability 0.8, a random token with 0.1, and stays with 0.1;
//                       its target is what stood there, all others are kIgnoredTarget

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "data/data.h"
#include "data/tokenizer.h"
#include "ds/config.h"

namespace ds {

// The end of the description of an objective that packs documents.
inline constexpr std::string_view kPackedObjective = "packed by best fit";

class Objective {
 public:
  virtual ~Objective() = default;

  // Tokens from the beginning of a sample to that of the next, and tokens that a sample reads.
  virtual i64 stride(i64 seq_length) const noexcept = 0;
  virtual i64 extent(i64 seq_length) const noexcept = 0;
  i64 num_samples(i64 num_tokens, i64 seq_length) const noexcept {
    const i64 shared = extent(seq_length) - stride(seq_length);
    return num_tokens > shared ? (num_tokens - shared) / stride(seq_length) : 0;
  }

  // Fills inputs and targets [seq_length] with sample `sample`. `key` is that of the epoch, or of a validation. Throws
  // as TokenStream::read. Allocates: no.
  virtual void make_sample(const TokenStream& stream, i64 sample, RngKey key, i64 vocab_size, std::span<i32> inputs,
                           std::span<i32> targets) const = 0;

  // Fills begins [seq_length]: the place in the sample at which the document of each of its tokens begins. Throws as
  // TokenStream::document_end. Allocates: no.
  virtual void find_documents(const TokenStream& stream, i64 sample, std::span<i32> begins) const {
    stream.find_documents(sample * stride(std::ssize(begins)), begins);
  }

  // Samples are of whole documents (data/packing), and make_sample() and find_documents() are not asked.
  virtual bool packs_documents() const noexcept { return false; }

  // Whether tokens that are no target (TokenStream::read_targets) are none of its targets.
  virtual bool heeds_marks() const noexcept { return false; }

  // All that samples depend on beside the stream and the seed, in words: part of DataIdentity.
  virtual const std::string& description() const noexcept = 0;
};

std::unique_ptr<Objective> next_token();
std::unique_ptr<Objective> next_token_of_documents(i64 document_token);  // that ends them; negative: none
// mlm.probability and the three ids, all set.
std::unique_ptr<Objective> masked_tokens(const MlmConfig& mlm);

// The objective that trains `model`. Ids that data.mlm does not give are the tokenizer's, which may be null; throws
// Errc::Config naming the key of one that neither knows, or that lies outside the vocabulary.
std::unique_ptr<Objective> make_objective(const ModelConfig& model, const DataConfig& data, const Tokenizer* tokenizer);

}  // namespace ds
