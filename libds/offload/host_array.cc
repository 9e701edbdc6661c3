// SPDX-License-Identifier: Apache-2.0
#include "offload/host_array.h"

#include <algorithm>
#include <exception>

#include "base/check.h"

namespace ds::offload {
namespace {

// The size of buffers for so many bytes: an eighth more at most, so that those of about one size take turns.
i64 room_of(i64 bytes) noexcept {
  i64 step = 4096;
  while (step * 16 <= bytes) step *= 2;
  return align_up(bytes, step);
}

}  // namespace

HostArray::HostArray(Device& device, HostCopies* copies, std::unique_ptr<zero::TierArray> there, MemoryLedger& ledger,
                     i64 bytes, i64 most)
    : device_(device), link_(device, copies), ledger_(ledger), there_(std::move(there)) {
  if (bytes > 0) add_slot(most);
}

void HostArray::add_slot(i64 bytes) {
  slots_.push_back({device_buffer(device_, ledger_, Tag::Offload, room_of(bytes))});
}

// The smallest that has room, so that memory is as predicted. What is enqueued with a buffer before it is filled anew
// runs before: copies and ops share a stream.
void* HostArray::open(i64 begin, i64 bytes, zero::LeaseTo access) {
  if (failed_) std::rethrow_exception(failed_);
  Slot* best = nullptr;
  for (Slot& s : slots_) {
    if (!s.taken && s.memory.bytes() >= bytes && (best == nullptr || s.memory.bytes() < best->memory.bytes()))
      best = &s;
  }
  if (best == nullptr) {
    add_slot(bytes);
    best = &slots_.back();
  }
  if (access != zero::LeaseTo::Fill) {
    const zero::TierLease there = there_->lease(begin, bytes, zero::LeaseTo::Read);
    link_.upload(best->memory.data(), there.data(), bytes);
  }
  best->taken = true;
  return best->memory.data();
}

void HostArray::close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept {
  Slot& slot = *std::ranges::find(slots_, data, [](const Slot& s) { return s.memory.data(); });
  slot.taken = false;
  if (access == zero::LeaseTo::Read) return;
  try {
    const zero::TierLease there = there_->lease(begin, bytes, zero::LeaseTo::Fill);
    link_.download(there.data(), data, bytes);
  } catch (...) {
    failed_ = std::current_exception();
  }
}

}  // namespace ds::offload
