// SPDX-License-Identifier: Apache-2.0
#include "offload/host_place.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/check.h"
#include "base/file.h"
#include "base/limits.h"
#include "ds/units.h"

namespace ds::offload {
void HostPlace::pin(void* data, i64 bytes) const {
  const std::string why = pinned_for_->pin(data, bytes);
  DS_CHECK(why.empty(), Errc::Unavailable,
           "{}: the system does not lock {} of memory for {}: {}; {}raise the limit of locked memory (ulimit -l, and "
           "the memory of the container)",
           key_, bytes_text(bytes), pinned_for_->name(), why,
           key_.ends_with("pin_memory") ? "set the key to false, or " : "");
}

// Allocates whole pages, which no other memory shares.
Buffer HostPlace::take(MemoryLedger& ledger, Tag tag, i64 bytes) const {
  if (pinned_for_ == nullptr || bytes == 0) return device_buffer(*host_, ledger, tag, bytes);
  const auto room = static_cast<size_t>(align_up(bytes, PageBuffer::kPage));
  void* const p = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  DS_CHECK(p != MAP_FAILED, Errc::OutOfMemory, "no memory for {} bytes of {}: {}", bytes, tag_name(tag),
           system_reason(errno));
  ::madvise(p, room, MADV_HUGEPAGE);
  try {
    pin(p, static_cast<i64>(room));
  } catch (...) {
    ::munmap(p, room);
    throw;
  }
  return Buffer(ledger, tag, p, bytes, [device = pinned_for_, p, room] {
    device->unpin(p);
    ::munmap(p, room);
  });
}

Buffer HostPlace::hold(MemoryLedger& ledger, Tag tag, void* data, i64 bytes) const {
  if (pinned_for_ == nullptr || bytes == 0) return Buffer(ledger, tag, data, bytes, [] {});
  pin(data, align_up(bytes, PageBuffer::kPage));
  return Buffer(ledger, tag, data, bytes, [device = pinned_for_, data] { device->unpin(data); });
}

}  // namespace ds::offload
