// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory in which the backward pass writes a rank's gradients, rounded once to the wire dtype: kernels write the
// work dtype or fp32; for any other wire a unit is written in fp32 to a staging area first. Where backward adds to sums
// instead (GradOptions::fused), they hold what is sent of those; if nothing is, there is no such memory. At stages 0
// and 1 each bucket has its own memory (the full gradients, Tag::Grads); at stages 2 and 3 buckets take turns in two
// slots, or in one without overlap (Tag::Buckets). A unit whose matrices are in tiles is acquired while the tiles,
// which are units of their own, come and go: it has a slot beside theirs.

#include <span>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"
#include "zero/grad_plan.h"

namespace ds::zero {

// Elements of that memory, and of the fp32 staging area.
i64 fresh_grad_elems(const Layout& layout, std::span<const Bucket> buckets, const GradOptions& options);
i64 staging_elems(const Layout& layout, const GradOptions& options);

class FreshGrads {
 public:
  // All outlive it. Collective.
  FreshGrads(const Layout& layout, GradRows rows, const GradOptions& options, Communicator& comm, Device& device,
             MemoryLedger& ledger);

  const Bucket& bucket(size_t number) const noexcept { return buckets_[number]; }
  size_t num_buckets() const noexcept { return buckets_.size(); }
  size_t bucket_of(i64 unit) const noexcept { return unit_bucket_[static_cast<size_t>(unit)]; }
  // Buckets of one slot use the same memory, one after the other.
  size_t slot_of(size_t bucket) const noexcept { return slot_[bucket]; }
  size_t num_slots() const noexcept { return num_slots_; }

  // The memory to which backward writes the rows of a unit; null: rows of another group, or in tiles. None if fused.
  std::span<const TensorView> rows(i64 unit) const noexcept { return views_[static_cast<size_t>(unit)]; }
  // Before the first unit of a bucket is written: all that is not a row becomes zero, as in fresh memory.
  void zero_padding(size_t bucket);
  // After a unit was written: rounds it to the wire dtype, if it was staged.
  void round(i64 unit);

  // The gradient in the wire dtype, with padding: of a unit, and of a segment.
  TensorView unit(i64 unit) const noexcept;
  TensorView segment(const Segment& s) const noexcept;

 private:
  void place_buckets();
  void place_rows(GradRows rows, const GradOptions& options);
  TensorView at(i64 unit, i64 offset, i64 count) const noexcept;
  void zero(i64 unit, i64 offset, i64 count);
  void zero_gaps(i64 unit);

  const Layout& layout_;
  Device& device_;
  const DType wire_;
  const bool staged_, overlap_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> slot_;  // by bucket
  size_t num_slots_ = 0;
  std::vector<size_t> unit_bucket_;               // by unit
  std::vector<i64> unit_base_;                    // by unit: elements in fresh_
  std::vector<i64> staging_base_;                 // by unit: elements in staging_
  std::vector<std::vector<Layout::Range>> gaps_;  // by unit: Layout::gaps_of
  std::vector<std::vector<TensorView>> views_;    // by unit, by row
  Buffer fresh_, staging_;
};

}  // namespace ds::zero
