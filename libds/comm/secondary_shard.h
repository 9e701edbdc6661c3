// SPDX-License-Identifier: Apache-2.0
#pragma once
// A second shard of gathered parameters within a small group of ranks, usually a node: the backward pass gathers within
// the group what the forward pass gathered from all ranks. Wang et al.: "ZeRO++", hierarchical partitioning (hpZ). It
// stores bytes, so the backward pass sees exactly the bits of the forward pass, quantised or not.

#include "device/device.h"
#include "ds/communicator.h"

namespace ds {

class SecondaryShard {
 public:
  // For a parameter of `elems` elements, a multiple of the group's size. `device` is where the group's memory is; both
  // must outlive it. Allocates elems/size elements.
  SecondaryShard(Communicator& group, Device& device, MemoryLedger& ledger, Tag tag, i64 elems, DType dtype);

  // Stores our part of `full` [elems], which is equal on all ranks of the group.
  void keep(TensorView full);
  // Restores full [elems] on all ranks. Collective over the group; an error if nothing is stored.
  Ticket gather(TensorView full, std::string_view tag);
  // Call this when the parameters have changed: after each optimizer step.
  void invalidate() noexcept { kept_ = false; }
  bool kept() const noexcept { return kept_; }

 private:
  char* own_part(const TensorView& full) const;

  Communicator& group_;
  Device& device_;
  const i64 elems_;
  const DType dtype_;
  Buffer shard_;
  bool kept_ = false;
};

}  // namespace ds
