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
  // After the last backward pass of the head, on its stage (UpdatePlan::sends_use_ahead): starts to send its use of the
  // tied matrix to the first stage. Without this call run() sends it.
  void send_use();
  // After the groups' sums are final. own: each rank has sums of its own micro-batches, of all elements. Collective.
  void run(bool own = false);
  // Before gradients are written again: waits until all that run() has sent is taken.
  void finish();
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
  struct SharedPart;
  void for_each_shared(bool own, FunctionRef<void(const SharedPart&)> visit) const;
  zero::TierLease use(i64 unit, const SharedPart& part, zero::LeaseTo access) const;
  bool in_place() const noexcept { return shards_.front()->grads().sums().in_place(); }
  void add_uses_of_shared(bool own);
  void add_use_of_last_stage(bool own);
  void send_use(bool own);
  void take_sum(bool own);
  void exchange(const CombinePlan::Exchange& e);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Axes axes_;
  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  Buffer exchange_;
  std::vector<TensorView> sources_;  // scratch
  std::vector<Ticket> sent_;         // parts of the tied matrix's gradient that another stage has not taken
};

}  // namespace ds::update
