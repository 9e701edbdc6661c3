// SPDX-License-Identifier: Apache-2.0
#pragma once
// The samples of data files: what an objective makes of a stream of tokens, or whole documents of it.

#include <map>
#include <memory>
#include <string>

#include "data/data.h"
#include "data/objective.h"
#include "data/packing.h"
#include "ds/sample_source.h"

namespace ds {

class FileSamples final : public SampleSource {
 public:
  // Requires: at least one sample in `stream`.
  FileSamples(TokenStream stream, i64 seq_length, i64 vocab_size, std::shared_ptr<const Objective> objective);

  i64 count() const override { return count_; }
  // Throws as TokenStream::read.
  void sample(i64 k, RngKey key, std::span<i32> inputs, std::span<i32> targets) const override;
  bool documents(i64 k, std::span<i32> begins) const override;
  // All that samples depend on beside the stream.
  std::string identity() const override { return objective_->description(); }
  void will_need(i64 k) const noexcept override;

  // Adds the stream's documents and samples to `survey`, and to `lengths` how many documents have which length.
  void survey_documents(DocumentSurvey& survey, std::map<i64, i64>& lengths) const;
  const Packing* packing() const noexcept { return packing_.get(); }

 private:
  TokenStream stream_;
  i64 seq_length_, vocab_size_;
  std::shared_ptr<const Objective> objective_;
  std::unique_ptr<const Packing> packing_;  // null: samples follow each other
  i64 count_;
};

}  // namespace ds
