// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a GPU's rank that stays on the host: accumulated gradients, slices of parameters. Leased data is in a
// buffer in device memory. Copies from and to page-locked memory run at the same time as computation: announced data is
// copied before it is leased, and written data is copied back after its lease has ended.

#include <memory>
#include <vector>

#include "device/device.h"
#include "offload/host_copies.h"
#include "zero/tier_array.h"

namespace ds::offload {

// Host memory.
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
  // Buffers of the largest size in addition to that of the first lease, for data that is copied ahead.
  static constexpr i64 kBeside = 1;
  // `there`: the array on the host, whose leases are in host memory; most: the most bytes of a lease. Buffers for one
  // lease and the additional ones are allocated at the start; more are allocated as leases need them.
  HostArray(Device& device, HostCopies* copies, std::unique_ptr<zero::TierArray> there, MemoryLedger& ledger, i64 bytes,
            i64 most);
  ~HostArray() override;
  bool in_place() const noexcept override { return false; }
  // Data of a file is read into host memory, and copied to the device when it is leased.
  void expect(i64 begin, i64 bytes) override;
  // Afterwards the host may read and write the array: all writes have arrived, and data copied ahead is dropped.
  void* on_host(i64 begin) const noexcept override;

 private:
  // Free: its data may still be being copied. Copies and computation wait for each other on the device.
  enum class Is : u8 { Free, Coming, Leased };
  struct Slot {
    Buffer memory;
    Is is = Is::Free;
    i64 begin = 0, bytes = 0;        // its contents, or last contents
    Device::Event copied = nullptr;  // on Copies, after its last copy
    Device::Event used = nullptr;    // on Compute, after the work of its last lease
    i64 order = 0;                   // of its last use, in the order of calls
    bool overlaps(i64 from, i64 n) const noexcept { return begin < from + n && from < begin + bytes; }
  };
  Slot& add_slot(i64 bytes);
  // The smallest buffer that is not leased and fits, so that memory is as predicted whatever the speed of copies; among
  // those, the least recently used free one, else the least recently used one with data copied ahead. Null: there is
  // none.
  Slot* at_rest(i64 bytes) noexcept;
  void bring(Slot& slot, i64 begin, i64 bytes);
  void copied(Slot& slot);
  void* open(i64 begin, i64 bytes, zero::LeaseTo access) override;
  void close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept override;

  Device& device_;
  const HostLink link_;
  MemoryLedger& ledger_;
  std::unique_ptr<zero::TierArray> there_;
  mutable std::vector<Slot> slots_;
  i64 order_ = 0;
  mutable bool copying_ = false;       // copies may be in progress
  mutable std::exception_ptr failed_;  // error of the device or of the array on the host, for the next call
};

}  // namespace ds::offload
