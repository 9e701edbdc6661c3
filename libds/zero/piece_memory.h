// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's parameters, or the sums of its gradients, piece by piece, wherever they are stored.

#include "zero/layout.h"
#include "zero/tier_array.h"

namespace ds::zero {

class PieceMemory {
 public:
  virtual ~PieceMemory() = default;
  virtual TierLease lease(const Piece& piece, LeaseTo access) const = 0;
  // The piece will be leased soon.
  virtual void expect(const Piece&) const {}
  // Whether leases are the memory in which all pieces are stored.
  virtual bool in_place() const noexcept = 0;
  // The same of the pieces that are trained, which an update leases all at once then.
  virtual bool trained_in_place() const noexcept { return in_place(); }
  // The address of a piece, if it is stored in host memory other than the device's; otherwise null
  // (TierArray::on_host).
  virtual void* on_host(const Piece& piece) const noexcept = 0;
};

}  // namespace ds::zero
