// SPDX-License-Identifier: Apache-2.0
#include "data/file_samples.h"

#include "base/check.h"

namespace ds {

FileSamples::FileSamples(TokenStream stream, i64 seq_length, i64 vocab_size, std::shared_ptr<const Objective> objective)
    : stream_(std::move(stream)), seq_length_(seq_length), vocab_size_(vocab_size), objective_(std::move(objective)) {
  if (const i64 token = objective_->packs_documents_of(); token >= 0)
    packing_ = std::make_unique<Packing>(stream_, seq_length_, narrow<i32>(token), vocab_size_);
  count_ = packing_ ? packing_->num_samples() : objective_->num_samples(stream_.num_tokens(), seq_length_);
  DS_ASSERT(count_ > 0);
}

void FileSamples::sample(i64 k, RngKey key, std::span<i32> inputs, std::span<i32> targets) const {
  if (packing_) return packing_->make_sample(stream_, k, vocab_size_, inputs, targets);
  objective_->make_sample(stream_, k, key, vocab_size_, inputs, targets);
}

void FileSamples::will_need(i64 k) const noexcept {
  if (packing_) return packing_->will_need(stream_, k);
  stream_.will_need(k * objective_->stride(seq_length_), objective_->extent(seq_length_));
}

}  // namespace ds
