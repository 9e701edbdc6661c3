// SPDX-License-Identifier: Apache-2.0
#pragma once
// An array of a rank (sums of gradients, slices of parameters) in a tier: the memory in which it is stored between
// uses. It is reached through leases alone; no caller keeps an address after its lease.

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "device/device.h"

namespace ds::zero {

// Write: also reads. Fill: the previous content is not needed.
enum class LeaseTo : u8 { Read, Write, Fill };

class TierArray;

// A part of an array, in device memory until the lease ends. Move-only.
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
  // Bytes [begin, begin + bytes). Any number of leases may be open at a time; one that writes must not overlap another.
  // Work that was enqueued on the device may end after the lease.
  TierLease lease(i64 begin, i64 bytes, LeaseTo access) {
    return {this, open(begin, bytes, access), begin, bytes, access};
  }
  // These bytes will be leased soon: starts to fetch them, if that takes time and there is room.
  virtual void expect(i64 begin, i64 bytes) { static_cast<void>(begin), static_cast<void>(bytes); }
  // An array that is read into memory of the caller, without leases: at pages of kReadPage bytes in both, as many as
  // there are from `begin` to the end of the part. The memory belongs to the reading until end_read(), which throws its
  // failure; several may be in progress. No lease that writes may be open.
  static constexpr i64 kReadPage = 4096;
  virtual bool reads_directly() const noexcept { return false; }
  using Reading = i32;
  virtual Reading begin_read(void* to, i64 begin, i64 bytes);
  virtual void end_read(Reading reading);
  // Whether leases are the memory in which the array is stored.
  virtual bool in_place() const noexcept = 0;
  // The address of byte `begin`, if it is stored in host memory other than the device's; otherwise null. Valid while it
  // is not leased.
  virtual void* on_host(i64 begin) const noexcept { return static_cast<void>(begin), nullptr; }

 protected:
  friend class TierLease;
  virtual void* open(i64 begin, i64 bytes, LeaseTo access) = 0;
  virtual void close(void* data, i64 begin, i64 bytes, LeaseTo access) noexcept = 0;
};

inline TierArray::Reading TierArray::begin_read(void*, i64, i64) { std::terminate(); }
inline void TierArray::end_read(Reading) { std::terminate(); }

inline void TierLease::end() noexcept {
  if (array_ != nullptr) array_->close(data_, begin_, bytes_, access_);
  array_ = nullptr;
}

// Device memory, owned, or given and outliving the array.
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

// Makes an array of `bytes` bytes in a tier, all zero. most: the largest lease, in bytes.
using MakeArray =
    std::function<std::unique_ptr<TierArray>(Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, i64 most)>;

}  // namespace ds::zero
