// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ops of a CUDA device as an OpTable for tensors in host memory, so that the tests of ops run on it as they are:
// each call takes all memory that its arguments reach to the device, runs there and brings everything back.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "comm/make_communicator.h"
#include "device/device.h"
#include "ds/kernels/state_codes.h"
#include "mesh/mesh.h"
#include "op_table_of.h"

namespace ds::testing {

// A GPU whose attention is that of our kernels, or with DS_TEST_ATTENTION=cudnn cuDNN's.
inline bool asks_for_cudnn() {
  const char* const asked = std::getenv("DS_TEST_ATTENTION");
  return asked != nullptr && std::string_view(asked) == "cudnn";
}
inline std::unique_ptr<Device> open_test_gpu() {
  std::unique_ptr<Device> device = make_cuda_device(0, {.cudnn_attention = asks_for_cudnn()});
  if (asks_for_cudnn() && device->attention_library().empty()) {
    std::fprintf(stderr, "skipped: %s\n", device->prepare_attention({}).c_str());
    std::_Exit(77);
  }
  return device;
}

// The device that DS_TEST_DEVICE=cuda asks for (the simulator with DS_CUDA_PLUGIN); null where the variable is not set.
// A device that is not there ends the test: ctest takes the exit status for "skipped".
inline Device* test_device() {
  static const std::unique_ptr<Device> device = [] {
    const char* asked = std::getenv("DS_TEST_DEVICE");
    if (asked == nullptr) return std::unique_ptr<Device>();
    std::string why;
    if (num_cuda_devices(why) == 0) {
      std::fprintf(stderr, "skipped: %s\n", why.c_str());
      std::_Exit(77);
    }
    return open_test_gpu();
  }();
  return device.get();
}

// The memory of one call's arguments, there and back. Arguments that overlap on the host are one piece on the device,
// at the same distance from a 256-byte boundary.
class RoundTrip {
 public:
  explicit RoundTrip(Device& device) : device_(device) {}
  ~RoundTrip() {
    for (const Range& r : ranges_) device_.release(r.memory);
  }
  RoundTrip(const RoundTrip&) = delete;
  RoundTrip& operator=(const RoundTrip&) = delete;

  void reach(const void* p, i64 bytes, bool written = true) {
    if (p == nullptr || bytes == 0) return;
    auto* begin = const_cast<char*>(static_cast<const char*>(p));
    Range merged{begin, begin + bytes, written};
    std::erase_if(ranges_, [&](const Range& r) {
      if (r.begin > merged.end || merged.begin > r.end) return false;
      merged = {std::min(r.begin, merged.begin), std::max(r.end, merged.end), r.written || merged.written};
      return true;
    });
    ranges_.push_back(merged);
  }
  void reach(const TensorView& v) {
    if (v.numel() == 0) return;
    if (v.codes) return reach(v.data, v.bytes());
    i64 last = 0;
    for (int d = 0; d < v.rank; ++d) last += (v.dim(d) - 1) * v.stride[d];
    reach(v.data, (last + 1) * dtype_bytes(v.dtype));
    reach(v.scale, (v.rank == 4 ? v.numel() / v.dim(3) : state_blocks(v.numel())) * 4);  // of keys: a row and head
    if (v.rank == 4) heads_views_.push_back(v);
    if (v.rank == 2) rows_ = v.dim(0);
    if (v.rank == 4 && samples_ == 0) samples_ = v.dim(0), heads_ = v.dim(2);
    if (v.rank == 4) tokens_ = std::max(tokens_, v.dim(1));
  }
  void reach(std::span<const TensorView> views) {
    for (const TensorView& v : views) reach(v);
  }
  void reach(std::span<const UpdateTensor> tensors) {
    for (const UpdateTensor& t : tensors) {
      for (const TensorView& v : {t.param, t.master, t.states[0], t.states[1], t.grad}) reach(v);
      if (t.factor != nullptr) reach(t.factor, sizeof *t.factor, false);
    }
  }
  void reach(const float* factor) {
    if (factor != nullptr) reach(factor, sizeof *factor, false);
  }
  void reach(const AttentionParams& p) {
    const i64 bytes = p.blocks.layouts * p.blocks.count * p.blocks.words() * i64{sizeof(u64)};
    reach(p.blocks.keys, bytes, false);
    reach(p.blocks.queries, bytes, false);
    reach(p.bias, std::max(heads_, p.grid.heads) * (2 * p.reach + 1) * i64{sizeof(float)}, false);
    reach(p.documents, 2 * samples_ * p.positions * i64{sizeof(i32)}, false);
    if (p.sequences) return reach_sequences(p);
    if (p.pages != nullptr) reach(p.pages, (tokens_ + p.page - 1) / p.page * i64{sizeof(i32)}, false);
  }
  // The tables of all sequences, and all pages of keys and values, of which views have as many rows as a sequence.
  void reach_sequences(const AttentionParams& p) {
    const AttentionSequences& all = p.sequences;
    constexpr i64 kWidth = sizeof(i32);
    reach(all.begins, (all.count + 1) * kWidth, false);
    reach(all.keys, all.count * kWidth, false);
    reach(all.tables, all.count * kWidth, false);
    reach(p.pages, (*std::max_element(all.tables, all.tables + all.count) + 1) * all.stride * kWidth, false);
    i64 pages = 0;
    for (i64 s = 0; s < all.count; ++s) {
      const i32* const table = p.pages + all.tables[s] * all.stride;
      pages = std::max<i64>(pages, *std::max_element(table, table + (all.keys[s] + p.page - 1) / p.page) + 1);
    }
    const std::vector<TensorView> views = heads_views_;
    for (size_t i = 2; views.size() == 4 && i < 4; ++i) {  // o, q, k, v
      TensorView v = views[i];
      v.shape[1] = std::max(v.shape[1], pages * p.page);
      reach(v);
    }
  }
  void reach(const Draw* draws) {
    reach(draws, rows_ * i64{sizeof *draws}, false);
    for (i64 i = 0; i < rows_; ++i) changes_ = std::max(changes_, draws[i].first_change + draws[i].num_changes);
  }
  void reach(LogitChange* changes) { reach(changes, changes_ * i64{sizeof *changes}); }
  void reach(GradVerdict* v) { reach(v, sizeof *v); }
  void reach(const GradVerdict* v) { reach(v, sizeof *v, false); }
  template <class Other>
  void reach(const Other&) {}

  void upload() {
    for (Range& r : ranges_) {
      const auto shift = static_cast<i64>(reinterpret_cast<size_t>(r.begin) % 256);
      r.memory = device_.allocate(r.end - r.begin + shift);
      if (r.memory == nullptr) std::abort();
      r.device = static_cast<char*>(r.memory) + shift;
      device_.upload(r.device, r.begin, r.end - r.begin);
    }
  }
  void download() {
    for (const Range& r : ranges_)
      if (r.written) device_.download(r.begin, r.device, r.end - r.begin);
  }

  template <class T>
  T* on_device(T* p) const {
    auto* at = reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(p));
    for (const Range& r : ranges_) {
      if (r.begin <= at && at < r.end) return reinterpret_cast<T*>(r.device + (at - r.begin));
    }
    return p;
  }
  TensorView on_device(TensorView v) const {
    v.data = v.data == nullptr ? nullptr : on_device(static_cast<char*>(v.data));
    v.scale = v.scale == nullptr ? nullptr : on_device(v.scale);
    return v;
  }
  UpdateTensor on_device(UpdateTensor t) const {
    for (TensorView* v : {&t.param, &t.master, &t.states[0], &t.states[1], &t.grad}) *v = on_device(*v);
    if (t.factor != nullptr) t.factor = on_device(t.factor);
    return t;
  }
  AttentionParams on_device(AttentionParams p) const {
    if (p.blocks.keys != nullptr) p.blocks.keys = on_device(p.blocks.keys);
    if (p.blocks.queries != nullptr) p.blocks.queries = on_device(p.blocks.queries);
    if (p.bias != nullptr) p.bias = on_device(p.bias);
    if (p.documents != nullptr) p.documents = on_device(p.documents);
    if (p.pages != nullptr) p.pages = on_device(p.pages);
    for (const i32** array : {&p.sequences.begins, &p.sequences.keys, &p.sequences.tables}) *array = on_device(*array);
    return p;
  }
  // Arguments as the device's op gets them; `keep` holds what spans point to.
  template <class T>
  std::vector<T> on_device(std::span<const T> values) const {
    std::vector<T> moved;
    for (const T& v : values) moved.push_back(on_device(v));
    return moved;
  }
  Stream& on_device(Stream&) const { return device_.stream(); }
  template <class Other>
  requires(!std::is_pointer_v<Other>) Other on_device(Other other)
  const { return other; }

 private:
  struct Range {
    char* begin;
    char* end;
    bool written;  // some memory may only be read
    void* memory = nullptr;
    char* device = nullptr;
  };
  Device& device_;
  std::vector<Range> ranges_;
  i64 samples_ = 0, heads_ = 0;  // of the first tensor [B,T,H,D]: queries, where AttentionParams come
  i64 rows_ = 0, changes_ = 0;   // of the last matrix; of logits, where Draws come
  i64 tokens_ = 0;               // of the longest one, keys where these are in pages
  std::vector<TensorView> heads_views_;
};

template <auto member>
struct DeviceOp;
template <class... Args, void (*OpTable::*member)(Args...) noexcept>
struct DeviceOp<member> {
  static void run(Args... args) noexcept {
    Device& device = *test_device();
    RoundTrip trip(device);
    (trip.reach(args), ...);
    trip.upload();
    // Vectors become spans again, references and values pass.
    const auto call = [&](auto&&... moved) { (device.ops().*member)(moved...); };
    call(trip.on_device(static_cast<Args>(args))...);
    device.synchronize();
    trip.download();
  }
};

inline const OpTable* device_ops() {
  if (test_device() == nullptr) return nullptr;
  static const OpTable table = [] {
    OpTable ops = op_table_of<DeviceOp>(test_device()->ops().name);
    ops.codes = test_device()->ops().codes;
    return ops;
  }();
  return &table;
}

// The device of a test of whole models: that of test_device(), or the CPU's best kernels.
inline std::unique_ptr<Device> make_test_device(int num_threads) {
  return test_device() != nullptr ? open_test_gpu() : make_cpu_device(*cpu_ops(), num_threads);
}

// Makes the communicator of an axis when ranks share a GPU.
inline std::unique_ptr<Communicator> over_one_gpu(Communicator& host, const CommOptions& options) {
  return host.size() == 1 ? make_device_self_communicator(host, options) : make_staged_communicator(host, options);
}

// One rank on that device.
inline Mesh make_test_mesh(Device& device) {
  Mesh::OverDevice over_device;
  if (!device.is_host()) over_device = over_one_gpu;
  return Mesh(make_self_communicator({}), {}, {.device = &device}, over_device);
}

}  // namespace ds::testing
