// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gradients of one rank. Backward overwrites a fresh gradient of a unit, rounded once to the wire dtype (kernels write
// the work dtype and fp32; for any other wire the unit is staged in fp32); commit() hands it over; units of a bucket
// are reduced together while earlier layers compute. What remains is fp32: the fold over (micro-batch, rank) of the
// owned slices (at stage 0, after finish(), of all slices); or it is seen as fp32 and kept in 16 bits, to which a sum
// is rounded with each micro-batch (zero/rounded_array). One mechanism for all stages:
//
//   stage 0, 1   every bucket has its own memory (the full gradients, Tag::Grads)
//   stage 2, 3   buckets take turns in two slots (one without overlap; Tag::Buckets)
//   "boundary" order with accumulation: a full fp32 sum of this rank's micro-batches comes in between (Tag::GradAccum)
//   keeps_own: all sums have room, for steps in which nothing is reduced and each rank keeps what is its own
//
// A unit with matrices in tiles is leased while these, which are units of their own, come and go: it has memory beside
// theirs.
//
// A matrix that two layers share has a unit for each use here, so that its gradient is the sum of two folds wherever
// the layers stand: on one pipeline stage or on two.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/nonzero_blocks.h"
#include "comm/quantized.h"
#include "device/device.h"
#include "zero/layout.h"
#include "zero/tier_array.h"

namespace ds::zero {

// The units reduced together, in the order of the backward pass.
struct Bucket {
  std::vector<i64> units;
  i64 elems = 0;      // padded
  bool open = false;  // of one unit, which is committed behind others
};
// Elements of a bucket whose sums are kept in 16 bits, unless a unit alone has more.
inline constexpr i64 kMostNarrowBucket = i64{1} << 22;

// Of a unit: 64-element blocks that are not zero, at most, in a gradient of one rank, and in the slice of a sum.
struct SparseUnit {
  i64 unit = 0;
  i64 of_rank = 0, of_sum = 0;
};

struct GradOptions {
  std::string axis = "dp";                    // of the ranks: names what they send
  DType work = DType::F32;                    // dtype of the parameters
  DType wire = DType::F32;                    // dtype of fresh gradients and of the wire
  DType sums = DType::F32;                    // dtype in which sums are kept
  i64 bucket_elems = 0;                       // reduce_bucket_size
  std::vector<std::vector<i64>> passes = {};  // the units that one instruction of a schedule acquires, in that order
  std::vector<i64> open = {};                 // units that are committed behind those of their tiles, ascending
  std::vector<i64> beside = {};               // units whose gradients are written beside those of another unit
  bool overlap = true;                        // overlap_comm
  i64 micro_batches = 1;                      // per step
  bool reduce_each_micro = false;             // "micro" order; else "boundary"
  bool keeps_own = false;                     // stage 0, 1: steps may leave the gradients of ranks apart
  int code_bits = 0;                          // what is in slices travels as codes of 8 or 4 bits; 0: in `wire`
  std::optional<LocoOptions> loco = {};       // what codes lose is added to what comes next
  std::vector<SparseUnit> sparse = {};        // units of which blocks that are zero do not travel, ascending

  bool staged() const noexcept { return wire != work && wire != DType::F32; }
  bool accumulates_locally() const noexcept { return !reduce_each_micro && micro_batches > 1; }
};

// Consecutive units of a pass until the next would exceed `bucket_elems`; a larger unit goes alone. No bucket waits for
// a second instruction, and units that are written together are in one.
std::vector<Bucket> plan_buckets(const Layout& layout, const GradOptions& options);

// The accumulators of one rank: where each segment begins in them, as if all of it were there; elements.
std::vector<i64> grad_accum_bases(const Layout& layout, const GradOptions& options, int rank);
// Elements of the accumulators of one rank, of the memory that fresh gradients need, and of the fp32 staging.
i64 grad_accum_elems(const Layout& layout, const GradOptions& options);
i64 fresh_grad_elems(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options);
i64 staging_elems(const Layout& layout, const GradOptions& options);

class GradStore {
 public:
  // `tier`: where accumulators of the slices that this rank owns stay; empty: device memory. At stage 0, where each
  // rank has all, they stay there. near, across: of coded gradients, ranks side by side, which are summed first, and
  // those with the same number among them; null: all ranks send to each other. Coded gradients travel unit by unit,
  // each until the next one is committed; sparse ones when a bucket is full, and nothing runs beside these.
  GradStore(const Layout& layout, std::span<const std::span<const model::ParamRow>> rows, Communicator& comm,
            Device& device, MemoryLedger& ledger, const GradOptions& options, const MakeArray& tier = {},
            Communicator* near = nullptr, Communicator* across = nullptr);

  // Whether the gradients of the steps from now on are reduced, or each rank has its own sums, of all elements
  // (options.keeps_own). Between steps.
  void reduce_over_ranks(bool wanted) noexcept { reduces_ = wanted; }

  // Gradients of the step that comes are multiplied by that. Between steps.
  void set_loss_scale(float scale) noexcept;

  // What codes have lost, and what is known of it (options.loco): of this rank alone. After it was set from outside. To
  // begin with nothing lost.
  std::vector<std::pair<std::string, TensorView>> rank_local();
  void rank_local_was_set();
  void forget_errors();
  // What the codes of each hop have lost, fp32, perhaps without elements; multiplied by error_scale().
  TensorView near_error() const noexcept { return errors_ ? errors_->of_node_hop() : TensorView{}; }
  TensorView across_error() const noexcept { return errors_ ? errors_->of_across_hop() : TensorView{}; }
  double error_scale() const noexcept {
    return static_cast<double>(error_scale_ / (errors_ ? errors_->pending_scale() : 1.0f));
  }

  // Where backward writes the gradients of `unit`, by row (null: of another group, or in tiles): units come in the
  // order of their pass, in every micro-batch, and micro-batches in theirs. Waits until the memory is free. commit()
  // ends the lease.
  std::span<const TensorView> acquire(i64 unit);
  void commit(i64 unit, i64 micro);

  // After the last micro-batch: waits for all reductions. What this rank owns is final, as far as these ranks go.
  void finish();
  // At stage 0: all ranks get the owned slices of all, of the units in `wanted`.
  void gather(std::span<const i64> wanted);

  // The fp32 accumulators of elements [first, first + count) of a segment of the layout (owned slices; at stage 0 all).
  TierLease lease(i64 segment, i64 first, i64 count, LeaseTo access) const {
    return owned_->lease((owned_base_[segment] + first) * 4, count * 4, access);
  }
  void expect(i64 segment, i64 first, i64 count) const {
    owned_->expect((owned_base_[segment] + first) * 4, count * 4);
  }
  // All sums of this rank, where they are in fp32 in place, by grad_accum_bases; of who keeps its own.
  TensorView own_sums() const noexcept { return TensorView::of(sums_.data(), DType::F32, {sums_.bytes() / 4}); }
  bool in_place() const noexcept { return owned_->in_place(); }
  // Where they stay, in host memory beside the device's; null: not there (TierArray::on_host).
  float* on_host(i64 segment, i64 first) const noexcept {
    return static_cast<float*>(owned_->on_host((owned_base_[segment] + first) * 4));
  }
  const Layout& layout() const noexcept { return layout_; }

 private:
  void accumulate(i64 unit, bool continues, bool back);
  void reduce(size_t bucket, bool continues);
  bool coded(const Segment& s) const noexcept { return coded_ && !s.persistent && sparse(s) == nullptr; }
  const SparseUnit* sparse(const Segment& s) const noexcept;
  void start_coded(const Segment& s, bool continues);
  void finish_coded();
  bool reduce_sparse(const Segment& s, bool continues);
  // The fresh gradient of a segment, with its padding.
  TensorView fresh(const Segment& s) const noexcept;
  TierLease owned_slice(const Segment& s, bool continues) const {
    return lease(&s - layout_.segments().data(), s.slice * comm_.rank(), s.slice,
                 continues ? LeaseTo::Write : LeaseTo::Fill);
  }
  void wait(size_t slot);
  // The array of all sums, where a rank has such.
  TierArray& sums() const noexcept { return sums_array_ ? *sums_array_ : *owned_; }
  std::unique_ptr<TierArray> as_fp32(std::unique_ptr<TierArray> kept) const;
  void zero_gaps(i64 unit);

  const Layout& layout_;
  Communicator& comm_;
  std::string reduce_tag_, gather_tag_, coded_tag_, sparse_tag_;
  Device& device_;
  MemoryLedger& ledger_;
  const OpTable& ops_;
  Stream& stream_;
  GradOptions options_;
  std::vector<Bucket> buckets_;
  std::optional<QuantizedReduceScatter> coded_;
  const Segment* coding_ = nullptr;   // which coded_ has under way
  bool coding_continues_ = false;     // to what is there already it is added
  std::optional<LocoErrors> errors_;  // of the segments that coded_ reduces, in their order
  std::vector<size_t> errors_of_;     // by segment: which of them
  std::optional<NonzeroBlocks> nonzero_;
  Buffer error_numbers_;   // [2] fp32 for rank_local(): calls, and error_scale()
  float error_scale_ = 1;  // loss scale of the gradients; errors_ takes it over with the next ones
  Buffer fresh_, staging_;
  Buffer sums_;                            // of all elements, where a rank sums its micro-batches, or has all
  std::unique_ptr<TierArray> owned_;       // of what this rank owns; may be a part of them
  std::unique_ptr<TierArray> sums_array_;  // of all elements, where it is another one
  bool reduces_ = true;
  std::vector<bool> summed_;      // by bucket: a micro-batch of this step is in its sums
  std::vector<i64> bucket_base_;  // elements in fresh_
  std::vector<size_t> slot_;      // which tickets_ entry guards the bucket's memory
  std::vector<Ticket> tickets_;
  std::vector<std::vector<TierLease>> landing_;   // by ticket: what is being reduced
  std::vector<i64> unit_bucket_, unit_base_;      // per unit; base in fresh_
  std::vector<std::vector<Layout::Range>> gaps_;  // per unit: Layout::gaps_of
  std::vector<i64> staging_base_;                 // per unit
  std::vector<i64> sums_base_, owned_base_;       // per segment: grad_accum_bases
  std::vector<std::vector<TensorView>> views_;
  std::vector<ReduceScatterSegment> segments_;  // scratch
  std::vector<AllGatherSegment> gathered_;      // scratch
};

}  // namespace ds::zero
