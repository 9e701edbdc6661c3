// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_connection.h"

#include "base/thread.h"

namespace ds::nccl {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kGrace = 2s;  // for peers to finalise together
constexpr int kYields = 100;
constexpr auto kSleep = 50us;

}  // namespace

Timeline::~Timeline() {
  for (const Device::Event e : spare_) device.destroy(e);
}

Device::Event Timeline::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      const Device::Event e = spare_.back();
      spare_.pop_back();
      return e;
    }
  }
  return device.make_event();
}

void Timeline::give(Device::Event event) {
  const std::lock_guard lock(mutex_);
  spare_.push_back(event);
}

void EnqueuedOperation::wait() {
  timeline->failure.throw_if_set();
  if (message && !waited.load(std::memory_order_relaxed)) {
    timeline->device.record(ready, Queue::Compute);
    waited.store(true, std::memory_order_release);
  }
  timeline->device.wait(Queue::Compute, end);
}

Result Connection::begin(const UniqueId& id, int rank, int size) {
  const std::lock_guard lock(mutex_);
  Config config;
  return api_.CommInitRankConfig(&comm_, size, id, rank, &config);
}

Result Connection::asked() {
  Result r{};
  const Result asked = api_.CommGetAsyncError(comm_, &r);
  return first(asked, r);
}

Result Connection::state() {
  const std::lock_guard lock(mutex_);
  return comm_ != nullptr ? asked() : Result::Success;
}

std::string Connection::describe(Result r) {
  const std::lock_guard lock(mutex_);
  const char* last = comm_ != nullptr ? api_.GetLastError(comm_) : nullptr;
  return fmt::format("{}{}{}", api_.GetErrorString(r), last != nullptr && *last != 0 ? ": " : "",
                     last != nullptr ? last : "");
}

std::optional<Result> Connection::wait_until_enqueued() {
  for (int round = 0;; ++round) {
    if (round < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return {};
    if (const Result r = asked(); r != Result::InProgress) return r;
  }
}

void Connection::add(const std::shared_ptr<EnqueuedOperation>& op) {
  const std::lock_guard lock(pending_mutex_);
  while (!pending_.empty() && pending_.front()->finished()) pending_.pop_front();
  pending_.push_back(op);
}

void Connection::expect_all() {
  const std::lock_guard lock(pending_mutex_);
  for (const auto& op : pending_) op->waited.store(true, std::memory_order_release);
}

std::shared_ptr<EnqueuedOperation> Connection::oldest() {
  const std::lock_guard lock(pending_mutex_);
  while (!pending_.empty() && pending_.front()->finished()) pending_.pop_front();
  return pending_.empty() ? nullptr : pending_.front();
}

void Connection::abort() noexcept {
  const std::lock_guard lock(mutex_);
  abort_locked();
}

// CommAbort first ends the work on the stream, and only then frees NCCL's resources.
void Connection::abort_locked() noexcept {
  if (comm_ == nullptr) return;
  aborting_ = std::make_shared<std::atomic<bool>>(true);
  try {
    start_thread("a thread that ends NCCL", [abort = api_.CommAbort, comm = comm_, aborting = aborting_] {
      abort(comm);
      aborting->store(false);
    }).detach();
  } catch (const Error&) {  // NCCL's resources are freed with the process
    aborting_->store(false);
  }
  comm_ = nullptr;
}

void Connection::disconnect() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) {
    Result r = api_.CommFinalize(comm_);
    for (const auto limit = Clock::now() + kGrace; r == Result::InProgress && Clock::now() < limit;) {
      std::this_thread::sleep_for(1ms);
      r = asked();
    }
    if (r == Result::Success) {
      api_.CommDestroy(comm_);
      comm_ = nullptr;
    }
  }
  abort_locked();
  for (const auto limit = Clock::now() + kGrace; aborting_ && aborting_->load() && Clock::now() < limit;)
    std::this_thread::sleep_for(1ms);
}

}  // namespace ds::nccl
