// SPDX-License-Identifier: Apache-2.0
#include "serve/slots.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/check.h"
#include "ds/kernels/thread_pool.h"

namespace ds::serve {

static_assert(std::atomic<u64>::is_always_lock_free && sizeof(TableHeader) % alignof(std::atomic<u64>) == 0);

Slots::Slots(offload::Segment table, const TableHeader& fresh) : table_(std::move(table)) {
  TableHeader& h = header();
  if (h.version == 0) h = fresh;
  const TableHeader known;
  const auto need = [&](bool good, std::string_view what) {
    DS_CHECK(good, Errc::Corrupt, "{}: {}", table_.path(), what);
  };
  need(std::ranges::equal(h.magic, known.magic), "not a table of a server of states");
  DS_CHECK(h.version == known.version, Errc::Unavailable,
           "{}: version {}, but this program reads version {}: dump it with the ds-offload that made it, or remove it "
           "(ds-offload rm)",
           table_.path(), h.version, known.version);
  need(h.chunks >= 0 && h.slots >= h.chunks && h.slots < i64{kNoSlot} && h.slot_bytes >= 0 &&
           checked_mul({h.slots, h.slot_bytes}),
       "impossible slots");
  need((h.checksums == 0 || h.checksums == 1) && table_bytes(h) == table_.bytes(), "of another size");
  ahead_.assign(static_cast<size_t>(h.chunks), kNoSlot);
  next_ = ahead_;
  std::vector<bool> used(static_cast<size_t>(h.slots), false);
  for (i64 c = 0; c < h.chunks; ++c) {
    const u32 s = slot(c);
    if (s == kNoSlot) continue;
    need(s < h.slots && !used[s], "two chunks in one slot");
    used[s] = true;
  }
  for (i64 s = h.slots; s-- > 0;) {
    if (!used[static_cast<size_t>(s)]) free_.push_back(static_cast<u32>(s));
  }
}

Slots Slots::open(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  DS_CHECK(!error && bytes >= sizeof(TableHeader), Errc::Corrupt, "{}: {}", path,
           error ? error.message() : "too short for a table");
  TableHeader unknown;  // of a table that begins with zeros
  unknown.magic[0] = 0;
  return {offload::Segment::open(path, static_cast<i64>(bytes)), unknown};
}

Slots::Flips Slots::ahead() const {
  Flips flips;
  for (size_t c = 0; c < ahead_.size(); ++c) {
    if (ahead_[c] != kNoSlot) flips.emplace_back(static_cast<i64>(c), i64{ahead_[c]});
  }
  return flips;
}

// The slot before becomes free when the table does not name it any more.
void Slots::enter(i64 chunk, u32 slot) noexcept {
  const u32 before = static_cast<u32>(entry(chunk).load()) - 1;
  if (before == slot) return;
  entry(chunk).store(u64{step_} << 32 | (u64{slot} + 1));
  if (before != kNoSlot) free_.push_back(before);
}

void Slots::keep(const Flips& flips) noexcept {
  for (const auto& [chunk, slot] : flips) {
    enter(chunk, static_cast<u32>(slot));
    ahead_[static_cast<size_t>(chunk)] = kNoSlot;
    std::erase(free_, static_cast<u32>(slot));  // of a process that knew nothing of it
  }
}

i64 Slots::next_place(i64 chunk) {
  DS_ASSERT(!free_.empty() && next_[chunk] == kNoSlot);
  next_[chunk] = free_.back();
  free_.pop_back();
  return i64{next_[chunk]} * header().slot_bytes;
}

void Slots::written(i64 chunk) noexcept {
  const u32 slot = std::exchange(next_[chunk], kNoSlot);
  if (at_once_) return enter(chunk, slot);
  if (const u32 before = std::exchange(ahead_[chunk], slot); before != kNoSlot) free_.push_back(before);
}

void Slots::set_next_checksum(i64 chunk, u64 sum) noexcept {
  this->sum(next_[chunk] != kNoSlot ? next_[chunk] : ahead_[chunk]) = sum;
}

void Slots::check(i64 chunk, const char* data, i64 bytes, const std::string& file) const {
  if (!has_checksums() || !is_there(chunk)) return;
  DS_CHECK(offload::checksum(data, bytes) == sum(slot(chunk)), Errc::Corrupt,
           "{}: chunk {}, in slot {}, differs from what was written: damaged", file, chunk, slot(chunk));
}

SlotMemory::SlotMemory(Slots& slots, const offload::Segment& memory, const std::vector<i64>& chunk_bytes,
                       ThreadPool* pool)
    : slots_(slots),
      memory_(memory),
      bytes_(chunk_bytes),
      pool_(pool),
      zeros_(static_cast<size_t>(slots.header().slot_bytes)) {}

char* SlotMemory::take(i64 chunk, bool change) {
  const bool is_there = slots_.is_there(chunk);
  char* const now = is_there ? memory_.data() + slots_.place(chunk) : zeros_.data();
  if (change || chunk != checked_) slots_.check(chunk, now, bytes_[chunk], memory_.path());
  checked_ = chunk;
  moved_ = change && !slots_.is_ahead(chunk);
  taken_ = now;
  if (!moved_) return now;
  char* const next = memory_.data() + slots_.next_place(chunk);
  constexpr i64 kPart = 256 << 10;  // bytes
  const i64 bytes = bytes_[chunk];
  const auto copy = [&](i64 part, int) {
    const i64 at = part * kPart;
    std::memcpy(next + at, now + at, static_cast<size_t>(std::min(kPart, bytes - at)));
  };
  if (pool_ != nullptr) {
    pool_->parallel_for(div_ceil(bytes, kPart), copy);
  } else {
    for (i64 part = 0; part < div_ceil(bytes, kPart); ++part) copy(part, 0);
  }
  return taken_ = next;
}

void SlotMemory::give_back(i64 chunk, bool changed) {
  DS_ASSERT(changed || !moved_);
  if (changed && slots_.has_checksums()) slots_.set_next_checksum(chunk, offload::checksum(taken_, bytes_[chunk]));
  if (std::exchange(moved_, false)) slots_.written(chunk);
}

}  // namespace ds::serve
