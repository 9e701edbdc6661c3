// SPDX-License-Identifier: Apache-2.0
#pragma once
// What gradients still need when each group has summed its own: the two uses of tied embeddings are added, equal copies
// on ranks of tp whose gradients are parts are summed, and rows with a divisor of their own are brought to that of all
// others. Each is a fold in rank order of fp32 slices that all its ranks cut alike, so copies stay equal bit for bit.

#include <vector>

#include "device/device.h"
#include "update/update_plan.h"

namespace ds::update {

// Whom a rank talks to at the end of a step. dp: those with the same parameters; groups of it have their own. outer: of
// other workers.
struct Axes {
  Communicator &dp, &tp, &pp, &outer;
};

class Combine {
 public:
  // All outlive it.
  Combine(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, MemoryLedger& ledger, Device& device);
  // When the groups' sums are final; or `own`: each rank's, of which it has all. Collective.
  void run(bool own = false);
  // The accumulated gradient of a piece that this rank holds, of whichever group.
  zero::TierLease gradient(const zero::Piece& piece, zero::LeaseTo access) const {
    return shards_[plan_.row_of(piece.param).group]->gradient(piece, access);
  }
  // Elements of such a piece that are leased at once: all, where that is the memory in which they stay.
  i64 most_leased(const zero::Piece& piece) const noexcept {
    const zero::GradStore& grads = shards_[plan_.row_of(piece.param).group]->grads();
    return grads.in_place() ? piece.count : std::min(grads.layout().largest_slice(), zero::StateStore::kLeaseElems);
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
