// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device and communicators that only count. Memory is addresses that must not be read or written, counted in a
// ledger; ops are a given table, which does nothing or counts; calls to other ranks are counted and complete at once.
// The code of an engine runs over them, so that predictions follow what it does.

#include <functional>

#include "comm/base_communicator.h"
#include "comm/staging_size.h"
#include "device/device.h"

namespace ds::plan {

// Addresses without memory. Allocations do not overlap.
class Addresses {
 public:
  void* take(i64 bytes) noexcept {
    void* const at = reinterpret_cast<void*>(next_);
    next_ += static_cast<std::uintptr_t>(align_up(bytes, 256));
    return at;
  }

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 48;
};

class CountingDevice : public SynchronousDevice {
 public:
  CountingDevice(const OpTable& ops, void* native, Addresses& addresses)
      : ops_(ops), stream_{.native = native}, addresses_(addresses) {}
  DeviceKind kind() const noexcept override { return DeviceKind::Cuda; }  // its memory is not the process's
  u64 id() const noexcept override { return 0; }
  std::string_view name() const noexcept override { return "none"; }
  const OpTable& ops() const noexcept override { return ops_; }
  Stream& stream(Queue) noexcept override { return stream_; }
  void* allocate(i64 bytes) noexcept override { return addresses_.take(bytes); }
  void release(void*) noexcept override {}
  DeviceMemory memory() const override { return {}; }
  i64 scratch_bytes() const noexcept override { return 0; }
  void copy(void*, const void*, i64, Queue) override {}
  void zero(void*, i64) override {}
  void upload(void*, const void*, i64) override {}
  void download(void*, const void*, i64) override {}

 private:
  const OpTable& ops_;
  Stream stream_;
  Addresses& addresses_;
};

// A rank of a group that is not there.
class CountingCommunicator final : public BaseCommunicator {
 public:
  // `addresses`: of who allocates. `seen` gets each call, and of how many ranks it is.
  CountingCommunicator(int rank, int size, Addresses* addresses = nullptr,
                       std::function<void(const Operation&, int size)> seen = {})
      : BaseCommunicator("none", rank, size), addresses_(addresses), seen_(std::move(seen)) {}
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    DS_ASSERT(addresses_ != nullptr);
    allocations_.push_back(bytes);
    return Buffer(ledger, tag, addresses_->take(bytes), bytes, [] {});
  }
  void throw_if_failed() const override {}
  void abort(const Error&) noexcept override {}
  i64 staging_bytes() const noexcept override { return 0; }
  const LargestCalls& largest() const noexcept { return largest_; }
  const std::vector<i64>& allocations() const noexcept { return allocations_; }

 private:
  Ticket submit(Operation&& op) override {
    largest_.add(op, size());
    if (seen_) seen_(op, size());
    return {};
  }
  Addresses* addresses_;
  std::function<void(const Operation&, int size)> seen_;
  std::vector<i64> allocations_;
  LargestCalls largest_;
};

}  // namespace ds::plan
