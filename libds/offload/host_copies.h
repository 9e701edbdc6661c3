// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes copied between a GPU and its host for offloading.

#include "device/device.h"

namespace ds::offload {

struct HostCopies {
  i64 to_device = 0, to_host = 0;
  friend HostCopies operator+(const HostCopies& a, const HostCopies& b) noexcept {
    return {a.to_device + b.to_device, a.to_host + b.to_host};
  }
  friend HostCopies operator-(const HostCopies& a, const HostCopies& b) noexcept {
    return {a.to_device - b.to_device, a.to_host - b.to_host};
  }
  friend HostCopies operator*(i64 n, const HostCopies& a) noexcept { return {n * a.to_device, n * a.to_host}; }
};

// Counts a device's copies from and to its host; null if the device is the host.
class HostLink {
 public:
  HostLink(Device& device, HostCopies* counts) noexcept : device_(&device), counts_(counts) {}
  void upload(void* to, const void* from, i64 bytes) const {
    if (counts_ != nullptr) counts_->to_device += bytes;
    device_->upload(to, from, bytes);
  }
  void download(void* to, const void* from, i64 bytes) const {
    if (counts_ != nullptr) counts_->to_host += bytes;
    device_->download(to, from, bytes);
  }

  // On Queue::Copies.
  void start_upload(void* to, const void* from, i64 bytes) const {
    if (counts_ != nullptr) counts_->to_device += bytes;
    device_->start_upload(to, from, bytes);
  }
  void start_download(void* to, const void* from, i64 bytes) const {
    if (counts_ != nullptr) counts_->to_host += bytes;
    device_->start_download(to, from, bytes);
  }

 private:
  Device* device_;
  HostCopies* counts_;
};

}  // namespace ds::offload
