// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of fp32 numbers that is kept in 16 bits, in whatever tier: sums of gradients (grad_accum_dtype). A lease is
// a window in device memory: what it reads is decoded, and what it leaves is rounded to the nearest when it ends. So
// each lease that writes rounds once, and whoever sums makes one of each sum.

#include <memory>
#include <vector>

#include "zero/tier_array.h"

namespace ds::zero {

class RoundedArray final : public TierArray {
 public:
  // `kept`: half the bytes, as `dtype`, 16 bits, which begin as zeros; a lease of it may be as long as one of this.
  // Windows are taken as leases need them, and kept.
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
