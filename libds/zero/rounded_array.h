// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of fp32 numbers that is stored in 16 bits, in any tier: sums of gradients (grad_accum_dtype). A lease is an
// fp32 window in device memory: values are decoded into it, and rounded to nearest when the lease ends. Each lease that
// writes rounds once, so a sum should be made within one lease.

#include <memory>
#include <vector>

#include "zero/tier_array.h"

namespace ds::zero {

class RoundedArray final : public TierArray {
 public:
  // kept: the numbers as `dtype`, a type of 16 bits, all zero; its leases may be as long as those of this array.
  // Windows are allocated when leases need them, and kept.
  RoundedArray(Device& device, MemoryLedger& ledger, std::unique_ptr<TierArray> kept, DType dtype)
      : device_(device), ledger_(ledger), kept_(std::move(kept)), dtype_(dtype) {}
  bool in_place() const noexcept override { return false; }
  void expect(i64 begin, i64 bytes) override { kept_->expect(begin / 2, bytes / 2); }

 private:
  struct Window {
    Buffer memory;
    bool leased = false;
  };
  void* open(i64 begin, i64 bytes, LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, LeaseTo access) noexcept override;
  TensorView exact(void* data, i64 bytes) const noexcept { return TensorView::of(data, DType::F32, {bytes / 4}); }
  TensorView rounded(const TierLease& lease, i64 bytes) const noexcept {
    return TensorView::of(lease.data(), dtype_, {bytes / 4});
  }

  Device& device_;
  MemoryLedger& ledger_;
  std::unique_ptr<TierArray> kept_;
  DType dtype_;
  std::vector<Window> windows_;
};

}  // namespace ds::zero
