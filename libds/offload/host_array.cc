// SPDX-License-Identifier: Apache-2.0
#include "offload/host_array.h"

#include <algorithm>
#include <exception>
#include <tuple>

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
  for (i64 i = 0; i < 1 + kBeside && bytes > 0; ++i) add_slot(most);
}

HostArray::~HostArray() {
  try {
    device_.synchronize(Queue::Copies);
  } catch (...) {  // an error of the device, which its next call reports
  }
  for (const Slot& s : slots_) {
    device_.destroy(s.copied);
    device_.destroy(s.used);
  }
}

HostArray::Slot& HostArray::add_slot(i64 bytes) {
  Slot& slot = slots_.emplace_back();
  slot.memory = device_buffer(device_, ledger_, Tag::Offload, room_of(bytes));
  slot.copied = device_.make_event();
  slot.used = device_.make_event();
  return slot;
}

HostArray::Slot* HostArray::at_rest(i64 bytes) noexcept {
  Slot* best = nullptr;
  const auto rank = [](const Slot& s) { return std::tuple(s.memory.bytes(), s.is, s.order); };
  for (Slot& s : slots_) {
    if (s.is != Is::Leased && s.memory.bytes() >= bytes && (best == nullptr || rank(s) < rank(*best))) best = &s;
  }
  return best;
}

// The buffers of a file are needed for the next data, so its copies are waited for; they take little time compared to
// the file.
void HostArray::copied(Slot& slot) {
  device_.record(slot.copied, Queue::Copies);
  copying_ = true;
  if (!there_->in_place()) device_.await(slot.copied);
}

void HostArray::bring(Slot& slot, i64 begin, i64 bytes) {
  const zero::TierLease there = there_->lease(begin, bytes, zero::LeaseTo::Read);
  device_.wait(Queue::Copies, slot.used);
  link_.start_upload(slot.memory.data(), there.data(), bytes);
  copied(slot);
  slot.is = Is::Coming;
  slot.begin = begin, slot.bytes = bytes;
  slot.order = ++order_;
}

void HostArray::expect(i64 begin, i64 bytes) {
  if (failed_ || bytes == 0) return;
  if (!there_->in_place()) return there_->expect(begin, bytes);
  i64 coming = 0;
  for (const Slot& s : slots_) {
    if (s.is != Is::Free && s.overlaps(begin, bytes)) return;  // it comes, or changes still
    coming += s.is == Is::Coming ? 1 : 0;
  }
  Slot* const slot = at_rest(bytes);
  if (coming < kBeside && slot != nullptr) bring(*slot, begin, bytes);
}

// There is one stream of copies, so waiting for it waits for all writes.
void* HostArray::on_host(i64 begin) const noexcept {
  void* const there = there_->on_host(begin);
  if (there == nullptr || !copying_) return there;
  try {
    device_.synchronize(Queue::Copies);
  } catch (...) {
    failed_ = std::current_exception();
  }
  for (Slot& s : slots_) {
    if (s.is == Is::Coming) s.is = Is::Free;
  }
  copying_ = false;
  return there;
}

void* HostArray::open(i64 begin, i64 bytes, zero::LeaseTo access) {
  if (failed_) std::rethrow_exception(failed_);
  Slot* slot = nullptr;
  for (Slot& s : slots_) {
    if (s.is != Is::Coming || !s.overlaps(begin, bytes)) continue;
    s.is = Is::Free;
    if (access != zero::LeaseTo::Fill && s.begin == begin && s.bytes == bytes) slot = &s;
  }
  if (slot == nullptr) {
    slot = at_rest(bytes);
    if (slot == nullptr) slot = &add_slot(bytes);
    if (access != zero::LeaseTo::Fill) bring(*slot, begin, bytes);
  }
  device_.wait(Queue::Compute, slot->copied);
  slot->is = Is::Leased;
  slot->begin = begin, slot->bytes = bytes;
  slot->order = ++order_;
  return slot->memory.data();
}

void HostArray::close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept {
  Slot& slot = *std::ranges::find(slots_, data, [](const Slot& s) { return s.memory.data(); });
  slot.is = Is::Free;
  try {
    device_.record(slot.used, Queue::Compute);
    if (access == zero::LeaseTo::Read) return;
    const zero::TierLease there = there_->lease(begin, bytes, zero::LeaseTo::Fill);
    device_.wait(Queue::Copies, slot.used);
    link_.start_download(there.data(), data, bytes);
    copied(slot);
  } catch (...) {
    failed_ = std::current_exception();
  }
}

}  // namespace ds::offload
