// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps of an optimizer around the optimizer (DilocoConfig): workers, which train for themselves, send each other
// what their steps have made of the parameters, and all go on from the same ones. What a rank owns of them meets what
// the ranks of the same place in other workers own. Sums are in fp32, in the order of workers; what travels as codes is
// decoded first, also a rank's own.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "update/combine.h"

namespace ds::update {

class OuterStep {
 public:
  // Takes the memory of what is sent as codes and a few numbers (Tag::Workspace); all outlive it. Collective over
  // `outer`, and run() too.
  OuterStep(const UpdatePlan& plan, zero::AllShards& shards, Combine& combine, Communicator& outer, Device& device,
            MemoryLedger& ledger);

  // Parameters were set from outside before a first update: workers have them in common.
  void begin();
  // A fragment meets, behind the update of a step, and what has been sent takes effect: at once, or, where it travels
  // beside training (overlap_steps), behind the update of a later step, as long as no other fragment meets. Without
  // what was sent nothing happens. Parameters are this rank's own then: others still have to get them.
  void send(i64 fragment);
  bool land(i64 fragment);

  // The pieces of a fragment whose gradients lie side by side are one, in the order of accumulators.
  const std::vector<zero::Piece>& sums(i64 fragment) const noexcept { return fragments_[fragment].sums; }
  i64 num_fragments() const noexcept { return std::ssize(fragments_); }

  // What this rank has of its own between meetings, fp32, of the device, by names for checkpoints, and after it was
  // set. Of the first worker it is the state of the run.
  using RankLocal = std::vector<std::pair<std::string, TensorView>>;
  RankLocal rank_local();
  void rank_local_was_set();
  // What is under way of a fragment that has met, of every worker, for which it waits; nothing without overlap_steps.
  RankLocal under_way();
  void under_way_was_set();

 private:
  struct Fragment {
    std::vector<std::vector<zero::TilePiece>> held;  // by UpdatePlan::shards
    std::vector<zero::Piece> sums;
  };
  class Always final : public zero::VerdictHandle {  // the verdict of who has no gradients
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
  // f(part, where it is in what travels), for the sums of a fragment.
  void for_each_part(const Fragment& f, FunctionRef<void(const zero::Piece&, i64)> visit);
  void arrive();
  // visit(piece, its state), of all pieces.
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
  // Of overlap_steps: sums of a fragment, fp32, what this worker sent and then what all did; which fragment's; [1] fp32
  // for checkpoints: that, from 1.
  Buffer travels_, number_;
  i64 under_way_ = kNone;
  bool arrived_ = false;
  Ticket ticket_;
  std::vector<TensorView> sources_;  // scratch
  Always always_;
};

}  // namespace ds::update
