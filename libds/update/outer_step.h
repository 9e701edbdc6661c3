// SPDX-License-Identifier: Apache-2.0
#pragma once
// The outer optimizer of DiLoCo (DilocoConfig). Workers train for themselves; when a fragment of the parameters meets,
// they send each other the changes that their steps have made to it, and all continue from the same parameters. Each
// rank exchanges the slices that it owns with the ranks at the same place in other workers. Sums are in fp32, in the
// order of workers; changes that are sent as codes are decoded first, also a rank's own.

#include <string>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "update/combine.h"

namespace ds::update {

class OuterStep final : public zero::SavedState {
 public:
  // Allocates memory for codes, and for sums under way (Tag::Workspace). All outlive it. Collective over `outer`, as
  // are send() and land().
  OuterStep(const UpdatePlan& plan, zero::AllShards& shards, Combine& combine, Communicator& outer, Device& device,
            MemoryLedger& ledger);

  // Before the first update, after parameters were set from outside: workers have them in common.
  void begin();
  // After the update of a step in which a fragment meets, send() makes its changes, and with overlap_steps begins to
  // send them; land() applies the sum of all workers' changes: at once, or, with overlap_steps, after the update of a
  // later step, before another fragment meets. land() returns false, and does nothing, if the fragment was not sent.
  // Afterwards this rank's own slices are final; other ranks still have to get them.
  void send(i64 fragment);
  bool land(i64 fragment);

  // The pieces of a fragment, in the order of the sums of gradients, where neighbours are one piece.
  const std::vector<zero::Piece>& sums(i64 fragment) const noexcept { return fragments_[fragment].sums; }
  i64 num_fragments() const noexcept { return std::ssize(fragments_); }

  // Workers differ between meetings: the first one's parameters and states are those of the run, and are saved as such;
  // those of another worker are own_states(). Besides, the sums of a fragment that has met and not yet taken effect
  // (overlap_steps), for which read() waits.
  bool has_arrays(i64 update) const noexcept override { return static_cast<void>(update), outer_.size() > 1; }
  void read(i64 update, const std::string& elements, std::vector<zero::SavedArray>& arrays) override;
  void was_set(i64 update) override;
  void own_states(std::vector<zero::SavedArray>& arrays);

 private:
  struct Fragment {
    std::vector<std::vector<zero::TilePiece>> held;  // by UpdatePlan::shards
    std::vector<zero::Piece> sums;
  };
  class Always final : public zero::VerdictHandle {  // a finite verdict
   public:
    Always(Device& device, MemoryLedger& ledger);
    const GradVerdict* on_device() const noexcept override { return static_cast<const GradVerdict*>(memory_.data()); }
    const GradVerdict& resolve() override { return verdict_; }

   private:
    GradVerdict verdict_;
    Buffer memory_;
  };
  void pass(const Fragment& f, const UpdateParams& params);
  void sum(TensorView x);
  // Calls visit(part, its place in travels_) for the sums of a fragment.
  void for_each_part(const Fragment& f, FunctionRef<void(const zero::Piece&, i64)> visit);
  void arrive();
  // Calls visit(piece, its state) for all pieces.
  void for_each_lease(zero::LeaseTo access, FunctionRef<void(const zero::Piece&, const zero::StateLease&)> visit);

  const UpdatePlan& plan_;
  zero::AllShards& shards_;
  Combine& combine_;
  Communicator& outer_;
  Device& device_;
  std::vector<Fragment> fragments_;
  CodeFormat format_;
  Buffer wire_, decoded_;
  static constexpr i64 kNone = -1;
  // With overlap_steps: the changes of a fragment, fp32, of this worker and then the sum over all; and for checkpoints
  // [1] fp32: the number of that fragment from 1, or 0.
  Buffer travels_, number_;
  i64 under_way_ = kNone;
  bool arrived_ = false;
  Ticket ticket_;
  std::vector<TensorView> sources_;  // scratch
  Always always_;
};

}  // namespace ds::update
