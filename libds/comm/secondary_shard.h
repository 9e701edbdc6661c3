// SPDX-License-Identifier: Apache-2.0
#pragma once
// A second shard of gathered parameters within a small group of ranks, usually a node, so that the backward pass
// gathers there what the forward pass gathered from all. Wang et al.: "ZeRO++", hierarchical partitioning (hpZ). It
// keeps bytes: the backward pass sees the bits that the forward pass saw, rounded by quantisation or not.

#include "comm/communicator.h"

namespace ds {

class SecondaryShard {
 public:
  // Of a parameter of `elems` elements, a multiple of the group's size. `device` is where the group's memory is; both
  // outlive it. Takes elems/size elements.
  SecondaryShard(Communicator& group, Device& device, MemoryLedger& ledger, Tag tag, i64 elems, DType dtype);

  // Keeps our part of `full` [elems], which is equal on all ranks of the group.
  void keep(TensorView full);
  // full [elems] = what was kept, on all ranks. Collective over the group; an error where nothing is kept.
  Ticket gather(TensorView full, std::string_view tag);
  // The parameters have changed: after each optimizer step.
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
