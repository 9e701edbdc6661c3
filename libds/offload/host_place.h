// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where what stays with the host is kept: in its memory, which is page-locked for a device that copies from and to it
// where a configuration asks for that (pin_memory).

#include <string_view>

#include "device/device.h"

namespace ds::offload {

class HostPlace {
 public:
  HostPlace(Device& host) : host_(&host) {}  // NOLINT: a host is a place
  // key: of the configuration, which asks for it. Both devices outlive what is taken.
  HostPlace(Device& host, Device& pinned_for, std::string_view key)
      : host_(&host), pinned_for_(&pinned_for), key_(key) {}
  Device& device() const noexcept { return *host_; }
  // Zeros. Throws Errc::OutOfMemory; Errc::Unavailable: the system does not lock as much.
  Buffer take(MemoryLedger& ledger, Tag tag, i64 bytes) const;
  // Somebody else's, which outlives it, and has whole pages.
  Buffer hold(MemoryLedger& ledger, Tag tag, void* data, i64 bytes) const;

 private:
  void pin(void* data, i64 bytes) const;

  Device* host_;
  Device* pinned_for_ = nullptr;
  std::string_view key_{};
};

}  // namespace ds::offload
