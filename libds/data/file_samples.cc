// SPDX-License-Identifier: Apache-2.0
#include "data/file_samples.h"

#include "base/check.h"

namespace ds {

FileSamples::FileSamples(TokenStream stream, i64 seq_length, i64 vocab_size, std::shared_ptr<const Objective> objective)
    : stream_(std::move(stream)), seq_length_(seq_length), vocab_size_(vocab_size), objective_(std::move(objective)) {
  if (objective_->packs_documents()) packing_ = std::make_unique<Packing>(stream_, seq_length_);
  count_ = packing_ ? packing_->num_samples() : objective_->num_samples(stream_.num_tokens(), seq_length_);
  DS_ASSERT(count_ > 0);
}

void FileSamples::sample(i64 k, RngKey key, std::span<i32> inputs, std::span<i32> targets) const {
  if (packing_) return packing_->make_sample(stream_, k, vocab_size_, inputs, targets);
  objective_->make_sample(stream_, k, key, vocab_size_, inputs, targets);
}

bool FileSamples::documents(i64 k, std::span<i32> begins) const {
  packing_ ? packing_->find_documents(k, begins) : objective_->find_documents(stream_, k, begins);
  return true;
}

void FileSamples::survey_documents(DocumentSurvey& survey, std::map<i64, i64>& lengths) const {
  const i64 stride = objective_->stride(seq_length_), shared = objective_->extent(seq_length_) - stride;
  stream_.for_each_document([&](i64 begin, i64 end) {
    ++lengths[end - begin];
    ++survey.documents;
    // A token that two samples share is a target of the first one.
    if (!packing_ && (stream_.cuts(begin, end) || begin / stride != std::max(begin, end - 1 - shared) / stride))
      ++survey.cut;
  });
  survey.tokens += stream_.num_tokens();
  survey.longest = lengths.rbegin()->first;
  if (packing_) survey.cut += packing_->num_cut();
  const double before = survey.full * static_cast<double>(survey.samples);
  const double own = packing_ ? static_cast<double>(packing_->num_tokens()) / static_cast<double>(seq_length_)
                              : static_cast<double>(count_);
  survey.samples += count_;
  survey.full = (before + own) / static_cast<double>(survey.samples);
}

void FileSamples::will_need(i64 k) const noexcept {
  if (packing_) return packing_->will_need(stream_, k);
  stream_.will_need(k * objective_->stride(seq_length_), objective_->extent(seq_length_));
}

}  // namespace ds
