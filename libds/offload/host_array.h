// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank that stays with the host, beside a GPU: accumulated gradients, slices of parameters. What is
// leased is in device memory, in a buffer that comes and goes with the lease.

#include <memory>
#include <vector>

#include "device/device.h"
#include "offload/host_copies.h"
#include "zero/tier_array.h"

namespace ds::offload {

// Memory of the host.
class HostMemory final : public zero::TierArray {
 public:
  explicit HostMemory(Buffer memory) : memory_(std::move(memory)) {}
  bool in_place() const noexcept override { return true; }
  void* on_host(i64 begin) const noexcept override { return memory_.as<char>().data() + begin; }

 private:
  void* open(i64 begin, i64, zero::LeaseTo) override { return on_host(begin); }
  void close(void*, i64, i64, zero::LeaseTo) noexcept override {}
  Buffer memory_;
};

class HostArray final : public zero::TierArray {
 public:
  // `there`: where it stays, whose leases are in memory of the host; most: bytes of a lease. There is a buffer for one
  // lease from the start; more are taken as leases need them.
  HostArray(Device& device, HostCopies* copies, std::unique_ptr<zero::TierArray> there, MemoryLedger& ledger, i64 bytes,
            i64 most);
  bool in_place() const noexcept override { return false; }
  void expect(i64 begin, i64 bytes) override { there_->expect(begin, bytes); }
  void* on_host(i64 begin) const noexcept override { return there_->on_host(begin); }

 private:
  struct Slot {
    Buffer memory;
    bool taken = false;
  };
  void add_slot(i64 bytes);
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;

  Device& device_;
  const HostLink link_;
  MemoryLedger& ledger_;
  std::unique_ptr<zero::TierArray> there_;
  std::vector<Slot> slots_;
  std::exception_ptr failed_;  // of the device, for whoever asks next
};

}  // namespace ds::offload
