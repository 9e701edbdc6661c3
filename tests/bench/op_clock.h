// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device that times its work op by op, by events of the device: everything that an engine enqueues over it, including
// its optimizer and the work that collectives put on its queue.
//
// An op's time is that between an event recorded just before it and one recorded just after it on its queue. If the
// host falls behind, the launch is included; waits of one queue for another are not. Not timed: work that a library
// enqueues through native(), as NCCL does, and recorded graphs, which this device does not make.

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "device/device.h"
#include "op_table_of.h"
#include "plan/op_tally.h"

namespace ds::testing {

// Calls of one kind: an op's name as plan/op_tally counts it, or "copy", "fill", "upload", "download".
struct ClockedCall {
  Queue queue = Queue::Compute;
  std::string_view op;
  DType dtype = DType::F32;
  std::array<i64, 3> shape{};  // as OpCall has it
  auto operator<=>(const ClockedCall&) const = default;
};
struct ClockedTime {
  i64 calls = 0;
  double seconds = 0, flops = 0, bytes = 0;  // of all
};

class OpClock final : public Device {
 public:
  // One at a time: ops do not record which clock they belong to. The device outlives it.
  explicit OpClock(Device& device) : device_(device) {
    DS_ASSERT(current_ == nullptr);
    current_ = this;
  }
  ~OpClock() override {
    for (const Event e : events_) device_.destroy(e);
    current_ = nullptr;
  }

  void start() { used_ = 0, samples_.clear(), tally_ = {}, running_ = true; }
  // Waits for the device; returns the calls since start() and their times.
  std::map<ClockedCall, ClockedTime> stop() {
    running_ = false;
    for (const Queue queue : {Queue::Compute, Queue::Comm, Queue::Copies}) device_.synchronize(queue);
    std::map<ClockedCall, ClockedTime> times;
    for (const Sample& s : samples_) {
      ClockedTime& t = times[s.call];
      t.calls += 1, t.flops += s.flops, t.bytes += s.bytes;
      t.seconds += device_.seconds_between(s.begin, s.end);
    }
    return times;
  }
  // The ops of the same time, as they are counted: those of a linear_cross_entropy each for itself.
  const plan::OpTally& tally() const noexcept { return tally_; }

  DeviceKind kind() const noexcept override { return device_.kind(); }
  u64 id() const noexcept override { return device_.id(); }
  std::string_view name() const noexcept override { return device_.name(); }
  const OpTable& ops() const noexcept override {
    static constexpr OpTable table = op_table_of<Clocked>("clocked");
    return table;
  }
  Stream& stream(Queue queue) noexcept override { return device_.stream(queue); }
  void* native(Queue queue) noexcept override { return device_.native(queue); }
  Queue make_queue() override { return device_.make_queue(); }
  void destroy_queue(Queue queue) noexcept override { device_.destroy_queue(queue); }
  void* allocate(i64 bytes) noexcept override { return device_.allocate(bytes); }
  void release(void* p) noexcept override { device_.release(p); }
  DeviceMemory memory() const override { return device_.memory(); }
  i64 scratch_bytes() const noexcept override { return device_.scratch_bytes(); }
  GpuKernels gpu_kernels() const noexcept override { return device_.gpu_kernels(); }
  std::string attention_library() const override { return device_.attention_library(); }
  std::string prepare_attention(std::span<const AttentionShape> shapes) override {
    return device_.prepare_attention(shapes);
  }
  void use_own_attention() noexcept override { device_.use_own_attention(); }
  void copy(void* to, const void* from, i64 bytes, Queue queue) override {
    timed({queue, "copy"}, 2 * bytes, [&] { device_.copy(to, from, bytes, queue); });
  }
  void zero(void* p, i64 bytes) override {
    timed({Queue::Compute, "fill"}, bytes, [&] { device_.zero(p, bytes); });
  }
  void upload(void* to, const void* from, i64 bytes) override {
    timed({Queue::Compute, "upload"}, bytes, [&] { device_.upload(to, from, bytes); });
  }
  void download(void* to, const void* from, i64 bytes) override {
    timed({Queue::Compute, "download"}, bytes, [&] { device_.download(to, from, bytes); });
  }
  void start_upload(void* to, const void* from, i64 bytes) override {
    timed({Queue::Copies, "upload"}, bytes, [&] { device_.start_upload(to, from, bytes); });
  }
  void start_download(void* to, const void* from, i64 bytes) override {
    timed({Queue::Copies, "download"}, bytes, [&] { device_.start_download(to, from, bytes); });
  }
  void synchronize(Queue queue) override { device_.synchronize(queue); }
  std::string pin(void* p, i64 bytes) override { return device_.pin(p, bytes); }
  void unpin(void* p) noexcept override { device_.unpin(p); }
  Event make_event() override { return device_.make_event(); }
  void destroy(Event event) noexcept override { device_.destroy(event); }
  void record(Event event, Queue queue) override { device_.record(event, queue); }
  void wait(Queue queue, Event event) override { device_.wait(queue, event); }
  void await(Event event) override { device_.await(event); }
  bool reached(Event event) override { return device_.reached(event); }
  Event make_timed_event() override { return device_.make_timed_event(); }
  double seconds_between(Event from, Event to) override { return device_.seconds_between(from, to); }
  Graph record_graph(FunctionRef<void()>) override { return nullptr; }
  void launch(Graph graph) override { device_.launch(graph); }
  void destroy_graph(Graph graph) noexcept override { device_.destroy_graph(graph); }

 private:
  struct Sample {
    ClockedCall call;
    double flops, bytes;
    Event begin, end;
  };

  template <auto member>
  struct Clocked;
  template <class... Args, void (*OpTable::*member)(Args...) noexcept>
  struct Clocked<member> {
    static void run(Args... args) noexcept {
      OpClock& clock = *current_;
      const auto op = [&] { (clock.device_.ops().*member)(args...); };
      if (!clock.running_) return op();
      plan::OpTally counted;
      Stream counter{.native = &counted};
      (plan::counting_ops().*member)(of_host(args, counter)...);
      ClockedCall call;
      call.queue = clock.queue_of(std::get<sizeof...(Args) - 1>(std::tie(args...)));
      for (const auto& [part, n] : counted.calls()) {  // a linear_cross_entropy is products, too
        if (call.op.empty() || part.op != "matmul") call.op = part.op, call.dtype = part.dtype, call.shape = part.shape;
      }
      const plan::OpTotal total = counted.total();
      clock.timed(call, static_cast<i64>(total.bytes), op, total.flops, &counted);
    }
  };
  // Arguments of an op that counts: it reads no memory of the device, and writes down what it counts.
  static Stream& of_host(Stream&, Stream& counter) { return counter; }
  static AttentionParams of_host(AttentionParams p, Stream&) {
    p.blocks = {};
    return p;
  }
  template <class T>
  static const T& of_host(const T& value, Stream&) {
    return value;
  }

  Queue queue_of(const Stream& stream) noexcept {
    return &stream == &device_.stream(Queue::Comm) && !device_.is_host() ? Queue::Comm : Queue::Compute;
  }
  template <class F>
  void timed(const ClockedCall& call, i64 bytes, F&& work, double flops = 0, const plan::OpTally* counted = nullptr) {
    if (!running_) return work();
    const Event begin = next_event(), end = next_event();
    device_.record(begin, call.queue);
    work();
    device_.record(end, call.queue);
    const std::lock_guard lock(mutex_);
    samples_.push_back({call, flops, static_cast<double>(bytes), begin, end});
    if (counted != nullptr) tally_.add(*counted);
  }
  Event next_event() {
    const std::lock_guard lock(mutex_);
    if (used_ == events_.size()) events_.push_back(device_.make_timed_event());
    return events_[used_++];
  }

  static inline OpClock* current_ = nullptr;
  Device& device_;
  bool running_ = false;
  std::mutex mutex_;  // collectives may enqueue from their own threads
  std::vector<Event> events_;
  size_t used_ = 0;
  std::vector<Sample> samples_;
  plan::OpTally tally_;
};

}  // namespace ds::testing
