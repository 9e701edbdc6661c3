// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/thread.h"

namespace ds {
namespace {

class CpuDevice final : public SynchronousDevice {
 public:
  CpuDevice(const OpTable& ops, int num_threads) try : ops_(ops), pool_(num_threads), stream_{.pool = &pool_} {
  } catch (const std::system_error& e) {
    throw cannot_start(e, "raise it or use fewer threads");
  }

  DeviceKind kind() const noexcept override { return DeviceKind::Cpu; }
  u64 id() const noexcept override { return 0; }
  std::string_view name() const noexcept override { return ops_.name; }
  const OpTable& ops() const noexcept override { return ops_; }
  Stream& stream(Queue) noexcept override { return stream_; }

  void* allocate(i64 bytes) noexcept override {
    void* p = std::aligned_alloc(256, static_cast<size_t>(align_up(bytes, 256)));
    if (p != nullptr) std::memset(p, 0, static_cast<size_t>(bytes));
    return p;
  }
  void release(void* p) noexcept override { std::free(p); }
  DeviceMemory memory() const override { return {}; }
  i64 scratch_bytes() const noexcept override { return pool_.scratch_bytes(); }

  void copy(void* to, const void* from, i64 bytes, Queue) override { upload(to, from, bytes); }
  // C does not allow null pointers here, even with no bytes.
  void zero(void* p, i64 bytes) override {
    if (bytes > 0) std::memset(p, 0, static_cast<size_t>(bytes));
  }
  void upload(void* to, const void* from, i64 bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void download(void* to, const void* from, i64 bytes) override {
    constexpr i64 kTile = i64{1} << 20;
    pool_.parallel_for(div_ceil(bytes, kTile), [&](i64 tile, int) {
      const i64 at = tile * kTile;
      std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at,
                  static_cast<size_t>(std::min(kTile, bytes - at)));
    });
  }

 private:
  const OpTable& ops_;
  ThreadPool pool_;
  Stream stream_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const OpTable& ops, int num_threads) {
  return std::make_unique<CpuDevice>(ops, num_threads);
}

Buffer device_buffer(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes) {
  if (device.is_host() || bytes == 0) return Buffer(ledger, tag, bytes);
  void* p = device.allocate(bytes);
  if (p == nullptr) device.synchronize();  // after failed work allocation fails, too; synchronize() throws the cause
  DS_CHECK(p != nullptr, Errc::OutOfMemory,
           "{}: no memory for {:.3f} GiB of {}; {:.3f} of {:.3f} GiB are free, this run holds {}", device.name(),
           static_cast<double>(bytes) / 0x1p30, tag_name(tag), static_cast<double>(device.memory().free) / 0x1p30,
           static_cast<double>(device.memory().total) / 0x1p30, ledger.describe());
  return Buffer(ledger, tag, p, bytes, [&device, p] { device.release(p); });
}

}  // namespace ds
