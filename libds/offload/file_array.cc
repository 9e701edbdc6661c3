// SPDX-License-Identifier: Apache-2.0
#include "offload/file_array.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace ds::offload {
namespace {

constexpr i64 page_down(i64 at) noexcept { return at / BlockFile::kPage * BlockFile::kPage; }
constexpr i64 page_up(i64 at) noexcept { return align_up(at, BlockFile::kPage); }

}  // namespace

FileArray::FileArray(const HostPlace& host, MemoryLedger& ledger, i64 bytes, i64 most, const Options& options)
    : host_(host),
      ledger_(ledger),
      options_(options),
      most_(most),
      pages_(static_cast<size_t>(std::min(options.pages, page_up(bytes) / kPage))) {
  slots_.reserve(64);
  page_memory_ = host.take(ledger, options.tag, (std::ssize(pages_) + 1) * kPage);
  page_data_ = reinterpret_cast<char*>(page_up(reinterpret_cast<i64>(page_memory_.data())));
  for (i64 i = 0; i < 1 + options.beside && bytes > 0; ++i) add_slot(room_of(most));
  if (options.dir.empty()) {
    file_ = std::make_unique<BlockFile>();
  } else if (bytes > 0) {
    file_ = std::make_unique<BlockFile>(options.dir, page_up(bytes), std::span<char>(), options.io);
  }
}

FileArray::~FileArray() = default;

i64 FileArray::room_of(i64 bytes) noexcept {
  const i64 room = page_up(bytes) + kPage;  // of pages that are touched
  const i64 step = std::max(static_cast<i64>(std::bit_floor(static_cast<u64>(room))) / 8, kPage);
  return align_up(room, step);
}

void FileArray::add_slot(i64 room) {
  Slot& slot = slots_.emplace_back();
  slot.memory = host_.take(ledger_, options_.tag, room + kPage);
  slot.data = reinterpret_cast<char*>(page_up(reinterpret_cast<i64>(slot.memory.data())));
  slot.room = room;
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

void FileArray::forget(i64 begin, i64 end, const Slot* but) {
  for (Slot& s : slots_) {
    if (&s == but || s.is == Is::Free || s.is == Is::Leased || s.begin >= end || begin >= s.end()) continue;
    settle(s);
    s.is = Is::Free;
  }
}

// Which sizes are leased, and so how many buffers there are, must not depend on the disk's speed: the smallest is
// taken, whatever is in it.
i64 FileArray::room_at_rest(i64 bytes) const noexcept {
  i64 room = 0;
  for (const Slot& s : slots_) {
    if (s.is != Is::Leased && s.room >= room_of(bytes) && (room == 0 || s.room < room)) room = s.room;
  }
  return room;
}

// The least recently used slot at rest; else of those being written; else of those being read ahead for other uses.
FileArray::Slot* FileArray::at_rest(i64 room, bool may_wait) {
  Slot* best = nullptr;
  const auto rank = [](const Slot& s) {
    const int kind = s.is == Is::Free ? 0 : s.is == Is::Here ? 1 : s.is == Is::Going ? 2 : 3;
    return std::pair(kind, s.used);
  };
  for (Slot& s : slots_) {
    if (s.is == Is::Leased || s.room != room) continue;
    if (s.is == Is::Going && file_->done(s.ticket)) settle(s);
    if (!may_wait && (s.is == Is::Going || s.is == Is::Coming)) continue;
    if (best == nullptr || rank(s) < rank(*best)) best = &s;
  }
  if (best != nullptr) settle(*best);
  return best;
}

FileArray::Page* FileArray::find_page(i64 number) noexcept {
  const auto it = std::ranges::find(pages_, number, &Page::number);
  return it == pages_.end() ? nullptr : &*it;
}

// Pages in memory are newer than those of the file.
void FileArray::put_pages(Slot& slot) {
  if (!file_->is_there()) return;
  for (const Page& page : pages_) {
    const i64 at = page.number * kPage;
    if (page.number >= 0 && at >= slot.begin && at < slot.end())
      std::memcpy(slot.data + (at - slot.begin), bytes_of(page), kPage);
  }
}

void FileArray::write_page(Page& page) {
  forget(page.number * kPage, (page.number + 1) * kPage, nullptr);
  file_->wait(file_->write(bytes_of(page), page.number * kPage, kPage));
  page.number = -1;
}

void* FileArray::open(i64 begin, i64 bytes, zero::LeaseTo access) {
  DS_ASSERT(bytes <= most_);
  if (file_) file_->throw_if_failed();
  const i64 first = page_down(begin), last = page_up(begin + bytes);
  i64 room = room_at_rest(bytes);
  if (room == 0) add_slot(room = room_of(bytes));
  const auto holds = [&](const Slot& s) {
    return s.is != Is::Free && s.is != Is::Leased && s.current && s.begin == first && s.end() == last && s.room == room;
  };
  const auto it = std::ranges::find_if(slots_, holds);
  Slot* slot = it == slots_.end() ? nullptr : &*it;
  if (slot != nullptr) {
    settle(*slot);
  } else {
    slot = at_rest(room, true);
    slot->is = Is::Free;
    slot->begin = first, slot->bytes = last - first;
    if (file_ && access != zero::LeaseTo::Fill && bytes > 0) {
      settle_going(first, last);
      file_->wait(file_->read(slot->data, first, last - first));
    }
  }
  if (file_) put_pages(*slot);
  slot->is = Is::Leased;
  slot->used = ++uses_;
  return slot->data + (begin - first);
}

void FileArray::expect(i64 begin, i64 bytes) {
  if (!options_.read_ahead || bytes == 0 || !file_) return;
  file_->throw_if_failed();
  const i64 first = page_down(begin), last = page_up(begin + bytes);
  for (const Slot& s : slots_) {
    if (s.is != Is::Free && s.begin < last && first < s.end()) return;  // it is there, or changes still
  }
  Slot* const slot = at_rest(room_at_rest(bytes), false);
  if (slot == nullptr) return;
  slot->begin = first, slot->bytes = last - first;
  slot->ticket = file_->read(slot->data, first, last - first);
  slot->is = Is::Coming;
  slot->current = true;
  slot->used = ++uses_;
}

void FileArray::flush() {
  if (std::exchange(flushed_, true)) return;
  for (Page& page : pages_) {
    if (page.number >= 0) write_page(page);
  }
  for (Slot& s : slots_) settle(s);
}

zero::TierArray::Reading FileArray::begin_read(void* to, i64 begin, i64 bytes) {
  DS_ASSERT(begin % kPage == 0 && kReadPage == kPage);
  file_->throw_if_failed();
  flush();
  return file_->read(to, begin, page_up(bytes));
}

// Its content outside of what a lease has is that of the file: others may have written there since the lease began.
FileArray::Page& FileArray::take_page(i64 number) {
  Page* page = find_page(number);
  if (page == nullptr) {
    page = &*std::ranges::min_element(pages_, {}, [](const Page& p) { return std::pair(p.number >= 0, p.used); });
    if (page->number >= 0) write_page(*page);
    settle_going(number * kPage, (number + 1) * kPage);
    file_->wait(file_->read(bytes_of(*page), number * kPage, kPage));
    page->number = number;
  }
  page->used = ++uses_;
  return *page;
}

void FileArray::write_back(Slot& slot, i64 begin, i64 bytes) {
  const i64 end = begin + bytes, whole_begin = page_up(begin), whole_end = page_down(end);
  flushed_ = false;
  forget(slot.begin, slot.end(), &slot);
  // Copies its part of a page to which other leases write too.
  const auto share = [&](i64 number) {
    Page& page = take_page(number);
    if (!file_->is_there()) return;
    const i64 from = std::max(begin, number * kPage), to = std::min(end, (number + 1) * kPage);
    std::memcpy(bytes_of(page) + (from - number * kPage), slot.data + (from - slot.begin),
                static_cast<size_t>(to - from));
  };
  if (begin < whole_begin) share(begin / kPage);
  if (whole_end < end && (begin >= whole_begin || end / kPage != begin / kPage)) share(end / kPage);
  for (Page& page : pages_) {
    if (page.number * kPage >= whole_begin && page.number * kPage < whole_end) page.number = -1;  // all of it is new
  }
  slot.is = Is::Here;
  if (whole_begin >= whole_end) return;
  slot.ticket = file_->write(slot.data + (whole_begin - slot.begin), whole_begin, whole_end - whole_begin);
  slot.is = Is::Going;
  if (!options_.write_behind) settle(slot);
}

void FileArray::close(void* data, i64 begin, i64 bytes, zero::LeaseTo access) noexcept {
  // Buffers may lie as far from each other as what they hold: both must be right.
  const auto it = std::ranges::find_if(slots_, [&](const Slot& s) {
    return s.is == Is::Leased && s.begin == page_down(begin) && s.data + (begin - s.begin) == data;
  });
  if (it == slots_.end()) std::terminate();  // nobody's lease
  it->is = Is::Here;
  it->current = begin == it->begin && begin + bytes == it->end();
  if (access == zero::LeaseTo::Read || bytes == 0 || !file_) return;
  try {
    write_back(*it, begin, bytes);
  } catch (...) {
    it->is = Is::Free;
    file_->fail(std::current_exception());  // the next call reports it
  }
}

}  // namespace ds::offload
