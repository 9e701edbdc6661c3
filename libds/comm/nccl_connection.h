// SPDX-License-Identifier: Apache-2.0
#pragma once
// One NCCL communicator with the queue of the device on which its work runs. It is non-blocking: no call into NCCL
// waits for a peer. Calls come from the owner's thread and from its watcher; a mutex of the connection orders them.

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/base_communicator.h"
#include "comm/nccl_api.h"

namespace ds::nccl {

inline bool is_error(Result r) noexcept { return r != Result::Success && r != Result::InProgress; }
// The first error; b if there is none.
inline Result first(Result a, Result b) noexcept { return is_error(a) ? a : b; }

// State that tickets need; lives as long as they do.
class Timeline {
 public:
  explicit Timeline(Device& d) : device(d) { spare_.reserve(256); }
  ~Timeline();

  Device::Event take();
  void give(Device::Event event);

  Device& device;
  FailureLatch failure;

 private:
  std::mutex mutex_;
  std::vector<Device::Event> spare_;
};

// An operation on a queue of the device.
struct EnqueuedOperation final : Ticket::State {
  EnqueuedOperation(std::shared_ptr<Timeline> t, const CallInfo& call, bool is_message)
      : timeline(std::move(t)), info(call), message(is_message), ready(timeline->take()), end(timeline->take()) {}
  ~EnqueuedOperation() override {
    timeline->give(ready);
    timeline->give(end);
  }
  void wait() override;
  bool done() const override { return timeline->failure.get() != nullptr || finished(); }
  bool finished() const { return enqueued.load(std::memory_order_acquire) && timeline->device.reached(end); }

  // Whether its peers should be in it by now. A message may be posted ahead, so it counts from the time when Compute
  // waits for it; otherwise ranks that wait for a late rank would be taken for late themselves.
  bool is_due() const {
    return (!message || waited.load(std::memory_order_acquire)) && timeline->device.reached(ready);
  }

  const std::shared_ptr<Timeline> timeline;
  const CallInfo info;
  const bool message;
  const Device::Event ready;  // inputs are ready; of a message that is waited for: Compute has come to the wait
  const Device::Event end;
  std::atomic<bool> enqueued{false};  // `end` is recorded
  std::atomic<bool> waited{false};
};

class Connection {
 public:
  Connection(const Api& api, Device& device, Queue queue) : api_(api), device_(device), queue_(queue) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Queue queue() const noexcept { return queue_; }
  void* stream() const noexcept { return device_.native(queue_); }

  // Begins to connect: state() is InProgress until all ranks have come.
  Result begin(const UniqueId& id, int rank, int size);
  // Success after abort().
  Result state();
  std::string describe(Result r);

  // One group of NCCL calls: calls(Comm) returns the first error. InProgress until it is on the stream. Empty: aborted.
  template <class Calls>
  std::optional<Result> launch(Calls&& calls) {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return {};
    const Result r = api_.GroupStart();
    if (r != Result::Success) return r;
    const Result made = calls(comm_);
    return first(made, api_.GroupEnd());
  }
  // The same; returns when the group is on the stream, or abort() ends a wait for peers that do not arrive.
  template <class Calls>
  std::optional<Result> group(Calls&& calls) {
    const std::optional<Result> r = launch(std::forward<Calls>(calls));
    return r == Result::InProgress ? wait_until_enqueued() : r;
  }
  Result send(Comm comm, const std::byte* source, i64 bytes, int to) const {
    return api_.Send(source, static_cast<size_t>(bytes), DataType::Uint8, to, comm, stream());
  }
  Result recv(Comm comm, std::byte* target, i64 bytes, int from) const {
    return api_.Recv(target, static_cast<size_t>(bytes), DataType::Uint8, from, comm, stream());
  }

  void add(const std::shared_ptr<EnqueuedOperation>& op);
  // Takes all messages for waited for, so that none can be pending for ever.
  void expect_all();
  // The oldest operation that has not finished, or null.
  std::shared_ptr<EnqueuedOperation> oldest();

  // Ends the work on the stream, on a thread of its own, since NCCL has been seen to wait for dead peers there.
  void abort() noexcept;
  // Finalises with the other ranks, as NCCL requires; aborts if they do not within the grace time.
  void disconnect() noexcept;

  // For the watcher: the call whose age it measures, since when, and when it last saw no peer that had left.
  struct Watch {
    u64 call = ~u64{0};
    std::chrono::steady_clock::time_point since{}, left{};
  } watch;

 private:
  std::optional<Result> wait_until_enqueued();
  Result asked();  // requires mutex_
  void abort_locked() noexcept;

  const Api& api_;
  Device& device_;
  const Queue queue_;

  std::mutex mutex_;     // for calls on comm_, none of which waits for a peer
  Comm comm_ = nullptr;  // null: not begun, or aborted
  std::shared_ptr<std::atomic<bool>> aborting_;

  std::mutex pending_mutex_;
  std::deque<std::shared_ptr<EnqueuedOperation>, std::pmr::polymorphic_allocator<std::shared_ptr<EnqueuedOperation>>>
      pending_{operation_memory()};
};

}  // namespace ds::nccl
