// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank in memory of the host, beside a GPU: accumulated gradients, slices of parameters. What is leased
// is in device memory, in a buffer that comes and goes with the lease.

#include <vector>

#include "device/device.h"
#include "zero/tier_array.h"

namespace ds::offload {

class HostArray final : public zero::TierArray {
 public:
  // `host` is where the array is; most: bytes of a lease. There is a buffer for one lease from the start; more are
  // taken as leases need them.
  HostArray(Device& device, Device& host, MemoryLedger& ledger, i64 bytes, i64 most);
  bool in_place() const noexcept override { return false; }
  void* on_host(i64 begin) const noexcept override { return memory_.as<char>().data() + begin; }

 private:
  struct Slot {
    Buffer memory;
    bool taken = false;
  };
  void add_slot(i64 bytes);
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;

  Device& device_;
  MemoryLedger& ledger_;
  Buffer memory_;
  std::vector<Slot> slots_;
  std::exception_ptr failed_;  // of the device, for whoever asks next
};

}  // namespace ds::offload
