// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shards: what a rank has of the parameters that are reduced over one group of ranks: the group's layout, its
// communicator, parameters, gradients, masters and optimizer states. A model has a group, dp, and more where some of
// its rows are reduced over a split of it (Model::splits); a unit has its rows of each group in the Shards of that
// group, under the same number.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "zero/grad_store.h"
#include "zero/ownership.h"
#include "zero/param_store.h"
#include "zero/state_store.h"

namespace ds::zero {

// All that is known of them before a run; pure.
struct ShardsPlan {
  std::string axis = "dp";  // the group's name
  int rank = 0;             // of this rank in it
  Layout layout;
  StateLayout states;  // of masters and optimizers
  GradOptions grads;
  // Units of gradients are those of parameters, and once more the shared one, for its use by the head.
  Layout grad_layout;
  i64 shared_grads = kSharedUnit;  // the unit in which the gradient of the shared one is summed
  std::vector<Bucket> buckets;
  std::vector<i64> gathered_grads;  // units whose gradients all ranks have at stage 0
  GatherPlan train_gathers;
  std::vector<GatherPlan> eval_gathers;  // of each chunk's forward pass
  i64 gather_pool_elems = 0;             // the most that one of them needs
  i64 allgather_bucket = 0;
  std::vector<bool> coded = {};      // by unit: what is gathered of it travels in 8 bits; empty: of none
  std::vector<DpSplit> zeropp = {};  // plan::zeropp_splits
  // Elements of all ranks together, with their padding; of them, those that every rank has whole.
  i64 padded = 0, whole = 0;

  // The segment of grad_layout that has the gradients of one of layout.
  i64 grad_segment(i64 segment) const noexcept {
    const i64 unit = layout.segments()[segment].unit;
    // Behind the units of parameters stands that of the head's use of the shared one.
    const i64 grad_unit = unit == kSharedUnit ? shared_grads : unit + (layout.is_tile(unit) ? 1 : 0);
    return grad_layout.units()[grad_unit].first_segment + segment - layout.units()[unit].first_segment;
  }
  // Whether a unit has gradients here, and a parameter a place.
  bool has_grads(i64 unit) const noexcept { return grad_layout.units()[unit].num_segments > 0; }
  bool has_param(i64 param) const noexcept { return layout.rows()[param].segment >= 0; }
};

// Where a rank's masters and states, accumulated gradients and slices of parameters stay; empty: device memory.
struct Tiers {
  MakeStates states = {};
  MakeArray grads = {}, params = {};
};

class Shards {
 public:
  using Rows = std::span<const std::span<const model::ParamRow>>;
  // By unit, of parameters and of gradients. Collective over the group. Who does not train has no gradients, and no
  // states. near: the ranks of plan.near.
  Shards(const ShardsPlan& plan, Rows rows, Rows grad_rows, bool trains, Communicator& comm, Device& device,
         MemoryLedger& ledger, const Tiers& tiers, Communicator* near = nullptr, Communicator* across = nullptr);
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  const ShardsPlan& plan() const noexcept { return plan_; }
  Communicator& comm() const noexcept { return comm_; }
  ParamStore& params() noexcept { return params_; }
  GradStore& grads() noexcept { return *grads_; }  // of who trains
  StateStore& states() noexcept { return *states_; }
  // The accumulated gradient of a piece that this rank holds.
  TierLease gradient(const Piece& piece, LeaseTo access) const { return gradients_.lease(piece, access); }

 private:
  class Gradients final : public PieceMemory {
   public:
    explicit Gradients(const Shards& shards) : shards_(shards) {}
    TierLease lease(const Piece& p, LeaseTo access) const override {
      return shards_.grads_->lease(segment(p), p.segment_offset, p.count, access);
    }
    void expect(const Piece& p) const override { shards_.grads_->expect(segment(p), p.segment_offset, p.count); }
    bool in_place() const noexcept override { return !shards_.grads_ || shards_.grads_->in_place(); }
    void* on_host(const Piece& p) const noexcept override {
      return shards_.grads_->on_host(segment(p), p.segment_offset);
    }

   private:
    i64 segment(const Piece& p) const noexcept { return shards_.plan_.grad_segment(p.segment); }
    const Shards& shards_;
  };

  const ShardsPlan& plan_;
  Communicator& comm_;
  ParamStore params_;
  std::optional<GradStore> grads_;
  Gradients gradients_{*this};
  std::unique_ptr<StateStore> states_;
};

// By ParamRow::group: of dp, then of the model's splits of it.
using AllShards = std::vector<std::unique_ptr<Shards>>;

// After pieces of this rank have changed: other ranks get what they hold whole. Collective.
inline void publish(AllShards& all) {
  for (const auto& shards : all) shards->params().publish();
}

}  // namespace ds::zero
