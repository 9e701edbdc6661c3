// SPDX-License-Identifier: Apache-2.0
#pragma once
// Allocates host memory for offloaded data, page-locked for a device that copies from and to it if the configuration
// asks for that (pin_memory).

#include <string_view>

#include "device/device.h"

namespace ds::offload {

class HostPlace {
 public:
  HostPlace(Device& host) : host_(&host) {}  // NOLINT: a host is a place
  // key: the key of the configuration that asks for it. Both devices outlive the memory.
  HostPlace(Device& host, Device& pinned_for, std::string_view key)
      : host_(&host), pinned_for_(&pinned_for), key_(key) {}
  Device& device() const noexcept { return *host_; }
  // Zero-initialised. Throws Errc::OutOfMemory; Errc::Unavailable if the system does not lock so much memory.
  Buffer take(MemoryLedger& ledger, Tag tag, i64 bytes) const;
  // Uses memory of another owner, which outlives it and consists of whole pages.
  Buffer hold(MemoryLedger& ledger, Tag tag, void* data, i64 bytes) const;

 private:
  void pin(void* data, i64 bytes) const;

  Device* host_;
  Device* pinned_for_ = nullptr;
  std::string_view key_{};
};

}  // namespace ds::offload
