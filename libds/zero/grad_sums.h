// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of a rank's gradients, read and written as fp32: the fold over (micro-batch, rank) of the slices that the rank
// owns (at stage 0, after they were gathered, of all slices). They are stored in fp32 or in 16 bits, to which a sum is
// rounded with each micro-batch (zero/rounded_array), on the device or in a tier. In "boundary" order with
// accumulation, and where steps may leave gradients on their ranks, there is also a full sum of the rank's own
// micro-batches (all Tag::GradAccum).

#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "zero/grad_plan.h"
#include "zero/tier_array.h"

namespace ds::zero {

// The sums of one rank: where each segment would begin in them if all of it were there; elements.
std::vector<i64> grad_accum_bases(const Layout& layout, const GradOptions& options, int rank);
// Elements of the sums of one rank.
i64 grad_accum_elems(const Layout& layout, const GradOptions& options);

class GradSums {
 public:
  // tier: where the sums of the slices that this rank owns are stored; empty: device memory. At stage 0, where each
  // rank holds all slices, they are in device memory. All outlive it. Collective.
  GradSums(const Layout& layout, GradRows rows, const GradOptions& options, Communicator& comm, Device& device,
           MemoryLedger& ledger, const MakeArray& tier);

  // The sums of this rank's own micro-batches of a unit, by row, for a backward pass that adds to them
  // (GradOptions::fused); null: of another group.
  std::span<const TensorView> rows(i64 unit) const noexcept { return views_[static_cast<size_t>(unit)]; }

  // The fp32 sums of elements [first, first + count) of a segment: of the slice that this rank owns, at stage 0 of all.
  TierLease lease(i64 segment, i64 first, i64 count, LeaseTo access) const {
    return owned_->lease((owned_base_[segment] + first) * 4, count * 4, access);
  }
  void expect(i64 segment, i64 first, i64 count) const {
    owned_->expect((owned_base_[segment] + first) * 4, count * 4);
  }
  // The slice of a segment that this rank owns; continues: it is added to, else overwritten.
  TierLease lease_owned(const Segment& s, bool continues) const {
    return lease(number(s), s.slice * rank_, s.slice, continues ? LeaseTo::Write : LeaseTo::Fill);
  }
  void expect_owned(const Segment& s) const { expect(number(s), s.slice * rank_, s.slice); }
  // Whether leases are the memory in which sums are stored.
  bool in_place() const noexcept { return owned_->in_place(); }
  // The address of sums that are stored in host memory other than the device's; otherwise null (TierArray::on_host).
  float* on_host(i64 segment, i64 first) const noexcept {
    return static_cast<float*>(owned_->on_host((owned_base_[segment] + first) * 4));
  }

  // All sums of this rank as stored, by grad_accum_bases, if it has those of all elements; and a segment of them.
  TensorView all() const noexcept {
    return TensorView::of(all_.data(), stored_, {all_.bytes() / dtype_bytes(stored_)});
  }
  TensorView all_of(const Segment& s) const noexcept { return all().rows(base_[number(s)], s.slice * num_ranks()); }
  // Adds a fresh gradient of a unit to the sum of this rank's own micro-batches, or overwrites the sum with it;
  // round_back: then overwrites the gradient with the sum, rounded.
  void accumulate(i64 unit, TensorView fresh, bool continues, bool round_back);
  // After a backward pass that adds to sums: rounds those of a unit to `fresh`; or, if they are those of all ranks,
  // moves them to where the sums of the slices that this rank owns are stored.
  void round(i64 unit, TensorView fresh) const;
  void keep(i64 unit) const;

 private:
  i64 number(const Segment& s) const noexcept { return &s - layout_.segments().data(); }
  i64 num_ranks() const noexcept { return layout_.num_ranks(); }
  TensorView all_of(i64 unit) const noexcept;
  std::unique_ptr<TierArray> as_fp32(std::unique_ptr<TierArray> kept, MemoryLedger& ledger) const;

  const Layout& layout_;
  Device& device_;
  const int rank_;
  const DType stored_;
  Buffer all_;                                  // of all elements, if this rank has them
  std::unique_ptr<TierArray> owned_;            // of the slices that this rank owns; may be a part of `all_`
  std::unique_ptr<TierArray> of_all_;           // of all elements, if that is another array
  std::vector<i64> base_, owned_base_;          // by segment: grad_accum_bases, and where it would begin in owned_
  std::vector<std::vector<TensorView>> views_;  // by unit, by row
};

}  // namespace ds::zero
