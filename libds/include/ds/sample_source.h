// SPDX-License-Identifier: Apache-2.0
#pragma once
// Samples that a program brings instead of data files (ProgramParts::samples). A run shuffles them by data.seed, shares
// them among its ranks and resumes among them as it does with files.

#include <span>
#include <string>

#include "ds/error.h"
#include "ds/kernels/ops.h"

namespace ds {

// Numbered samples. They are a function of their number and the key, the same on every rank, in every run. All
// functions may be called by several threads at a time.
class DS_API SampleSource {
 public:
  virtual ~SampleSource() = default;

  // The number of samples of an epoch: at least 1, and always the same.
  virtual i64 count() const = 0;
  // Fills inputs and targets [data.seq_length] with sample k of [0, count()). Inputs are ids of the model's vocabulary.
  // The target of position t is the id that the model predicts there, or kIgnoredTarget, which counts in no loss. `key`
  // differs in every epoch, and is one and the same in evaluations: random draws take it and k. A step of
  // curriculum_learning trains on the first tokens only.
  virtual void sample(i64 k, RngKey key, std::span<i32> inputs, std::span<i32> targets) const = 0;
  // States in checkpoints which samples these are. A run resumes only from a step with the same identity, count,
  // data.seq_length and data.seed, so everything else that the samples depend on must be part of it.
  virtual std::string identity() const = 0;
  // Fills begins [data.seq_length] for runs that keep documents apart (data.separate_documents): for each token the
  // position at which its document begins in sample k. It neither falls nor exceeds the token's own position, and is
  // that of a token that begins at itself. False, and nothing filled in: data.document_token alone marks documents.
  virtual bool documents(i64 /*k*/, std::span<i32> /*begins*/) const { return false; }
  // Sample k is needed soon: a source on a disk may begin to read it. Must not wait.
  virtual void will_need(i64 /*k*/) const noexcept {}
};

}  // namespace ds
