// SPDX-License-Identifier: Apache-2.0
#pragma once
// Device: where a rank computes: memory, streams, copies and the ops that run there. Two kinds: the CPU, whose memory
// is the process's and whose calls are done when they return, and CUDA (libds_cuda.so, opened at run time), whose calls
// are enqueued. Code that is written for the second is right for the first.
//
// Order. A device has three streams. What is enqueued on one runs in order; an Event orders one behind a point of
// another. Ops, copies and fills go to Compute unless a call says otherwise; on Copies there are only those from and to
// the host that start_upload() and start_download() begin. Failures of enqueued work are thrown by download() and
// synchronize(). One thread at a time uses a device.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/memory.h"
#include "ds/config.h"
#include "ds/kernels/ops.h"

namespace ds {

class ProductChoices;  // device/product_choices.h

enum class Queue : u8 { Compute, Comm, Copies };

struct DeviceMemory {
  i64 free = 0, total = 0;  // bytes
};

class Device {
 public:
  // A point of a stream. Made by the device that uses it; may be recorded again and again.
  using Event = void*;

  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual DeviceKind kind() const noexcept = 0;
  // Of the hardware: the same for two devices that are one GPU. 0 on the CPU.
  virtual u64 id() const noexcept = 0;
  virtual std::string_view name() const noexcept = 0;  // for people: "cpu.avx512", "NVIDIA H100 80GB HBM3"
  virtual const OpTable& ops() const noexcept = 0;
  virtual Stream& stream(Queue queue = Queue::Compute) noexcept = 0;  // of Copies there is none: it runs no ops
  // The cudaStream_t of a queue; null on the CPU.
  virtual void* native(Queue queue) noexcept = 0;
  // Host code may read and write its memory, and every call is done when it returns.
  bool is_host() const noexcept { return kind() == DeviceKind::Cpu; }

  // Zeroed, 256-byte aligned. Null where there is no memory.
  virtual void* allocate(i64 bytes) noexcept = 0;
  virtual void release(void* p) noexcept = 0;
  virtual DeviceMemory memory() const = 0;
  // What its ops hold for themselves.
  virtual i64 scratch_bytes() const noexcept = 0;

  // Within the device, enqueued; may not overlap.
  virtual void copy(void* to, const void* from, i64 bytes, Queue queue = Queue::Compute) = 0;
  virtual void zero(void* p, i64 bytes) = 0;
  // From host memory, which may be reused when the call returns.
  virtual void upload(void* to, const void* from, i64 bytes) = 0;
  // To host memory, after all that is enqueued on Compute; it is there when the call returns.
  virtual void download(void* to, const void* from, i64 bytes) = 0;
  // The same on Copies, beside what is computed: enqueued where the host's memory is pinned, and then that stays as it
  // is until the copy has ended; else done, behind all that is on Compute and Copies, when the call returns.
  virtual void start_upload(void* to, const void* from, i64 bytes) = 0;
  virtual void start_download(void* to, const void* from, i64 bytes) = 0;
  virtual void synchronize(Queue queue = Queue::Compute) = 0;
  // Page-locks memory of the host, of whole pages: what is uploaded from it and downloaded to it takes no way in
  // between. Until unpin(), which comes before the memory goes. Where the system refuses, what it says; else nothing.
  virtual std::string pin(void* p, i64 bytes) = 0;
  virtual void unpin(void* p) noexcept = 0;

  virtual Event make_event() = 0;
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Queue queue) = 0;
  virtual void wait(Queue queue, Event event) = 0;  // what comes next on the queue waits for the event's last record
  virtual void await(Event event) = 0;              // the host does
  virtual bool reached(Event event) = 0;            // by the device; asked by any thread
  // An event that also notes when the device reaches it, and the time from the last record of one such event to that of
  // another, which has been waited for. Not for recordings of graphs.
  virtual Event make_timed_event() = 0;
  virtual double seconds_between(Event from, Event to) = 0;

  // CUDA graphs: what `body` enqueues is recorded instead of run; launching does it all at once, on Compute. Only ops,
  // copies and fills with the same arguments each time. Null: this device records nothing, and has not called `body`.
  // What `body` throws ends the recording, and nothing of it stays.
  using Graph = void*;
  virtual Graph record_graph(FunctionRef<void()> body) = 0;
  virtual void launch(Graph graph) = 0;
  virtual void destroy_graph(Graph graph) noexcept = 0;
};

// A device whose calls are done when they return: there is nothing to wait for, and nothing to record.
class SynchronousDevice : public Device {
 public:
  void* native(Queue) noexcept override { return nullptr; }
  void start_upload(void* to, const void* from, i64 bytes) override { upload(to, from, bytes); }
  void start_download(void* to, const void* from, i64 bytes) override { download(to, from, bytes); }
  void synchronize(Queue) override {}
  std::string pin(void*, i64) override { return {}; }
  void unpin(void*) noexcept override {}
  Event make_event() override { return nullptr; }
  void destroy(Event event) noexcept override { delete static_cast<Clock::time_point*>(event); }
  void record(Event event, Queue) override {
    if (event != nullptr) *static_cast<Clock::time_point*>(event) = Clock::now();
  }
  void wait(Queue, Event) override {}
  void await(Event) override {}
  bool reached(Event) override { return true; }
  Event make_timed_event() override { return new Clock::time_point; }
  double seconds_between(Event from, Event to) override {
    const auto at = [](Event event) { return *static_cast<const Clock::time_point*>(event); };
    return std::chrono::duration<double>(at(to) - at(from)).count();
  }
  Graph record_graph(FunctionRef<void()>) override { return nullptr; }
  void launch(Graph) override {}
  void destroy_graph(Graph) noexcept override {}

 private:
  using Clock = std::chrono::steady_clock;
};

// The CPU with these kernels and threads.
std::unique_ptr<Device> make_cpu_device(const OpTable& ops, int num_threads);

// Device memory as a Buffer, zeroed. Throws Errc::OutOfMemory naming tag, size, what is free and what the ledger holds.
// The device outlives it.
Buffer device_buffer(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes);

// What the ops of a GPU may do beside what they must.
struct CudaOptions {
  bool autotune = false;  // matrix products by timing (CudaConfig::autotune), where `choices` knows none
  std::shared_ptr<ProductChoices> choices = {};  // null: none are known or kept
  // make_cuda_device sets these. Choices, asked and told; files of cuDNN to try; who hears which is taken, or why none.
  std::function<std::string(const std::string& product)> known = {};
  std::function<void(const std::string& product, const std::string& algorithm)> chosen = {};
  std::vector<std::string> cudnn = {};
  std::function<void(const std::string&)> note = {}, warn = {};
};
// GPU number `index` of this node. Throws Errc::Unavailable saying what is missing: the plug-in, a driver, a GPU, or
// that GPU.
std::unique_ptr<Device> make_cuda_device(int index, const CudaOptions& options = {});
// How many GPUs make_cuda_device can open; 0 with the reason in `why`.
int num_cuda_devices(std::string& why);
// Whether that reason is that something is broken: a plug-in that does not load or is of another build, a driver too
// old or in trouble. Not: none is there.
bool cuda_is_broken();

}  // namespace ds
