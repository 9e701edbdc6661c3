// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gradients of one rank, from the backward pass to the sums that an update reads. Backward overwrites the fresh
// gradient of a unit (zero/fresh_grads), or adds to the sums of the rank's own micro-batches (GradOptions::fused);
// commit() hands it over; the reduction that each segment has (zero/reduction) makes the sums of it (zero/grad_sums),
// while earlier layers compute. One mechanism for all stages.
//
// A matrix that two layers share has a unit for each use here, so that its gradient is the sum of two folds wherever
// the layers stand: on one pipeline stage or on two.

#include <memory>
#include <span>
#include <vector>

#include "zero/reduction.h"

namespace ds::zero {

class GradStore {
 public:
  // rows: by unit. `layout` and what `parts` refers to outlive it. Collective.
  GradStore(const Layout& layout, GradRows rows, GradOptions options, const GradParts& parts);
  GradStore(const GradStore&) = delete;
  GradStore& operator=(const GradStore&) = delete;

  // Before the gradients of a step.
  void begin(const GradStep& step);

  // The memory to which backward writes the gradients of `unit`, by row (null: of another group, or in tiles). Units
  // come in the order of their pass, in every micro-batch, and micro-batches in theirs. Waits until the memory is free.
  // commit() ends the lease.
  std::span<const TensorView> acquire(i64 unit);
  // The same memory, without a lease. A unit without gradients of its own, all null, is neither acquired nor committed.
  std::span<const TensorView> rows(i64 unit) const noexcept {
    return options_.fused ? sums_.rows(unit) : fresh_.rows(unit);
  }
  void commit(i64 unit, i64 micro);

  // After the last micro-batch: waits for all reductions. The sums that this rank owns are final, as far as these ranks
  // go.
  void finish();
  // The same of a unit that ends a bucket (GradOptions::ahead), after its last commit.
  void finish(i64 unit);
  // At stage 0: all ranks get the owned slices of all ranks, of the units in `wanted`.
  void gather(std::span<const i64> wanted);

  const GradSums& sums() const noexcept { return sums_; }
  const Layout& layout() const noexcept { return layout_; }
  // The state of reductions that checkpoints hold.
  std::vector<SavedState*> saved_states() const;

 private:
  void assign_reductions(const GradParts& parts);
  Reduction& reduction_of(const Segment& s) const noexcept {
    return *reductions_[reduction_[&s - layout_.segments().data()]];
  }
  Reduction& dense() const noexcept { return *reductions_.back(); }
  void reduce(size_t bucket, bool continues);

  const Layout& layout_;
  const GradOptions options_;
  FreshGrads fresh_;
  GradSums sums_;
  std::vector<std::unique_ptr<Reduction>> reductions_;  // of options_, then the dense one
  std::vector<size_t> reduction_;                       // by segment: its place in reductions_
  std::vector<bool> summed_;  // by bucket: a micro-batch of this step is in its sums, and others will be added
  bool reduces_ = true;       // GradStep::reduces
};

}  // namespace ds::zero
