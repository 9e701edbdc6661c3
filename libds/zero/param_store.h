// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work-dtype parameters of one rank, reached through the same leases at every ZeRO stage. Stages 0 to 2 keep them
// whole; stage 3 keeps this rank's slices, and persistent segments whole, and gathers a unit ahead of its use, when the
// plan says so. Frozen parameters that are stored in another form (zero/stored_params) are gathered at every stage, as
// they are stored, and decoded when they arrive. Two parts of ZeRO++ (Wang et al., 2023) change how: with qwZ slices
// are sent as codes, and all ranks, the owner too, use the decoded values, while slices stay exact; with hpZ the first
// gather after an update leaves a second shard on the ranks of a smaller group, from which they gather until the next
// update, with the same bits. Neither changes how stored forms are gathered. Matrices of FP8 products may travel as
// their codes (zero/fp8_gathers), which changes no bit of a product. A run that does not train may pack matrices
// (pack), and keep some as codes that products read (model::Storage::Codes): whole on every rank, and in no piece that
// is leased. Slices that are streamed from a file are read to the place where their unit is gathered, while layers
// compute, and rows of a table may be looked up without it (look_up).

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/secondary_shard.h"
#include "device/device.h"
#include "ds/communicator.h"
#include "zero/fp8_gathers.h"
#include "zero/gather_plan.h"
#include "zero/piece_memory.h"
#include "zero/stored_params.h"

namespace ds::zero {

class ParamStore;

// Calls f with each matrix of a view of one, or of a batch.
template <class F>
void for_matrices(const TensorView& v, F&& f) {
  if (v.rank == 2) return f(v);
  for (i64 i = 0; i < v.dim(0); ++i) {
    const TensorView one = v.rows(i, 1);
    TensorView matrix = TensorView::of(one.data, v.dtype, {v.dim(1), v.dim(2)});
    matrix.codes = v.codes;
    f(matrix);
  }
}

// The full parameters of the units of one access, valid until the lease ends. Move-only.
class ParamLease {
 public:
  ParamLease(ParamLease&& other) noexcept : store_(std::exchange(other.store_, nullptr)) {}
  ParamLease& operator=(ParamLease&&) = delete;
  ~ParamLease();
  // The rows of a unit of this access, in order; null: rows of another group.
  std::span<const TensorView> rows(i64 unit) const noexcept;

 private:
  friend class ParamStore;
  explicit ParamLease(ParamStore* store) : store_(store) {}
  ParamStore* store_;
};

class ParamStore final : public PieceMemory {
 public:
  struct Options {
    std::string axis = "dp";  // the group of ranks, as named in counts of messages
    DType work = DType::F32;
    i64 allgather_bucket = 0;      // elements published in one all-gather
    i64 pool_elems = 0;            // the maximum of pool_elems over all plans that will be begun
    std::vector<bool> coded = {};  // by unit: its slices are sent as 8-bit codes (stage 3); empty: none are
    // Stage 3: slices are read into the pool by a tier that can (TierArray::reads_directly); they are whole pages, and
    // travel in the work dtype.
    bool reads_directly = false;
  };
  // rows[u]: the rows of unit u. Collective: allocates in the communicator's memory. tier: where the slices of stage 3
  // are stored; empty: device memory. near: the ranks that keep second shards together, if there are several; null:
  // none.
  ParamStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
             Device& device, MemoryLedger& ledger, const Options& options, const MakeArray& tier = {},
             Communicator* near = nullptr);

  // Puts the matrices that this rank stores whole into the form that products of the device read fastest, if it has
  // one, and gives their views panels: once after each publish(), which follows new values of all pieces. Leases of
  // pieces then see the packed numbers. Only for runs that do not train.
  void pack();

  // Sets rows [first, first + count) of a matrix of codes, or of a batch of them, which are in the rows form of its
  // ParamRow::codes. All rows of a matrix are set before the next pass.
  void set_codes(i64 param, i64 first, i64 count, const void* rows);

  // Row i of `to` [n, row], work dtype = row rows[i] of a matrix that is gathered for its use, read alone; -1: zeros.
  // Collective.
  void look_up(i64 param, std::span<const i64> rows, TensorView to);

  // Starts a pass over plan.accesses; every acquire() is the next access. A plan without accesses gathers nothing: at
  // stages 0 to 2, and on a rank that holds everything whole.
  void begin(const GatherPlan& plan);
  // Ends a pass before its last access: waits for gathers that are under way, and forgets all that was gathered.
  void abandon();
  ParamLease acquire();
  // Starts to gather a unit into the pool, as acquire() does when the plan says so.
  void gather(const GatherStep::Launch& launch);
  // Waits for the gather of a unit: work enqueued on the device from then on finds it.
  void arrive(i64 unit);
  bool keeps_second_shards() const noexcept { return !second_.empty(); }

  // Elements [first, first + count) of a segment in this rank's memory: within Layout::held(), or a whole copy.
  TierLease lease(const Segment& s, i64 first, i64 count, LeaseTo access) const;
  TierLease lease(const Piece& piece, LeaseTo access) const override {
    return lease(layout_.segments()[piece.segment], piece.segment_offset, piece.count, access);
  }
  bool in_place() const noexcept override { return shards_->in_place() && !stored_.any() && codes_.bytes() == 0; }
  bool trained_in_place() const noexcept override { return shards_->in_place(); }
  void* on_host(const Piece& piece) const noexcept override;

  // Sends this rank's slices to all ranks that hold whole copies (nothing at stage 0): all of them, or those that an
  // update has changed.
  enum class Changed : u8 { All, Trained };
  void publish(Changed changed = Changed::All);

 private:
  friend class ParamLease;
  // Matrices of codes that are whole in codes_; slices of stage 3 have theirs in shards_.
  bool has_codes(const Segment& s) const noexcept {
    return s.storage == model::Storage::Codes && !layout_.states().shard_params;
  }
  bool whole(const Segment& s) const noexcept {
    return !StoredParams::has(s) && !has_codes(s) && (!layout_.states().shard_params || s.persistent);
  }
  // The bytes of a slice of this rank in shards_.
  i64 slice_at(const Segment& s) const noexcept {
    return segment_offset_[&s - layout_.segments().data()] * dtype_bytes(options_.work);
  }
  void* pool(i64 offset) const noexcept { return pool_data_ + offset * dtype_bytes(options_.work); }
  void wait_for_reads(i64 unit);
  void drop_gathered();
  void allocate_codes(MemoryLedger& ledger);
  void point_rows(const Segment& s, void* base);
  // Bytes [begin, begin + bytes) of a row that this rank has in shards_, or whole.
  TierLease lease_bytes(const RowPlace& place, i64 begin, i64 bytes, LeaseTo access) const;
  void pack_rows(TensorView matrix, const RowPlace& place);
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
  char* wire(i64 offset) const noexcept { return wire_.as<char>().data() + wire_bytes(offset); }
  i64 wire_bytes(i64 elems) const noexcept { return elems * wire_width_ + (wire_scales_ ? elems / kScaleShare : 0); }
  // Codes take a byte for each element and at most 1/32 of a byte for scales, since slices have 128 elements or more.
  static constexpr i64 kScaleShare = kSliceAlignment / 4;
  static constexpr size_t kStepsAhead = 4;
  // Most elements of a lease of a streamed matrix, but for one of kPackedRows rows, which are whole panels.
  static constexpr i64 kMostStreamed = i64{1} << 20, kPackedRows = 64;
  void expect_launches();
  TensorView own_slice(const Segment& s, const TierLease& lease) const noexcept {
    return TensorView::of(lease.data(), options_.work, {s.slice});
  }
  Ticket publish_maxima(Changed changed);

  const Layout& layout_;
  std::vector<std::span<const model::ParamRow>> rows_;  // by unit
  bool packed_ = false;
  Communicator& comm_;
  std::string gather_tag_, reduce_tag_;
  Device& device_;
  Options options_;
  Buffer whole_, pool_;
  char* pool_data_ = nullptr;  // of pool_, at a page if slices are read into it
  Buffer codes_;               // matrices of codes
  Buffer wire_;                // stored forms and codes that are being sent, placed like the pool
  i64 wire_width_ = 1;         // bytes of an element, without scales
  bool wire_scales_ = false;
  Buffer stored_by_rank_;  // below stage 3: stored forms, which publish() sends
  mutable StoredParams stored_;
  Fp8Gathers fp8_;
  std::unique_ptr<TierArray> shards_;
  std::vector<i64> segment_offset_;             // elements, in whole_ or in shards_
  std::vector<std::vector<TensorView>> views_;  // per unit, per row
  // Per segment: what its gather waits for (one message brings all segments of a unit that it can), and its place in
  // the pool while it is gathered from all ranks; else -1.
  std::vector<Ticket> arriving_;
  std::vector<i64> arriving_at_;
  std::vector<std::optional<TierArray::Reading>> reading_;  // per segment: of this rank's slice, into the pool
  bool carries_ = false;                                    // GatherPlan::carried is gathered
  std::vector<std::optional<SecondaryShard>> second_;       // per segment; none: empty
  std::vector<AllGatherSegment> gathered_, published_;      // scratch of gather() and publish()
  std::vector<Ticket> tickets_;
  const GatherPlan* plan_ = nullptr;
  size_t next_ = 0;
};

}  // namespace ds::zero
