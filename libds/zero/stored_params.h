// SPDX-License-Identifier: Apache-2.0
#pragma once
// Frozen parameters that are stored in another form than the work dtype (model::Storage) and decoded when they are
// gathered. A slice of codes is a
// CodedSlice: its codes, then their scales. Decoded values are exact in the work dtype, and have the same codes again,
// so that checkpoints contain the values that the run used, and a resumed run has the same.
//
// The array is one of values in the work dtype: a lease decodes them into a window of device memory, and encodes them
// when it ends. One lease at a time may be open, of at most kMostLeased elements. A lease of codes begins at a block,
// and ends at a block or at the end of a row.

#include <memory>
#include <utility>
#include <vector>

#include "comm/coded_slice.h"
#include "device/device.h"
#include "ds/kernels/thread_pool.h"
#include "ds/layer.h"
#include "zero/layout.h"
#include "zero/tier_array.h"

namespace ds::zero {

constexpr bool is_codes(model::Storage form) noexcept {
  return form == model::Storage::Int8 || form == model::Storage::Int4;
}

// A slice of `elems` elements as it is stored; all offsets and counts are in elements.
struct StoredSlice {
  model::Storage form;
  i64 elems;

  i64 bytes() const noexcept;
  // Elements from `first` on, from or to x [N], work dtype.
  void encode(Device& device, void* slice, i64 first, TensorView x) const noexcept;
  void decode(Device& device, void* slice, i64 first, TensorView x) const noexcept;

 private:
  CodedSlice codes() const noexcept;
  TensorView rounded(void* slice, i64 first, i64 count) const noexcept;
  // The codes and scales of N elements from `first` on, of a slice of codes.
  std::pair<TensorView, TensorView> part(void* slice, i64 first, i64 count) const noexcept;
};

class StoredParams final : public TierArray {
 public:
  static constexpr i64 kBlock = kSliceAlignment;  // elements that share a scale; no slice cuts it
  static constexpr i64 kMostLeased = i64{1} << 20;

  // The stored segments of a layout: this rank's memory has one slice of each at stage 3, and all slices at others (at
  // stage 0 they are one).
  StoredParams(const Layout& layout, int rank, DType work);
  static bool has(const Segment& s) noexcept {
    return s.storage != model::Storage::Work && s.storage != model::Storage::Codes;
  }
  bool any() const noexcept { return bytes_ > 0; }
  i64 bytes() const noexcept { return bytes_; }
  i64 largest_bytes() const noexcept { return largest_; }  // of a segment in memory
  // kept: bytes() bytes, all zero.
  void allocate(Device& device, MemoryLedger& ledger, std::unique_ptr<TierArray> kept);

  StoredSlice slice_of(const Segment& s) const noexcept { return {s.storage, s.slice * joined()}; }
  // The bytes of this rank's memory with the slices of a segment.
  i64 offset_of(const Segment& s) const noexcept { return offsets_[&s - layout_.segments().data()]; }
  i64 bytes_of(const Segment& s) const noexcept { return num_slices() * slice_of(s).bytes(); }
  TierLease lease_stored(const Segment& s) { return kept_->lease(offset_of(s), bytes_of(s), LeaseTo::Read); }
  void expect(const Segment& s) { kept_->expect(offset_of(s), bytes_of(s)); }
  // Decodes all slices of a segment into `to`, work dtype.
  void decode(const Segment& s, void* slices, TensorView to) const noexcept;

  // Elements [first, first + count) of a segment, of those in this rank's memory.
  TierLease lease(const Segment& s, i64 first, i64 count, LeaseTo access);
  bool in_place() const noexcept override { return false; }

 private:
  bool whole() const noexcept { return !layout_.states().shard_params; }  // memory has all slices
  i64 num_slices() const noexcept { return whole() ? layout_.num_ranks() / joined() : 1; }
  i64 joined() const noexcept { return layout_.states().shard_optimizer ? 1 : layout_.num_ranks(); }
  // The window of the segment that lease() has named.
  void* open(i64 begin, i64 bytes, LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, LeaseTo access) noexcept override;
  // Calls visit(the stored slice, where the leased part begins in it).
  void visit_leased(LeaseTo access, FunctionRef<void(void*, i64)> visit);

  const Layout& layout_;
  int rank_;
  DType work_;
  std::vector<i64> offsets_;  // by segment
  i64 bytes_ = 0, largest_ = 0, window_elems_ = 0;
  Device* device_ = nullptr;
  std::unique_ptr<TierArray> kept_;
  Buffer window_;
  const Segment* leased_ = nullptr;
  i64 first_ = 0;  // of the lease, in its segment
};

}  // namespace ds::zero
