// SPDX-License-Identifier: Apache-2.0
#include "offload/file_array.h"

#include <algorithm>
#include <cstring>

namespace ds::offload {
namespace {

constexpr i64 page_down(i64 at) noexcept { return at / BlockFile::kPage * BlockFile::kPage; }
constexpr i64 page_up(i64 at) noexcept { return align_up(at, BlockFile::kPage); }

}  // namespace

FileArray::FileArray(Device& device, MemoryLedger& ledger, i64 bytes, i64 most, const Options& options)
    : device_(device),
      ledger_(ledger),
      options_(options),
      slot_bytes_(page_up(most) + kPage) {  // a lease begins and ends within a page
  slots_.reserve(64);
  while (std::ssize(slots_) < 1 + options.beside) add_slot();
  if (options.dir.empty()) {
    file_ = std::make_unique<BlockFile>();
  } else if (bytes > 0) {
    file_ = std::make_unique<BlockFile>(options.dir, page_up(bytes), std::span<char>(), options.io);
  }
}

FileArray::~FileArray() = default;

void FileArray::add_slot() {
  Slot& slot = slots_.emplace_back();
  slot.memory = device_buffer(device_, ledger_, Tag::Offload, slot_bytes_ + kPage);
  slot.data = reinterpret_cast<char*>(page_up(reinterpret_cast<i64>(slot.memory.data())));
}

void FileArray::settle(Slot& slot) {
  if (slot.is != Is::Coming && slot.is != Is::Going) return;
  slot.is = Is::Free;  // if it fails
  file_->wait(slot.ticket);
  slot.is = Is::Here;
}

void FileArray::settle_going(i64 begin, i64 end) {
  for (Slot& s : slots_) {
    if (s.is == Is::Going && s.begin < end && begin < s.end()) settle(s);
  }
}

// What was used longest ago, of what is at rest; else of what goes; else of what comes, for others than who asks.
FileArray::Slot* FileArray::at_rest(bool may_wait) {
  Slot* best = nullptr;
  const auto rank = [](const Slot& s) {
    const int kind = s.is == Is::Free ? 0 : s.is == Is::Here ? 1 : s.is == Is::Going ? 2 : 3;
    return std::pair(kind, s.used);
  };
  for (Slot& s : slots_) {
    if (s.is == Is::Leased) continue;
    if (s.is == Is::Going && file_->done(s.ticket)) settle(s);
    if (!may_wait && (s.is == Is::Going || s.is == Is::Coming)) continue;
    if (best == nullptr || rank(s) < rank(*best)) best = &s;
  }
  if (best != nullptr) settle(*best);
  return best;
}

// Pages that several leases write to are newer here than in the file.
void FileArray::put_shared_pages(Slot& slot) const {
  if (!file_->is_there()) return;
  for (auto it = shared_.lower_bound(slot.begin / kPage); it != shared_.end() && it->first * kPage < slot.end(); ++it)
    std::memcpy(slot.data + it->first * kPage - slot.begin, it->second->bytes, kPage);
}

void* FileArray::open(i64 begin, i64 bytes, zero::LeaseTo access) {
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  DS_ASSERT(page_up(bytes) + kPage <= slot_bytes_);
  ++leased_;
  while (std::ssize(slots_) < leased_ + options_.beside) add_slot();
  const i64 first = page_down(begin), last = page_up(begin + bytes);
  Slot* slot = nullptr;
  for (Slot& s : slots_) {
    if (s.is != Is::Free && s.is != Is::Leased && s.begin == first && s.end() == last) slot = &s;
  }
  if (slot != nullptr) {
    settle(*slot);
  } else {
    slot = at_rest(true);
    slot->is = Is::Free;
    slot->begin = first, slot->bytes = last - first;
    if (file_ && access != zero::LeaseTo::Fill && bytes > 0) {
      settle_going(first, last);
      file_->wait(file_->read(slot->data, first, last - first));
    }
  }
  if (file_) put_shared_pages(*slot);
  slot->is = Is::Leased;
  slot->used = ++uses_;
  return slot->data + (begin - first);
}

void FileArray::expect(i64 begin, i64 bytes) {
  if (!options_.read_ahead || bytes == 0 || !file_) return;
  const i64 first = page_down(begin), last = page_up(begin + bytes);
  for (const Slot& s : slots_) {
    if (s.is != Is::Free && s.begin < last && first < s.end()) return;  // it is there, or changes still
  }
  Slot* const slot = at_rest(false);
  if (slot == nullptr) return;
  slot->begin = first, slot->bytes = last - first;
  slot->ticket = file_->read(slot->data, first, last - first);
  slot->is = Is::Coming;
  slot->used = ++uses_;
}

// `known`: what the slot has of the page outside of its lease is the file's.
FileArray::Page& FileArray::shared_page(i64 number, const Slot& slot, bool known) {
  std::unique_ptr<Page>& page = shared_[number];
  if (page) return *page;
  page = std::make_unique<Page>();
  if (known) {
    std::memcpy(page->bytes, slot.data + number * kPage - slot.begin, kPage);
  } else {
    alignas(kPage) char there[kPage];
    file_->wait(file_->read(there, number * kPage, kPage));
    std::memcpy(page->bytes, there, kPage);
  }
  return *page;
}

void FileArray::write_back(Slot& slot, i64 begin, i64 bytes, bool known) {
  const i64 end = begin + bytes, whole_begin = page_up(begin), whole_end = page_down(end);
  // What others have of these bytes is old.
  for (Slot& s : slots_) {
    if (&s == &slot || s.is == Is::Free || s.is == Is::Leased || s.begin >= slot.end() || slot.begin >= s.end())
      continue;
    settle(s);
    s.is = Is::Free;
  }
  const auto share = [&](i64 number, bool all_known) {
    if (!file_->is_there()) return;
    Page& page = shared_page(number, slot, all_known);
    const i64 from = std::max(begin, number * kPage), to = std::min(end, (number + 1) * kPage);
    std::memcpy(page.bytes + (from - number * kPage), slot.data + (from - slot.begin), static_cast<size_t>(to - from));
  };
  if (begin < whole_begin) share(begin / kPage, known);
  if (whole_end < end && (begin >= whole_begin || end / kPage != begin / kPage)) share(end / kPage, known);
  for (auto it = shared_.lower_bound(whole_begin / kPage); it != shared_.end() && it->first * kPage < whole_end; ++it)
    share(it->first, true);
  slot.is = Is::Here;
  if (whole_begin >= whole_end) return;
  slot.ticket = file_->write(slot.data + (whole_begin - slot.begin), whole_begin, whole_end - whole_begin);
  slot.is = Is::Going;
  if (!options_.write_behind) settle(slot);
}

void FileArray::close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept {
  --leased_;
  const auto it = std::ranges::find_if(
      slots_, [&](const Slot& s) { return s.is == Is::Leased && s.data + (begin - s.begin) == data; });
  if (it == slots_.end()) std::terminate();
  it->is = Is::Here;
  if (access == zero::LeaseTo::Read || bytes == 0 || !file_) return;
  try {
    write_back(*it, begin, bytes, access == zero::LeaseTo::Write);
  } catch (...) {
    it->is = Is::Free;
    failed_ = std::current_exception();
  }
}

}  // namespace ds::offload
