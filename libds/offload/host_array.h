// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank that stays with the host, beside a GPU: accumulated gradients, slices of parameters. What is
// leased is in device memory, in a buffer. Copies from and to page-locked memory run beside what is computed: what is
// expected comes before it is leased, and what was written goes after its lease has ended.

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
  // Buffers of the largest size beside the first lease's: of what comes meanwhile.
  static constexpr i64 kBeside = 1;
  // `there`: where it stays, whose leases are in memory of the host; most: bytes of a lease. Buffers for one lease and
  // those beside it are there from the start; more are taken as leases need them.
  HostArray(Device& device, HostCopies* copies, std::unique_ptr<zero::TierArray> there, MemoryLedger& ledger, i64 bytes,
            i64 most);
  ~HostArray() override;
  bool in_place() const noexcept override { return false; }
  // From a file it comes to the host's memory, to the device when it is leased.
  void expect(i64 begin, i64 bytes) override;
  // The host may read it and write to it then: what goes has arrived, and what has come is of no use.
  void* on_host(i64 begin) const noexcept override;

 private:
  // Free: what it has may still go. Copies and what computes with it wait for each other on the device.
  enum class Is : u8 { Free, Coming, Leased };
  struct Slot {
    Buffer memory;
    Is is = Is::Free;
    i64 begin = 0, bytes = 0;        // what it has, or last had
    Device::Event copied = nullptr;  // on Copies, behind its last copy
    Device::Event used = nullptr;    // on Compute, behind what its last lease enqueued
    i64 order = 0;                   // of calls, of its last use
    bool overlaps(i64 from, i64 n) const noexcept { return begin < from + n && from < begin + bytes; }
  };
  Slot& add_slot(i64 bytes);
  // The smallest that is not leased and has room, so that memory is as predicted, whatever the time that copies take;
  // of those, what was used longest ago of what is free, else of what comes. Null: there is none.
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
  mutable bool copying_ = false;       // there may be copies that have not ended
  mutable std::exception_ptr failed_;  // of the device or the array there, for whoever asks next
};

}  // namespace ds::offload
