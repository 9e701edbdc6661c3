// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of all parameters whose gradients are reduced over one group of ranks: the group's layout and
// communicator, parameters, gradients, masters and optimizer states. Every model has the group dp. If some of its rows
// are reduced over a split of dp (Model::splits), each split is a group too; a unit has its rows of each group in that
// group's Shards, under the same number.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "zero/grad_store.h"
#include "zero/ownership.h"
#include "zero/param_store.h"
#include "zero/state_store.h"

namespace ds::zero {

// The plan of a Shards: everything that is known before a run. Pure.
struct ShardsPlan {
  std::string axis = "dp";  // the group's name
  int rank = 0;             // of this rank in it
  Layout layout;
  StateLayout states;  // of masters and optimizers
  GradOptions grads;
  // Units of gradients are those of parameters, then the shared unit once more, for its use by the head. Frozen
  // rows have no place there.
  Layout grad_layout;
  i64 shared_grads = kSharedUnit;  // the unit in which gradients of the shared unit are summed
  std::vector<Bucket> buckets;
  std::vector<i64> gathered_grads;  // units whose sums all ranks get at stage 0
  GatherPlan train_gathers;
  std::vector<GatherPlan> eval_gathers;  // of each chunk's forward pass
  i64 gather_pool_elems = 0;             // the maximum of pool_elems over these plans
  i64 allgather_bucket = 0;
  std::vector<bool> coded = {};      // by unit: its parameters are gathered as 8-bit codes; empty: none are
  std::vector<DpSplit> zeropp = {};  // plan::zeropp_splits
  bool reads_directly = false;       // ParamStore::Options::reads_directly
  bool undoes = false;               // StateStore::Parts::undoes
  // Elements of parameters of all ranks together, with padding; and those of them that every rank holds whole.
  i64 padded = 0, whole = 0;

  // The segment of grad_layout with the gradients of a trained segment of layout.
  i64 grad_segment(i64 segment) const noexcept {
    const i64 unit = layout.segments()[segment].unit;
    // The unit of the head's use of the shared one comes before the units of tiles.
    const i64 grad_unit = unit == kSharedUnit ? shared_grads : unit + (layout.is_tile(unit) ? 1 : 0);
    return grad_layout.units()[grad_unit].first_segment + segment - layout.units()[unit].first_segment;
  }
  // Whether a segment is gathered, or decoded, for each use; others are always whole.
  bool gathers(const Segment& s) const noexcept {
    return StoredParams::has(s) || (layout.states().shard_params && !s.persistent);
  }
  // Whether this rank has gradients of a unit, and a place for a parameter.
  bool has_grads(i64 unit) const noexcept { return grad_layout.units()[unit].num_segments > 0; }
  bool has_param(i64 param) const noexcept { return layout.rows()[param].segment >= 0; }
};

// The makers of the memory of masters and states, sums of gradients and slices of parameters; empty: device memory.
struct Tiers {
  MakeStates states = {};
  MakeArray grads = {}, params = {};
};

class Shards {
 public:
  using Rows = std::span<const std::span<const model::ParamRow>>;
  // Rows of parameters and of gradients, by unit. A run that does not train has no gradients and no states. All but
  // `tiers` outlive it. Collective over the group.
  Shards(const ShardsPlan& plan, Rows rows, Rows grad_rows, bool trains, const GroupRanks& ranks, Device& device,
         MemoryLedger& ledger, const Tiers& tiers);
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  const ShardsPlan& plan() const noexcept { return plan_; }
  Communicator& comm() const noexcept { return comm_; }
  ParamStore& params() noexcept { return params_; }
  GradStore& grads() noexcept { return *grads_; }  // only in a run that trains
  StateStore& states() noexcept { return *states_; }
  // The sum of the gradients of a piece that this rank holds.
  TierLease gradient(const Piece& piece, LeaseTo access) const { return gradients_.lease(piece, access); }

 private:
  class Gradients final : public PieceMemory {
   public:
    explicit Gradients(const Shards& shards) : shards_(shards) {}
    TierLease lease(const Piece& p, LeaseTo access) const override {
      return shards_.grads_->sums().lease(segment(p), p.segment_offset, p.count, access);
    }
    void expect(const Piece& p) const override { shards_.grads_->sums().expect(segment(p), p.segment_offset, p.count); }
    bool in_place() const noexcept override { return !shards_.grads_ || shards_.grads_->sums().in_place(); }
    void* on_host(const Piece& p) const noexcept override {
      return shards_.grads_->sums().on_host(segment(p), p.segment_offset);
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

// By ParamRow::group: dp, then the model's splits of it.
using AllShards = std::vector<std::unique_ptr<Shards>>;

// After pieces of this rank have changed: sends them to all ranks that hold them whole. Collective.
inline void publish(AllShards& all) {
  for (const auto& shards : all) shards->params().publish(ParamStore::Changed::All);
}
// The same after an update, which changes trained pieces only.
inline void publish_update(AllShards& all) {
  for (const auto& shards : all) shards->params().publish(ParamStore::Changed::Trained);
}

}  // namespace ds::zero
