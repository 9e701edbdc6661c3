// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work-dtype parameters of one rank, at every ZeRO stage behind the same leases. Stages 0 to 2 keep them whole;
// stage 3 keeps this rank's slices (and the persistent segments whole) and gathers a unit when the plan says so, ahead
// of its use. ZeRO++ (Wang et al., 2023) may change how: slices travel as codes (qwZ: all ranks, the owner too, then
// use what these say; slices stay exact), and the first gather after an update leaves a second shard with the ranks of
// a group, out of which they gather until the next update (hpZ: the same bits).

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/secondary_shard.h"
#include "device/device.h"
#include "zero/gather_plan.h"
#include "zero/piece_memory.h"

namespace ds::zero {

class ParamStore;

// The full parameters of the units of one access, valid until the lease ends. Move-only.
class ParamLease {
 public:
  ParamLease(ParamLease&& other) noexcept : store_(std::exchange(other.store_, nullptr)) {}
  ParamLease& operator=(ParamLease&&) = delete;
  ~ParamLease();
  // The rows of a unit of this access, in order; null: those of another group.
  std::span<const TensorView> rows(i64 unit) const noexcept;

 private:
  friend class ParamStore;
  explicit ParamLease(ParamStore* store) : store_(store) {}
  ParamStore* store_;
};

class ParamStore final : public PieceMemory {
 public:
  struct Options {
    std::string axis = "dp";  // of the ranks: names what they send
    DType work = DType::F32;
    i64 allgather_bucket = 0;      // elements published in one all-gather
    i64 pool_elems = 0;            // the largest pool_elems of all plans that will be begun
    std::vector<bool> coded = {};  // by unit: its slices travel in 8 bits (stage 3); empty: none
  };
  // rows[u]: the rows of unit u. Collective: allocates in the communicator's memory. `tier`: where the slices of stage
  // 3 stay; empty: device memory.
  // `near`: a part of the ranks, who keep second shards where there are several; null: nobody does.
  ParamStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
             Device& device, MemoryLedger& ledger, const Options& options, const MakeArray& tier = {},
             Communicator* near = nullptr);

  // Starts a pass over plan.accesses; every acquire() is the next access. A plan without any gathers nothing: that of
  // stages 0 to 2, and of a rank that has everything whole.
  void begin(const GatherPlan& plan);
  ParamLease acquire();
  // Starts to gather a unit into the pool: what acquire() does where the plan says so.
  void gather(const GatherStep::Launch& launch);
  // Waits until a unit that was gathered is there; behind it on the device it is.
  void arrive(i64 unit);
  bool keeps_second_shards() const noexcept { return !second_.empty(); }

  // Elements [first, first + count) of a segment in this rank's memory, of those that Layout::held() or a whole copy
  // covers.
  TierLease lease(const Segment& s, i64 first, i64 count, LeaseTo access) const;
  TierLease lease(const Piece& piece, LeaseTo access) const override {
    return lease(layout_.segments()[piece.segment], piece.segment_offset, piece.count, access);
  }
  bool in_place() const noexcept override { return shards_->in_place(); }
  void* on_host(const Piece& piece) const noexcept override;

  // Sends this rank's updated slices to all ranks that keep whole copies (nothing at stage 0).
  void publish();

 private:
  friend class ParamLease;
  bool whole(const Segment& s) const noexcept { return !layout_.states().shard_params || s.persistent; }
  void point_rows(const Segment& s, void* base);
  char* whole_segment(const Segment& s) const noexcept {
    return static_cast<char*>(whole_.data()) +
           segment_offset_[&s - layout_.segments().data()] * dtype_bytes(options_.work);
  }
  void end_access() noexcept;
  // All ranks' slices of a segment.
  TensorView full(const Segment& s, void* base) const noexcept {
    return TensorView::of(base, options_.work, {s.slice * layout_.num_ranks()});
  }
  SecondaryShard* second_shard(const Segment& s) noexcept {
    if (second_.empty()) return nullptr;
    auto& second = second_[&s - layout_.segments().data()];
    return second ? &*second : nullptr;
  }
  bool coded(i64 unit) const noexcept { return !options_.coded.empty() && options_.coded[static_cast<size_t>(unit)]; }
  char* wire(i64 offset) const noexcept { return wire_.as<char>().data() + offset + offset / kScaleShare; }
  // What codes of an element take, beside a byte: 1/32 of it, for no slice is shorter than 128 elements.
  static constexpr i64 kScaleShare = kSliceAlignment / 4;
  static constexpr size_t kStepsAhead = 4;
  void expect_launches();

  const Layout& layout_;
  Communicator& comm_;
  std::string gather_tag_;
  Device& device_;
  Options options_;
  Buffer whole_, pool_;
  Buffer wire_;  // codes on their way, as the pool is cut
  std::unique_ptr<TierArray> shards_;
  std::vector<i64> segment_offset_;             // elements, in whole_ or in shards_
  std::vector<std::vector<TensorView>> views_;  // per unit, per row
  std::vector<Ticket> arriving_;                // per unit
  std::vector<i64> arriving_at_;  // per unit, its place in the pool while it comes from all ranks; else -1
  std::vector<std::optional<SecondaryShard>> second_;  // per segment; none: empty
  std::vector<AllGatherSegment> published_;            // scratch of publish()
  std::vector<Ticket> tickets_;
  const GatherPlan* plan_ = nullptr;
  size_t next_ = 0;
};

}  // namespace ds::zero
