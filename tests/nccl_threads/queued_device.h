// SPDX-License-Identifier: Apache-2.0
#pragma once
// A CPU whose queues for messages run beside it, as a GPU's do: the stand-in for NCCL enqueues on them and returns.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device.h"

namespace ds::test {

// The stand-in gets it as a cudaStream_t. Work on it runs in order, on other threads.
class MessageQueue {
 public:
  // Null if the stream is another device's, such as the simulator's, whose streams begin with a mutex.
  static MessageQueue* of(void* stream) {
    auto* const queue = static_cast<MessageQueue*>(stream);
    return queue != nullptr && queue->kind_ == kKind ? queue : nullptr;
  }
  void begin() {
    const std::lock_guard lock(mutex_);
    ++begun_;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    ++ended_;
    changed_.notify_all();
  }
  u64 begun() {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  void wait(u64 work) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ >= work; });
  }
  bool reached(u64 work) {
    const std::lock_guard lock(mutex_);
    return ended_ >= work;
  }

 private:
  static constexpr u64 kKind = 0x65756575516773ff;  // no address
  const u64 kind_ = kKind;
  std::mutex mutex_;
  std::condition_variable changed_;
  u64 begun_ = 0, ended_ = 0;
};

class QueuedDevice final : public Device {
 public:
  explicit QueuedDevice(std::unique_ptr<Device> cpu) : cpu_(std::move(cpu)) {}

  DeviceKind kind() const noexcept override { return cpu_->kind(); }
  u64 id() const noexcept override { return cpu_->id(); }
  std::string_view name() const noexcept override { return cpu_->name(); }
  const OpTable& ops() const noexcept override { return cpu_->ops(); }
  Stream& stream(Queue queue) noexcept override { return cpu_->stream(queue); }
  void* native(Queue queue) noexcept override { return queue_of(queue); }
  Queue make_queue() override {
    queues_.push_back(std::make_unique<MessageQueue>());
    return static_cast<Queue>(kFirst + queues_.size() - 1);
  }
  void destroy_queue(Queue) noexcept override {}

  void* allocate(i64 bytes) noexcept override { return cpu_->allocate(bytes); }
  void release(void* p) noexcept override { cpu_->release(p); }
  DeviceMemory memory() const override { return cpu_->memory(); }
  i64 scratch_bytes() const noexcept override { return cpu_->scratch_bytes(); }

  void copy(void* to, const void* from, i64 bytes, Queue queue) override { cpu_->copy(to, from, bytes, queue); }
  void zero(void* p, i64 bytes) override { cpu_->zero(p, bytes); }
  void upload(void* to, const void* from, i64 bytes) override { cpu_->upload(to, from, bytes); }
  void download(void* to, const void* from, i64 bytes) override { cpu_->download(to, from, bytes); }
  void start_upload(void* to, const void* from, i64 bytes) override { cpu_->upload(to, from, bytes); }
  void start_download(void* to, const void* from, i64 bytes) override { cpu_->download(to, from, bytes); }
  void synchronize(Queue queue) override {
    if (MessageQueue* const q = queue_of(queue)) q->wait(q->begun());
  }
  std::string pin(void*, i64) override { return {}; }
  void unpin(void*) noexcept override {}

  Event make_event() override { return new Point; }
  void destroy(Event e) noexcept override { delete static_cast<Point*>(e); }
  void record(Event e, Queue queue) override {
    MessageQueue* const q = queue_of(queue);
    *static_cast<Point*>(e) = {q, q != nullptr ? q->begun() : 0};
  }
  void wait(Queue queue, Event e) override {
    if (queue_of(queue) == nullptr) await(e);  // what a message waits for has run when it is enqueued
  }
  void await(Event e) override {
    const Point& p = *static_cast<Point*>(e);
    if (p.queue != nullptr) p.queue->wait(p.work);
  }
  bool reached(Event e) override {
    const Point& p = *static_cast<Point*>(e);
    return p.queue == nullptr || p.queue->reached(p.work);
  }
  Event make_timed_event() override { return make_event(); }
  double seconds_between(Event, Event) override { return 0; }
  Graph record_graph(FunctionRef<void()>) override { return nullptr; }
  void launch(Graph) override {}
  void destroy_graph(Graph) noexcept override {}

 private:
  static constexpr size_t kFirst = static_cast<size_t>(Queue::Copies) + 1;
  struct Point {
    MessageQueue* queue = nullptr;  // null: already reached
    u64 work = 0;
  };

  MessageQueue* queue_of(Queue queue) const noexcept {
    const auto number = static_cast<size_t>(queue);
    return number < kFirst ? nullptr : queues_[number - kFirst].get();
  }

  std::unique_ptr<Device> cpu_;
  std::vector<std::unique_ptr<MessageQueue>> queues_;
};

}  // namespace ds::test
