// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that we use, for a device that is host memory. Everything is done when the call returns,
// except copies between the device and page-locked memory, which are delayed as long as the waits allow: code that
// reads their target or changes their source too early gets wrong results. Null pointers and wrong sizes crash as they
// would on a GPU. For tests only.

#include "cuda/sim/fibers.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

using ds::cuda::sim::enqueue;
using Graph = std::vector<std::function<void()>>;

namespace {

thread_local std::unique_ptr<Graph> recorded;  // while this thread records

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t failed(cudaError_t e) {
  last_error = e;
  return e;
}

// The copies that have not been done yet.
class SimStream {
 public:
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(work));
    ++asked_;
  }
  unsigned long long asked() {
    const std::lock_guard lock(mutex_);
    return asked_;
  }
  // Executes the copies requested before that point.
  void do_until(unsigned long long point) {
    const std::lock_guard lock(mutex_);
    for (; done_ < point; ++done_) {
      waiting_.front()();
      waiting_.pop_front();
    }
  }

 private:
  std::mutex mutex_;
  std::deque<std::function<void()>> waiting_;
  unsigned long long asked_ = 0, done_ = 0;
};
SimStream* stream_of(cudaStream_t s) { return reinterpret_cast<SimStream*>(s); }

// The first query of an event after it was recorded returns "not ready", as on a GPU that is behind.
struct SimEvent {
  std::atomic<bool> ahead{false};
  SimStream* stream = nullptr;  // the stream of which it is a point
  unsigned long long point = 0;
  std::chrono::steady_clock::time_point recorded{};  // kernels have run by then
  void happen() const {
    if (stream != nullptr) stream->do_until(point);
  }
};
SimEvent& event_of(cudaEvent_t e) { return *reinterpret_cast<SimEvent*>(e); }

std::atomic<size_t> used{0};
constexpr size_t kTotal = size_t{4} << 30;
constexpr size_t kAlignment = 256, kPage = 4096;

// Page-locked host memory, by address.
struct Locked {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
  size_t bytes = 0;
  std::atomic<size_t> copied{0};  // from and to it

  bool has(const void* p, size_t size) {
    const std::lock_guard lock(mutex);
    const auto after = ranges.upper_bound(static_cast<const char*>(p));
    return after != ranges.begin() &&
           static_cast<const char*>(p) + size <= std::prev(after)->first + std::prev(after)->second;
  }
};
Locked locked;

}  // namespace

void ds::cuda::sim::enqueue(std::function<void()> work) {
  if (recorded) {
    recorded->push_back(std::move(work));
  } else {
    work();
  }
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  const char* n = std::getenv("DS_SIM_DEVICES");
  *count = n != nullptr ? std::atoi(n) : 1;
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "simulated device");
  p->uuid.bytes[0] = static_cast<char>(device);
  p->major = 9;
  p->totalGlobalMem = kTotal;
  p->multiProcessorCount = 4;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(ds::cuda::sim::most_shared_bytes()); break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kTotal;
  *free = kTotal - used;
  return cudaSuccess;
}

// The size is stored in front of the memory; fresh memory is NaN in every format.
cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (bytes > kTotal - used) return failed(cudaErrorMemoryAllocation);
  auto* block =
      static_cast<char*>(std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment));
  if (block == nullptr) return failed(cudaErrorMemoryAllocation);
  std::memcpy(block, &bytes, sizeof bytes);
  *p = block + kAlignment;
  std::memset(*p, 0xFF, bytes);
  used += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  char* block = static_cast<char*>(p) - kAlignment;
  size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof bytes);
  used -= bytes;
  std::free(block);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  return *p != nullptr ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* p) {
  std::free(p);
  return cudaSuccess;
}

// Stricter than CUDA: whole pages only, none twice; and unregistering memory that is not registered ends the process,
// since callers of cudaHostUnregister ignore errors.
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  char* const begin = static_cast<char*>(p);
  if (p == nullptr || bytes == 0 || reinterpret_cast<size_t>(p) % kPage != 0 || bytes % kPage != 0)
    return failed(cudaErrorInvalidValue);
  const std::lock_guard lock(locked.mutex);
  const auto behind = locked.ranges.lower_bound(begin);
  const bool next = behind != locked.ranges.end() && behind->first < begin + bytes;
  const bool before = behind != locked.ranges.begin() && std::prev(behind)->first + std::prev(behind)->second > begin;
  if (next || before) return failed(cudaErrorHostMemoryAlreadyRegistered);
  const char* limit = std::getenv("DS_SIM_LOCKED_BYTES");
  if (limit != nullptr && locked.bytes + bytes > std::strtoull(limit, nullptr, 10))
    return failed(cudaErrorMemoryAllocation);
  locked.ranges[begin] = bytes;
  locked.bytes += bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  const std::lock_guard lock(locked.mutex);
  const auto it = locked.ranges.find(static_cast<char*>(p));
  if (it == locked.ranges.end()) {
    std::fputs("simulator: cudaHostUnregister of memory that is not registered\n", stderr);
    std::abort();
  }
  locked.bytes -= it->second;
  locked.ranges.erase(it);
  return cudaSuccess;
}

// For tests: bytes copied between the device and registered memory, and bytes registered.
__attribute__((visibility("default"))) size_t ds_sim_copied_registered() { return locked.copied; }
__attribute__((visibility("default"))) size_t ds_sim_registered() { return locked.bytes; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const bool is_locked = (kind == cudaMemcpyHostToDevice && locked.has(from, bytes)) ||
                         (kind == cudaMemcpyDeviceToHost && locked.has(to, bytes));
  if (is_locked) locked.copied += bytes;
  const auto copy = [=] { std::memmove(to, from, bytes); };
  if (is_locked && !recorded && stream != nullptr) {
    stream_of(stream)->add(copy);
  } else {
    enqueue(copy);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  enqueue([=] {
    for (size_t y = 0; y < height; ++y)
      std::memmove(static_cast<char*>(to) + y * to_pitch, static_cast<const char*>(from) + y * from_pitch, width);
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  enqueue([=] { std::memset(p, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  recorded = std::make_unique<Graph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(recorded.release());
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<Graph*>(executable)) work();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = reinterpret_cast<cudaStream_t>(new SimStream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  delete stream_of(s);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  if (recorded) return failed(cudaErrorStreamCaptureUnsupported);
  if (s != nullptr) stream_of(s)->do_until(stream_of(s)->asked());
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
// Later work on that stream may run at once, so the work it waits for must be done first.
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  if (event_of(e).stream != stream_of(s)) event_of(e).happen();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = reinterpret_cast<cudaEvent_t>(new SimEvent);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete &event_of(e);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  event_of(e).ahead = true;
  event_of(e).recorded = std::chrono::steady_clock::now();
  event_of(e).stream = stream_of(s);
  if (s != nullptr) event_of(e).point = stream_of(s)->asked();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  if (event_of(e).ahead.exchange(false)) return failed(cudaErrorNotReady);
  event_of(e).happen();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  event_of(e).ahead = false;
  event_of(e).happen();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::chrono::duration<float, std::milli>(event_of(to).recorded - event_of(from).recorded).count();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "simulated error"; }

}  // extern "C"
