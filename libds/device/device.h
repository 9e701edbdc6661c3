// SPDX-License-Identifier: Apache-2.0
#pragma once
// Device: the place where a rank computes, with its memory, streams, copies and ops. There are two kinds: the CPU,
// whose memory is the process's and whose calls are done when they return, and CUDA (libds_cuda.so, opened at run
// time), whose calls are enqueued. Code written for CUDA is correct for the CPU.
//
// Order: a device has three streams. Work on one stream runs in order; an Event makes a stream wait for a point of
// another. Ops, copies and fills go to Compute unless a call states another stream; Copies is only for transfers from
// and to the host, started by start_upload() and start_download(). Errors of enqueued work are thrown by download() and
// synchronize(). A device must be used by one thread at a time.

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/memory.h"
#include "ds/config.h"
#include "ds/kernels/gpu_meter.h"
#include "ds/kernels/ops.h"

namespace ds {

class ProductChoices;  // device/product_choices.h

enum class Queue : u8 { Compute, Comm, Copies };

struct DeviceMemory {
  i64 free = 0, total = 0;  // bytes
};

class Device {
 public:
  // A point in a stream. Created by the device that uses it; may be recorded repeatedly.
  using Event = void*;

  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual DeviceKind kind() const noexcept = 0;
  // Identifies the hardware: equal for two devices on the same GPU. 0 on the CPU.
  virtual u64 id() const noexcept = 0;
  virtual std::string_view name() const noexcept = 0;  // for people: "cpu.avx512", "NVIDIA H100 80GB HBM3"
  virtual const OpTable& ops() const noexcept = 0;
  virtual Stream& stream(Queue queue = Queue::Compute) noexcept = 0;  // Copies has none, since it runs no ops
  // The cudaStream_t of a queue; null on the CPU.
  virtual void* native(Queue queue) noexcept = 0;
  // A stream without ops, for messages that must not wait for other work; exists until destroy_queue().
  virtual Queue make_queue() = 0;
  virtual void destroy_queue(Queue queue) noexcept = 0;
  // True if host code may access its memory and every call is done when it returns.
  bool is_host() const noexcept { return kind() == DeviceKind::Cpu; }

  // Zeroed and 256-byte aligned. Null if there is not enough memory.
  virtual void* allocate(i64 bytes) noexcept = 0;
  virtual void release(void* p) noexcept = 0;
  virtual DeviceMemory memory() const = 0;
  // Memory that its ops hold for themselves.
  virtual i64 scratch_bytes() const noexcept = 0;

  // The parts of a GPU on which that memory depends: GpuMeter predicts it.
  virtual GpuKernels gpu_kernels() const noexcept { return {}; }
  // "cuDNN 9.19.0", while it computes the attention that it supports (CudaOptions::cudnn_attention); else empty.
  virtual std::string attention_library() const { return {}; }
  // Finds cuDNN's plans for attention of these shapes. Returns the reason if it cannot be used or lacks one, else an
  // empty text.
  virtual std::string prepare_attention(std::span<const AttentionShape>) { return {}; }
  // The kernels of libds compute all later attention.
  virtual void use_own_attention() noexcept {}

  // Within the device, enqueued; the ranges must not overlap.
  virtual void copy(void* to, const void* from, i64 bytes, Queue queue = Queue::Compute) = 0;
  virtual void zero(void* p, i64 bytes) = 0;
  // From host memory, which may be reused when the call returns.
  virtual void upload(void* to, const void* from, i64 bytes) = 0;
  // To host memory, after all work enqueued on Compute; complete when the call returns.
  virtual void download(void* to, const void* from, i64 bytes) = 0;
  // The same on Copies, concurrent with computation. If the host memory is pinned the copy is enqueued, and the memory
  // must not change until it has ended; else it runs after all work on Compute and Copies and is done when the call
  // returns.
  virtual void start_upload(void* to, const void* from, i64 bytes) = 0;
  virtual void start_download(void* to, const void* from, i64 bytes) = 0;
  virtual void synchronize(Queue queue = Queue::Compute) = 0;
  // Page-locks host memory in whole pages, for direct transfers, until unpin(), which must come before the memory is
  // freed. Returns the system's reason if it refuses, else an empty text.
  virtual std::string pin(void* p, i64 bytes) = 0;
  virtual void unpin(void* p) noexcept = 0;

  virtual Event make_event() = 0;
  virtual void destroy(Event event) noexcept = 0;
  virtual void record(Event event, Queue queue) = 0;
  virtual void wait(Queue queue, Event event) = 0;  // later work on the queue waits for the event's last record
  virtual void await(Event event) = 0;              // the host waits
  virtual bool reached(Event event) = 0;            // whether the device has reached it; thread-safe
  // An event that also records the time at which the device reaches it, and the time between the last records of two
  // such events, which must have been waited for. Not allowed while recording graphs.
  virtual Event make_timed_event() = 0;
  virtual double seconds_between(Event from, Event to) = 0;

  // CUDA graphs: records the work that `body` enqueues instead of running it; launch() runs it all at once on Compute.
  // Allows only ops, copies and fills, with the same arguments each time. Null: this device does not support graphs,
  // and has not called `body`. An exception from `body` ends and discards the recording.
  using Graph = void*;
  virtual Graph record_graph(FunctionRef<void()> body) = 0;
  virtual void launch(Graph graph) = 0;
  virtual void destroy_graph(Graph graph) noexcept = 0;
};

// A device whose calls are done when they return, so there is nothing to wait for or record.
class SynchronousDevice : public Device {
 public:
  void* native(Queue) noexcept override { return nullptr; }
  Queue make_queue() override { return Queue::Comm; }
  void destroy_queue(Queue) noexcept override {}
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

// Whether it has the products of OpTable::matmul_fp8: the CPU, and GPUs of NVIDIA's Hopper generation.
inline bool has_fp8(const Device& device) noexcept {
  return device.is_host() || device.gpu_kernels().compute_capability == kFp8Capability;
}

// The CPU with these kernels and that many threads.
std::unique_ptr<Device> make_cpu_device(const OpTable& ops, int num_threads);

// Zeroed device memory as a Buffer. Throws Errc::OutOfMemory, which states tag, size, free memory and what the ledger
// holds. The device must outlive the Buffer.
Buffer device_buffer(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes);

// Options for the ops of a GPU.
struct CudaOptions {
  bool cudnn_attention = false;  // cuDNN computes the attention that it supports; prepare_attention() states problems
  bool autotune = false;  // choose matrix product algorithms by timing (CudaConfig::autotune), if `choices` has none
  std::shared_ptr<ProductChoices> choices = {};  // null: none are known or stored
  // Set by make_cuda_device: look up and store choices; cuDNN files to try; messages.
  std::function<void(const std::string& machine)> machine = {};
  std::function<std::string(const std::string& product)> known = {};
  std::function<void(const std::string& product, const std::string& algorithm)> chosen = {};
  std::vector<std::string> cudnn = {};
  std::function<void(const std::string&)> note = {}, warn = {};
};
// GPU number `index` of this node. Throws Errc::Unavailable, which states what is missing: the plug-in, a driver, or
// the GPU.
std::unique_ptr<Device> make_cuda_device(int index, const CudaOptions& options = {});
// The number of GPUs that make_cuda_device can open; 0 with the reason in `why`.
int num_cuda_devices(std::string& why);
// True if the reason is a fault (a plug-in that does not load or is of another build, a driver that is too old or
// fails) rather than a missing driver or GPU.
bool cuda_is_broken();

}  // namespace ds
