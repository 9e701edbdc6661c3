// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory shared by the ranks of one node: process memory if ranks are threads, a segment of /dev/shm if they are
// processes. All-zero memory is the initial state:
//
//   Control | RankSlot x P | staging x P x 2 halves | Channel x P x P
//
// Ranks meet by posting numbers to Events. A rank writes only its own slot, its own staging and its own end of a
// channel; a write is visible to every rank that has seen the number posted after it.

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "comm/async_communicator.h"

namespace ds {

// A counter on which other processes can wait.
struct alignas(64) Event {
  std::atomic<u32> value;
  std::atomic<u32> waiters;
};
static_assert(std::atomic<u32>::is_always_lock_free && std::atomic<u64>::is_always_lock_free);

void post(Event& event, u32 value) noexcept;
// Returns when the event is posted, when its value is not `seen`, or after `limit`.
void sleep_on(Event& event, u32 seen, std::chrono::nanoseconds limit) noexcept;
void wake_all(Event& event) noexcept;

// How a rank exposes the source of an exchange: not at all, in place, or chunk by chunk in its staging area.
enum class Exposure : u32 { None, Direct, Staged };

// For error messages: which rank this rank waits for in one communicator of the world.
struct Wait {
  std::atomic<i32> peer;          // world rank + 1; 0: not waiting
  std::atomic<u32> key;           // of the communicator
  std::atomic<u32> inside_call;   // the rank's own thread waits, so it cannot enter another call
  std::atomic<i64> confirmed_ns;  // steady clock, at the last check
};

struct alignas(64) RankSlot {
  static constexpr size_t kWaits = 16;
  Event arrived;                   // number of meetings that this rank has reached
  std::array<Wait, kWaits> waits;  // of a world: one for each of its communicators
  std::atomic<u32> reading;        // this rank may be reading its peers' sources
  std::atomic<u32> departed;       // this rank has said goodbye
  std::atomic<u64> activity;       // calls begun << 8 | OpKind + 1, or 0 outside any call
  std::atomic<u64> shown;          // Communicator::show
  std::array<CallInfo, 2> call;    // of even and odd meetings
  std::array<Exposure, 2> exposure;
  std::atomic<i32> pid;  // 0: not attached
  u64 process_start;
  u64 pid_namespace;
};

// Identifies a segment, so that other files are refused.
struct SegmentHeader {
  u64 magic;
  u32 version;
  i32 size;
};

struct Control {
  SegmentHeader header;
  std::atomic<u32> failure_state;  // 0 none, 1 being written, 2 readable
  Errc failure_code;
  i32 failure_rank;
  std::array<char, 1024> failure_message;
};

// One direction between two ranks: a ring of lines, written by one rank and read by the other.
struct Channel {
  static constexpr u32 kLineBytes = 64;
  static constexpr u32 kLines = 8192;  // 512 KiB, enough for an activation of a pipeline
  Event head;                          // lines written
  Event tail;                          // lines read
  std::array<std::byte, kLines * kLineBytes> ring;
};

class Arena {
 public:
  static constexpr i64 kStagingHalf = i64{1} << 20;

  // A position in a rank's memory, in terms that all ranks understand.
  struct Address {
    i64 region;
    i64 offset;
  };
  struct Health {
    bool dead = false;
    std::string words;  // e.g. "its process 17 is stopped"; empty: nothing to report
  };

  virtual ~Arena() = default;

  // Creates an arena for some of the ranks of this one. `members` are their numbers here; this rank is number `rank`
  // among them. All members pass the same name. `creator` is the first member's number for messages. `look` throws when
  // waiting for the members is pointless.
  virtual std::unique_ptr<Arena> group(int rank, std::span<const int> members, int creator, std::string_view name,
                                       double timeout_s, FunctionRef<void()> look) = 0;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  Control& control() const noexcept { return *reinterpret_cast<Control*>(base_); }
  RankSlot& slot(int rank) const noexcept { return reinterpret_cast<RankSlot*>(base_ + slots_offset())[rank]; }
  std::byte* staging(int rank, u32 half) const noexcept {
    return base_ + staging_offset(size_) + (2 * rank + static_cast<i64>(half)) * kStagingHalf;
  }
  // Both ends call this before they use the channel. Throws Errc::OutOfMemory.
  Channel& channel(int from, int to);

  // Empty: peers reach this memory only through staging.
  virtual std::optional<Address> locate(const std::byte* p, i64 bytes) const = 0;
  virtual const std::byte* resolve(int rank, Address address) const = 0;
  // Memory that locate() can find on every rank. Collective; `meet` is a barrier.
  virtual Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes, FunctionRef<void()> meet) = 0;
  virtual Health health(int rank) const = 0;
  // Health::dead, without allocating: ranks that wait for others ask within a training step.
  virtual bool is_dead(int) const { return false; }
  // Makes this rank's staging safe to touch. Each rank does this itself, so that the pages are in its own NUMA node.
  virtual void reserve_staging() {}
  // Called when all ranks have attached.
  virtual void attached() {}

 protected:
  Arena(int rank, int size) : rank_(rank), size_(size) {}
  static constexpr i64 slots_offset() noexcept { return align_up(sizeof(Control), alignof(RankSlot)); }
  static constexpr i64 staging_offset(int size) noexcept {
    return align_up(slots_offset() + size * static_cast<i64>(sizeof(RankSlot)), 4096);
  }
  static constexpr i64 channels_offset(int size) noexcept { return staging_offset(size) + 2 * size * kStagingHalf; }
  static constexpr i64 total_bytes(int size) noexcept {
    return channels_offset(size) + i64{size} * size * static_cast<i64>(sizeof(Channel));
  }
  virtual void reserve_channel(i64 /*offset*/) {}

  std::byte* base_ = nullptr;

 private:
  const int rank_;
  const int size_;
};

// One arena per rank over the same process memory.
std::vector<std::unique_ptr<Arena>> make_thread_arenas(int size);
// `creator` is the number of rank 0 for messages; `look` as for group().
std::unique_ptr<Arena> make_shm_arena(std::string_view job, int rank, int size, int creator, double timeout_s,
                                      FunctionRef<void()> look);

}  // namespace ds
