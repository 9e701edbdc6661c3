// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device and communicators that are not there: memory is addresses that nobody may look at, counted in a ledger; ops
// are the table that one gives, which does nothing or counts; calls to ranks are counted and done. What runs over them
// is what an engine runs, so that what is predicted is what it does.

#include <functional>

#include "comm/base_communicator.h"
#include "comm/staging_size.h"
#include "device/device.h"

namespace ds::report {

// Addresses that nothing else has here.
class NoMemory {
 public:
  void* take(i64 bytes) noexcept {
    void* const at = reinterpret_cast<void*>(next_);
    next_ += static_cast<std::uintptr_t>(align_up(bytes, 256));
    return at;
  }

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 48;
};

class CountingDevice final : public Device {
 public:
  CountingDevice(const OpTable& ops, void* native, NoMemory& memory)
      : ops_(ops), stream_{.native = native}, memory_(memory) {}
  DeviceKind kind() const noexcept override { return DeviceKind::Cuda; }  // its memory is not the process's
  u64 id() const noexcept override { return 0; }
  std::string_view name() const noexcept override { return "none"; }
  const OpTable& ops() const noexcept override { return ops_; }
  Stream& stream(Queue) noexcept override { return stream_; }
  void* native(Queue) noexcept override { return nullptr; }
  void* allocate(i64 bytes) noexcept override { return memory_.take(bytes); }
  void release(void*) noexcept override {}
  DeviceMemory memory() const override { return {}; }
  i64 scratch_bytes() const noexcept override { return 0; }
  void copy(void*, const void*, i64, Queue) override {}
  void zero(void*, i64) override {}
  void upload(void*, const void*, i64) override {}
  void download(void*, const void*, i64) override {}
  void synchronize(Queue) override {}
  Event make_event() override { return nullptr; }
  void destroy(Event) noexcept override {}
  void record(Event, Queue) override {}
  void wait(Queue, Event) override {}
  bool reached(Event) override { return true; }
  Graph record_graph(FunctionRef<void()>) override { return nullptr; }
  void launch(Graph) override {}
  void destroy_graph(Graph) noexcept override {}

 private:
  const OpTable& ops_;
  Stream stream_;
  NoMemory& memory_;
};

// A rank of a group that is not there.
class CountingCommunicator final : public BaseCommunicator {
 public:
  // `memory`: of who allocates. `seen` gets each call, and of how many ranks it is.
  CountingCommunicator(int rank, int size, NoMemory* memory = nullptr,
                       std::function<void(const Operation&, int size)> seen = {})
      : BaseCommunicator("none", rank, size), memory_(memory), seen_(std::move(seen)) {}
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    DS_ASSERT(memory_ != nullptr);
    allocations_.push_back(bytes);
    return Buffer(ledger, tag, memory_->take(bytes), bytes, [] {});
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
  NoMemory* memory_;
  std::function<void(const Operation&, int size)> seen_;
  std::vector<i64> allocations_;
  LargestCalls largest_;
};

}  // namespace ds::report
