// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a rank has of each piece, wherever it stays: its parameters, or the sums of its gradients.

#include "zero/layout.h"
#include "zero/tier_array.h"

namespace ds::zero {

class PieceMemory {
 public:
  virtual ~PieceMemory() = default;
  virtual TierLease lease(const Piece& piece, LeaseTo access) const = 0;
  // It will be leased soon.
  virtual void expect(const Piece&) const {}
  // Whether leases are the very memory in which all of it stays.
  virtual bool in_place() const noexcept = 0;
  // Where a piece stays, in host memory beside the device's; null: not there (TierArray::on_host).
  virtual void* on_host(const Piece& piece) const noexcept = 0;
};

}  // namespace ds::zero
