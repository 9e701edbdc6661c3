// SPDX-License-Identifier: Apache-2.0
#pragma once
// The chunks of a server: slots of one size, in memory or in a file, and a table that outlives the process. A changed
// chunk gets another slot, and the table names that when all of it is written: whichever process is killed at whatever
// moment, the table names complete chunks. Each has the number of the step that made it.

#include <atomic>
#include <utility>
#include <vector>

#include "offload/chunk_memory.h"
#include "offload/segment.h"
#include "offload/served.h"

namespace ds::serve {

inline constexpr u32 kNoSlot = 0xFFFFFFFF;
inline constexpr u32 kTableVersion = 2;

// The header of the table's file; the entries of chunks follow, and the checksums of slots if they are kept.
struct TableHeader {
  char magic[8] = {'d', 's', 's', 'e', 'r', 'v', 'e', '1'};
  u32 version = kTableVersion;
  u32 two_versions = 0;  // of states, so that a step of several passes is complete or not done
  i64 chunks = 0, slots = 0, slot_bytes = 0;
  i64 published = 0;  // the states belong to the record
  offload::ServedRecord record = {};
  i64 checksums = 0;  // 1: checksums are kept
};

class Slots final : public offload::ChunkPlaces {
 public:
  static i64 table_bytes(const TableHeader& h) noexcept {
    return static_cast<i64>(sizeof(TableHeader)) +
           (h.chunks + (h.checksums != 0 ? h.slots : 0)) * static_cast<i64>(sizeof(u64));
  }
  // The entries of a new table are zeros. Throws Errc::Corrupt if the table has impossible entries.
  Slots(offload::Segment table, const TableHeader& fresh);
  static Slots open(const std::string& path);
  Slots(Slots&&) = default;

  TableHeader& header() const noexcept { return *reinterpret_cast<TableHeader*>(table_.data()); }

  // For the next versions: the step, and whether they replace the previous ones at once, or when keep() is called.
  void begin_version(u32 step, bool at_once) noexcept {
    step_ = step;
    at_once_ = at_once;
  }
  u32 version(i64 chunk) const noexcept { return static_cast<u32>(entry(chunk).load() >> 32); }
  bool is_ahead(i64 chunk) const noexcept { return ahead_[chunk] != kNoSlot; }
  u32 slot(i64 chunk) const noexcept {
    return ahead_[chunk] != kNoSlot ? ahead_[chunk] : static_cast<u32>(entry(chunk).load()) - 1;
  }
  // The versions not yet kept, as (chunk, slot).
  using Flips = std::vector<std::pair<i64, i64>>;
  Flips ahead() const;
  void keep(const Flips& flips) noexcept;

  bool is_there(i64 chunk) const noexcept override { return slot(chunk) != kNoSlot; }
  i64 place(i64 chunk) const noexcept override { return i64{slot(chunk)} * header().slot_bytes; }
  i64 next_place(i64 chunk) override;
  void written(i64 chunk) noexcept override;
  // A slot gets its checksum before the table names it, so naming the slot commits both.
  bool has_checksums() const noexcept override { return header().checksums != 0; }
  void set_next_checksum(i64 chunk, u64 sum) noexcept override;
  void check(i64 chunk, const char* data, i64 bytes, const std::string& file) const override;

 private:
  u64& sum(u32 slot) const noexcept {
    return reinterpret_cast<u64*>(table_.data() + sizeof(TableHeader))[header().chunks + i64{slot}];
  }
  // The step in the upper half, the slot plus one in the lower half; 0: the chunk is zeros.
  std::atomic<u64>& entry(i64 chunk) const noexcept {
    return reinterpret_cast<std::atomic<u64>*>(table_.data() + sizeof(TableHeader))[chunk];
  }
  void enter(i64 chunk, u32 slot) noexcept;

  offload::Segment table_;
  std::vector<u32> free_;  // the last one is used first: it may be in caches
  std::vector<u32> ahead_, next_;
  u32 step_ = 0;
  bool at_once_ = true;
};

// All slots in memory.
class SlotMemory final : public offload::ChunkMemory {
 public:
  // All arguments outlive it. chunk_bytes: by chunk. pool: copies chunks that move; null: this thread does.
  SlotMemory(Slots& slots, const offload::Segment& memory, const std::vector<i64>& chunk_bytes, ThreadPool* pool);
  char* take(i64 chunk, bool change) override;
  void give_back(i64 chunk, bool changed) override;
  void expect(i64) override {}
  i64 most_expected() const noexcept override { return 0; }

 private:
  Slots& slots_;
  const offload::Segment& memory_;
  const std::vector<i64>& bytes_;
  ThreadPool* pool_;
  std::vector<char> zeros_;
  char* taken_ = nullptr;
  bool moved_ = false;  // whether the chunk in use has been moved
  i64 checked_ = -1;    // the last chunk that was checked; its parts are read one after the other
};

}  // namespace ds::serve
