// SPDX-License-Identifier: Apache-2.0
// Device on the CUDA runtime: one GPU, three streams and those of make_queue(). Part of libds_cuda.so.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "cuda/matmul.h"
#include "device/cuda_plugin.h"

namespace ds {
namespace {

constexpr size_t kFirstQueue = static_cast<size_t>(Queue::Copies) + 1;  // that make_queue() made
constexpr i64 kStagingHalf = i64{4} << 20;  // pinned memory that pageable memory passes through, twice

[[noreturn]] void fail(std::string_view device, const char* where, const char* error, cudaError_t code) {
  const Errc errc = code == cudaErrorMemoryAllocation ? Errc::OutOfMemory : Errc::Internal;
  throw Error(errc, std::string(device) + ": " + where + ": " + error);
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, const CudaOptions& options) : index_(index) {
    call(cudaSetDevice(index),
         "opening it");  // creates its context, which may fail; another GPU would then stay current
    cudaDeviceProp properties{};
    call(cudaGetDeviceProperties(&properties, index), "reading its properties");
    name_ = properties.name;
    id_ = 14695981039346656037u;  // FNV-1a of its UUID
    for (const char byte : properties.uuid.bytes) id_ = (id_ ^ static_cast<unsigned char>(byte)) * 1099511628211u;
    DS_CHECK(properties.major >= 8, Errc::Unavailable, "{}: compute capability {}.{}, but the kernels need 8.0", name_,
             properties.major, properties.minor);
    for (size_t q = 0; q < contexts_.size(); ++q) {
      contexts_[q] = std::make_unique<cuda::Context>(cuda::ContextOptions{.cudnn_attention = options.cudnn_attention,
                                                                          .autotune = options.autotune,
                                                                          .machine = options.machine,
                                                                          .known = options.known,
                                                                          .chosen = options.chosen,
                                                                          .cudnn = options.cudnn,
                                                                          .note = options.note,
                                                                          .warn = options.warn});
      streams_[q].native = contexts_[q].get();
    }
    call(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
    for (Half& half : staging_) {
      call(cudaHostAlloc(&half.memory, static_cast<size_t>(kStagingHalf), cudaHostAllocDefault), "pinned memory");
      half.free = make_event();
    }
    copied_ = make_event();
    capability_ = properties.major;
    if (const cuda::CudnnAttention* const cudnn = contexts_.front()->cudnn_attention(); cudnn != nullptr) {
      no_cudnn_ = cudnn->error();
      if (!no_cudnn_.empty()) use_own_attention();
    }
    check();
  }

  ~CudaDevice() override {
    bind();
    for (const auto& c : contexts_)
      if (c != nullptr) cudaStreamSynchronize(c->stream());
    if (copies_ != nullptr) {
      cudaStreamSynchronize(copies_);
      cudaStreamDestroy(copies_);
    }
    for (cudaStream_t queue : queues_)
      if (queue != nullptr) cudaStreamDestroy(queue);
    for (Half& half : staging_) {
      if (half.memory != nullptr) cudaFreeHost(half.memory);
      if (half.free != nullptr) destroy(half.free);
    }
    if (copied_ != nullptr) destroy(copied_);
  }

  DeviceKind kind() const noexcept override { return DeviceKind::Cuda; }
  u64 id() const noexcept override { return id_; }
  std::string_view name() const noexcept override { return name_; }
  const OpTable& ops() const noexcept override { return cuda::ops(); }
  Stream& stream(Queue q) noexcept override { return streams_[static_cast<size_t>(q)]; }
  void* native(Queue q) noexcept override { return cuda_stream(q); }
  Queue make_queue() override {
    bind();
    auto unused = std::find(queues_.begin(), queues_.end(), nullptr);
    if (unused == queues_.end()) unused = queues_.insert(unused, nullptr);
    const auto number = kFirstQueue + (unused - queues_.begin());
    DS_ASSERT(number <= std::numeric_limits<u8>::max());
    call(cudaStreamCreateWithFlags(&*unused, cudaStreamNonBlocking), "making a stream");
    return static_cast<Queue>(number);
  }
  void destroy_queue(Queue q) noexcept override {
    bind();
    cudaStreamDestroy(std::exchange(queues_[static_cast<size_t>(q) - kFirstQueue], nullptr));
  }

  void* allocate(i64 bytes) noexcept override {
    bind();
    void* p = nullptr;
    if (cudaMalloc(&p, static_cast<size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();  // not sticky; the caller reports it
      return nullptr;
    }
    // Complete before any stream uses the memory.
    if (cudaMemsetAsync(p, 0, static_cast<size_t>(bytes), cuda_stream(Queue::Compute)) != cudaSuccess ||
        cudaStreamSynchronize(cuda_stream(Queue::Compute)) != cudaSuccess) {
      cudaFree(p);
      return nullptr;
    }
    return p;
  }
  void release(void* p) noexcept override {
    bind();
    cudaFree(p);
  }
  DeviceMemory memory() const override {
    size_t free = 0, total = 0;
    bind();
    cudaMemGetInfo(&free, &total);
    return {static_cast<i64>(free), static_cast<i64>(total)};
  }
  i64 scratch_bytes() const noexcept override {
    i64 bytes = 0;
    for (const auto& c : contexts_) bytes += static_cast<i64>(c->scratch_bytes());
    return bytes;
  }

  GpuKernels gpu_kernels() const noexcept override {
    return {.compute_capability = capability_,
            .cudnn = contexts_.front()->cudnn_attention() != nullptr,
            .products_bytes = static_cast<i64>(cuda::MatmulEngine::workspace_bytes(capability_))};
  }
  std::string attention_library() const override {
    const cuda::CudnnAttention* const cudnn = contexts_.front()->cudnn_attention();
    return cudnn != nullptr ? cudnn->name() : "";
  }
  std::string prepare_attention(std::span<const AttentionShape> shapes) override {
    bind();
    cuda::CudnnAttention* const cudnn = contexts_.front()->cudnn_attention();
    return cudnn != nullptr ? cudnn->prepare(shapes) : no_cudnn_;
  }
  void use_own_attention() noexcept override {
    for (const auto& c : contexts_) c->use_own_attention();
  }

  void copy(void* to, const void* from, i64 bytes, Queue q) override {
    if (bytes == 0) return;
    bind();
    call(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, cuda_stream(q)), "a copy");
  }
  void zero(void* p, i64 bytes) override {
    if (bytes == 0) return;
    bind();
    call(cudaMemsetAsync(p, 0, static_cast<size_t>(bytes), cuda_stream(Queue::Compute)), "filling with zeros");
  }

  // Callers may reuse the memory at once, so this waits even for copies from pinned memory.
  void upload(void* to, const void* from, i64 bytes) override {
    bind();
    if (is_pinned(from, bytes)) return copy_pinned(to, from, bytes, cudaMemcpyHostToDevice, "an upload");
    for (i64 at = 0; at < bytes; at += kStagingHalf) {
      const i64 n = std::min(kStagingHalf, bytes - at);
      const Half& half = next_half();
      std::memcpy(half.memory, static_cast<const char*>(from) + at, static_cast<size_t>(n));
      call(cudaMemcpyAsync(static_cast<char*>(to) + at, half.memory, static_cast<size_t>(n), cudaMemcpyHostToDevice,
                           cuda_stream(Queue::Compute)),
           "an upload");
      record(half.free, Queue::Compute);
    }
  }
  void download(void* to, const void* from, i64 bytes) override {
    bind();
    if (is_pinned(to, bytes)) {
      copy_pinned(to, from, bytes, cudaMemcpyDeviceToHost, "a download");
      return check();
    }
    // One half arrives while the other is copied out.
    const Half* arriving = nullptr;
    i64 arriving_at = 0, arriving_bytes = 0;
    const auto take = [&] {
      if (arriving == nullptr) return;
      call(cudaEventSynchronize(static_cast<cudaEvent_t>(arriving->free)), "a download");
      std::memcpy(static_cast<char*>(to) + arriving_at, arriving->memory, static_cast<size_t>(arriving_bytes));
    };
    for (i64 at = 0; at < bytes; at += kStagingHalf) {
      const i64 n = std::min(kStagingHalf, bytes - at);
      const Half& half = next_half();
      call(cudaMemcpyAsync(half.memory, static_cast<const char*>(from) + at, static_cast<size_t>(n),
                           cudaMemcpyDeviceToHost, cuda_stream(Queue::Compute)),
           "a download");
      record(half.free, Queue::Compute);
      take();
      arriving = &half;
      arriving_at = at;
      arriving_bytes = n;
    }
    take();
    check();
  }
  void start_upload(void* to, const void* from, i64 bytes) override {
    start_copy(to, from, bytes, from, cudaMemcpyHostToDevice, "an upload");
  }
  void start_download(void* to, const void* from, i64 bytes) override {
    start_copy(to, from, bytes, to, cudaMemcpyDeviceToHost, "a download");
  }
  void synchronize(Queue q) override {
    bind();
    call(cudaStreamSynchronize(cuda_stream(q)), "waiting for the GPU");
    check();
  }

  std::string pin(void* p, i64 bytes) override {
    bind();
    const cudaError_t e = cudaHostRegister(p, static_cast<size_t>(bytes), cudaHostRegisterPortable);
    if (e != cudaSuccess) {
      cudaGetLastError();  // not sticky; the caller reports it
      return cudaGetErrorString(e);
    }
    pinned_[static_cast<char*>(p)] = bytes;
    return {};
  }
  void unpin(void* p) noexcept override {
    bind();
    pinned_.erase(static_cast<char*>(p));
    cudaHostUnregister(p);
  }

  Event make_event() override { return make_event(cudaEventDisableTiming); }
  Event make_timed_event() override { return make_event(cudaEventDefault); }
  double seconds_between(Event from, Event to) override {
    bind();
    float ms = 0;
    call(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)), "timing");
    return static_cast<double>(ms) * 1e-3;
  }
  void destroy(Event e) noexcept override {
    bind();
    cudaEventDestroy(static_cast<cudaEvent_t>(e));
  }
  void record(Event e, Queue q) override {
    bind();
    call(cudaEventRecord(static_cast<cudaEvent_t>(e), cuda_stream(q)), "recording an event");
  }
  void wait(Queue q, Event e) override {
    bind();
    call(cudaStreamWaitEvent(cuda_stream(q), static_cast<cudaEvent_t>(e), 0), "waiting for an event");
  }
  void await(Event e) override {
    bind();
    call(cudaEventSynchronize(static_cast<cudaEvent_t>(e)), "waiting for an event");
    check();
  }
  bool reached(Event e) override {
    bind();  // called by any thread; a call would otherwise create a context on its current GPU
    const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(e));
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // otherwise the next op would report it as this thread's last error
      return false;
    }
    call(state, "asking for an event");
    return true;
  }

  Graph record_graph(FunctionRef<void()> body) override {
    bind();
    const cudaStream_t stream = cuda_stream(Queue::Compute);
    call(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
    cudaGraph_t graph = nullptr;
    try {
      body();
    } catch (...) {  // a stream that is still recording can do nothing else
      bind();
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // the recording is known to be incomplete
      throw;
    }
    bind();
    call(cudaStreamEndCapture(stream, &graph), "recording a graph");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    call(made, "making a graph");
    try {
      check();
    } catch (...) {
      destroy_graph(executable);
      throw;
    }
    return executable;
  }
  void launch(Graph graph) override {
    bind();
    call(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), cuda_stream(Queue::Compute)), "launching a graph");
  }
  void destroy_graph(Graph graph) noexcept override {
    bind();
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
  }

 private:
  struct Half {
    void* memory = nullptr;
    Event free = nullptr;  // recorded after its last use
  };

  Event make_event(unsigned flags) {
    bind();
    cudaEvent_t e = nullptr;
    call(cudaEventCreateWithFlags(&e, flags), "making an event");
    return e;
  }

  // The runtime's current device is per thread.
  void bind() const noexcept { cudaSetDevice(index_); }
  cudaStream_t cuda_stream(Queue q) const noexcept {
    const auto number = static_cast<size_t>(q);
    if (number >= kFirstQueue) return queues_[number - kFirstQueue];
    return q == Queue::Copies ? copies_ : contexts_[number]->stream();
  }
  void call(cudaError_t e, const char* where) const {
    if (e != cudaSuccess) fail(name_, where, cudaGetErrorString(e), e);
  }
  // Throws the first error of the ops; the device is unusable after it.
  void check() const {
    for (const auto& c : contexts_) {
      if (c->error() == nullptr) continue;
      if (c->missing_bytes() > 0) {
        const DeviceMemory m = memory();
        throw Error(Errc::OutOfMemory,
                    fmt::format("{}: no memory for {:.3f} GiB of {} ({}); {:.3f} of {:.3f} GiB are free", name_,
                                static_cast<double>(c->missing_bytes()) / 0x1p30, tag_name(Tag::Scratch), c->where(),
                                static_cast<double>(m.free) / 0x1p30, static_cast<double>(m.total) / 0x1p30));
      }
      fail(name_, c->where(), c->error(), c->error_code());
    }
  }
  bool is_pinned(const void* p, i64 bytes) const noexcept {
    const char* const at = static_cast<const char*>(p);
    const auto after = pinned_.upper_bound(at);
    if (after == pinned_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return at + bytes <= begin + size;
  }
  void copy_pinned(void* to, const void* from, i64 bytes, cudaMemcpyKind kind, const char* what) {
    if (bytes == 0) return;
    call(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, cuda_stream(Queue::Compute)), what);
    record(copied_, Queue::Compute);
    call(cudaEventSynchronize(static_cast<cudaEvent_t>(copied_)), what);
  }
  void start_copy(void* to, const void* from, i64 bytes, const void* of_host, cudaMemcpyKind kind, const char* what) {
    if (bytes == 0) return;
    bind();
    if (is_pinned(of_host, bytes))
      return call(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, copies_), what);
    call(cudaStreamSynchronize(copies_), what);
    kind == cudaMemcpyHostToDevice ? upload(to, from, bytes) : download(to, from, bytes);
    // Later work on Copies waits for uploads from staging memory, too.
    record(copied_, Queue::Compute);
    wait(Queue::Copies, copied_);
  }
  const Half& next_half() {
    const Half& half = staging_[next_++ % staging_.size()];
    call(cudaEventSynchronize(static_cast<cudaEvent_t>(half.free)), "waiting for a transfer");
    return half;
  }

  int index_;
  u64 id_ = 0;
  int capability_ = 0;    // its major number
  std::string no_cudnn_;  // why cuDNN is not used although it was wanted
  std::string name_ = "CUDA device";
  std::array<std::unique_ptr<cuda::Context>, 2> contexts_;  // for Compute and Comm
  std::array<Stream, 2> streams_;
  cudaStream_t copies_ = nullptr;
  std::vector<cudaStream_t> queues_;  // null: destroyed
  std::array<Half, 2> staging_;
  size_t next_ = 0;
  std::map<const char*, i64, std::less<>> pinned_;  // sizes of pinned memory, by address
  Event copied_ = nullptr;                          // recorded after the last copy of pinned memory
};

int count(const char** why, bool* broken) noexcept {
  int n = 0;
  const cudaError_t e = cudaGetDeviceCount(&n);
  if (e == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    *broken = driver != 0;
    *why = driver == 0 ? "there is no NVIDIA driver on this machine"
                       : "this machine's NVIDIA driver is older than this build's CUDA needs";
    return 0;
  }
  if (e != cudaSuccess || n == 0) {
    *broken = e != cudaSuccess && e != cudaErrorNoDevice;
    *why = e == cudaSuccess || e == cudaErrorNoDevice ? "the driver finds no GPU" : cudaGetErrorString(e);
    return 0;
  }
  return n;
}

Device* open(int index, const CudaOptions& options, std::string& why) noexcept {
  try {
    return new CudaDevice(index, options);
  } catch (const std::exception& e) {
    why = e.what();
    return nullptr;
  }
}

}  // namespace
}  // namespace ds

extern "C" __attribute__((visibility("default"))) const ds::CudaPlugin* ds_cuda_plugin() noexcept {
  static constexpr ds::CudaPlugin plugin = {ds::kCudaPluginBuild, ds::count, ds::open};
  return &plugin;
}
