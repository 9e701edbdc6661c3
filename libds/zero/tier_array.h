// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of what a rank keeps (accumulated gradients, slices of parameters), in a tier: the memory where it stays
// while nobody works with it. It is reached through leases alone; nobody keeps an address beyond one.

#include <functional>
#include <memory>
#include <utility>

#include "device/device.h"

namespace ds::zero {

// Read; Write: reads, too; Fill: what was there is of no use.
enum class LeaseTo : u8 { Read, Write, Fill };

class TierArray;

// Bytes of an array in device memory until it ends. Move-only.
class TierLease {
 public:
  TierLease() = default;
  TierLease(TierArray* array, void* data, i64 begin, i64 bytes, LeaseTo access) noexcept
      : array_(array), data_(data), begin_(begin), bytes_(bytes), access_(access) {}
  TierLease(TierLease&& other) noexcept { *this = std::move(other); }
  TierLease& operator=(TierLease&& other) noexcept {
    end();
    array_ = std::exchange(other.array_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    begin_ = other.begin_, bytes_ = other.bytes_, access_ = other.access_;
    return *this;
  }
  ~TierLease() { end(); }
  void* data() const noexcept { return data_; }
  float* values() const noexcept { return static_cast<float*>(data_); }

 private:
  void end() noexcept;
  TierArray* array_ = nullptr;
  void* data_ = nullptr;
  i64 begin_ = 0, bytes_ = 0;
  LeaseTo access_ = LeaseTo::Read;
};

class TierArray {
 public:
  virtual ~TierArray() = default;
  // Bytes [begin, begin + bytes) of it. There may be any number of leases at a time; those that write have nothing in
  // common with others. What is enqueued with one may end after it.
  TierLease lease(i64 begin, i64 bytes, LeaseTo access) {
    return {this, open(begin, bytes, access), begin, bytes, access};
  }
  // These bytes will be leased soon: they begin to come, where that takes time and there is room.
  virtual void expect(i64 begin, i64 bytes) { static_cast<void>(begin), static_cast<void>(bytes); }
  // Whether leases are the very memory in which the array stays.
  virtual bool in_place() const noexcept = 0;
  // Where byte `begin` of it stays, in host memory that is not the device's; null: not in such. While nobody leases it.
  virtual void* on_host(i64 begin) const noexcept { return static_cast<void>(begin), nullptr; }

 protected:
  friend class TierLease;
  virtual void* open(i64 begin, i64 bytes, LeaseTo access) = 0;
  virtual void close(void* data, i64 begin, i64 bytes, LeaseTo access) noexcept = 0;
};

inline void TierLease::end() noexcept {
  if (array_ != nullptr) array_->close(data_, begin_, bytes_, access_);
  array_ = nullptr;
}

// Device memory: its own, or somebody else's that outlives it.
class DeviceArray final : public TierArray {
 public:
  explicit DeviceArray(Buffer memory) : memory_(std::move(memory)), data_(static_cast<char*>(memory_.data())) {}
  explicit DeviceArray(void* data) : data_(static_cast<char*>(data)) {}
  bool in_place() const noexcept override { return true; }

 private:
  void* open(i64 begin, i64, LeaseTo) override { return data_ == nullptr ? nullptr : data_ + begin; }
  void close(void*, i64, i64, LeaseTo) noexcept override {}

  Buffer memory_;
  char* data_;
};

// Makes an array of a rank of so many bytes in a tier, which begins as zeros. most: bytes of a lease.
using MakeArray =
    std::function<std::unique_ptr<TierArray>(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, i64 most)>;

}  // namespace ds::zero
