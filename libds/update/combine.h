// SPDX-License-Identifier: Apache-2.0
#pragma once
// Completes gradients after each group has summed its own: adds the two uses of tied embeddings, sums rows of which
// ranks of tp hold equal copies but compute parts of the gradient, and brings rows with a divisor of their own to the
// divisor of all others. Each sum is a fold in rank order of fp32 slices that all its ranks cut alike, so copies stay
// equal bit for bit.

#include <vector>

#include "device/device.h"
#include "update/update_plan.h"

namespace ds::update {

// The communicators of a rank at the end of a step. dp: the ranks with the same parameters; groups of it have their
// own. outer: the ranks at the same place in other workers of DiLoCo.
struct Axes {
  Communicator &dp, &tp, &pp, &outer;
};

class Combine {
 public:
  // All outlive it.
  Combine(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, MemoryLedger& ledger, Device& device);
  // After the groups' sums are final. own: each rank has sums of its own micro-batches, of all elements. Collective.
  void run(bool own = false);
  // The sum of the gradients of a piece that this rank holds, of any group.
  zero::TierLease gradient(const zero::Piece& piece, zero::LeaseTo access) const {
    return shards_[plan_.row_of(piece.param).group]->gradient(piece, access);
  }
  // The most elements of such a piece to lease at once: all of them if leases are the memory in which sums are stored.
  i64 most_leased(const zero::Piece& piece) const noexcept {
    const zero::GradStore& grads = shards_[plan_.row_of(piece.param).group]->grads();
    return grads.sums().in_place() ? piece.count
                                   : std::min(grads.layout().largest_slice(), zero::StateStore::kLeaseElems);
  }

 private:
  void add_uses_of_shared(bool own);
  void exchange(const CombinePlan::Exchange& e);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Axes axes_;
  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  Buffer exchange_;
  std::vector<TensorView> sources_;  // scratch
};

}  // namespace ds::update
