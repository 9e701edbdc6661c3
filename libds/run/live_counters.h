// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counters that a rank shows while it trains, for ds-memreport: /dev/shm/ds-train.PID, mode 0600. Only the rank writes,
// once per step. Readers never see a part of a step, and neither side waits for the other.
//
//   LiveHeader | LiveIdentity | sequence | LiveRecord        header and identity stay as they were made
//
// The process removes the file when it ends. A file of a killed process (comm/shared_file.h) is removed at the end of
// its job, by the user's next rank that begins to train on the machine, or by the next reader.

#include <array>
#include <atomic>
#include <bit>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shared_record.h"
#include "device/memory.h"
#include "ds/units.h"

namespace ds::run {

inline constexpr u64 kLiveMagic = 0x3145564c2d736464u;  // "dds-LVE1"
inline constexpr u32 kLiveVersion = 3;                  // of what follows the header

using LiveTags = std::array<i64, static_cast<size_t>(Tag::Count)>;  // bytes
using LiveBounds = std::array<Bound, static_cast<size_t>(Tag::Count)>;

struct LiveHeader {  // the same in every version
  u64 magic = kLiveMagic;
  u32 version = kLiveVersion;
  u32 bytes = 0;  // of the whole
  i64 pid = 0;
};

struct LiveIdentity {
  struct Axes {
    i32 pp, dp, sp, tp, worker;
  };
  i32 rank = 0, world_size = 1;
  Axes mesh{1, 1, 1, 1, 1}, coord{0, 0, 0, 0, 0};
  i64 total_steps = 0;
  i64 base_bytes = 0;  // resident before the engine took its memory (probe/resident.h)
  LiveTags predicted{};
  LiveBounds bounds{};                 // of the counts
  std::array<char, 136> job{};         // of RankInfo; empty: a rank alone
  std::array<char, 4096> directory{};  // of the run, absolute; empty: it keeps nothing
  std::array<char, 64> device{};
};

struct LiveRecord {
  i64 step = 0;                                             // steps taken
  double loss = 0, step_ms = 0, tokens_per_s = 0, mfu = 0;  // of the last one, as in metrics.jsonl
  i64 comm_bytes = 0;                                       // sent by this rank in it
  i64 resident_bytes = 0;                                   // probe::ResidentMemory::own, as last read
  i64 updated_ns = 0;                                       // of the system's clock
  LiveTags current{}, peak{};
};

// Cuts at the end of the array, which ends with a zero.
template <size_t N>
void copy_text(std::array<char, N>& to, std::string_view text) {
  to = {};
  text.copy(to.data(), N - 1);
}

// A value that one thread or process writes and others read whole. The sequence is odd while it is being written.
// Readers retry. Each word is released and acquired instead of using fences, which ThreadSanitizer does not understand:
// a reader that sees a word of a later value also sees that its sequence has begun.
template <class T>
class Seqlock {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(u64) == 0);
  static_assert(std::atomic<u64>::is_always_lock_free);

 public:
  void store(const T& value) noexcept {
    const auto words = std::bit_cast<std::array<u64, kWords>>(value);
    const u64 begun = sequence_.load(std::memory_order_relaxed) + 1;
    sequence_.store(begun, std::memory_order_relaxed);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    sequence_.store(begun + 1, std::memory_order_release);
  }
  // Nothing: it is being written.
  std::optional<T> load() const noexcept {
    std::array<u64, kWords> words;
    const u64 before = sequence_.load(std::memory_order_acquire);
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (before % 2 != 0 || sequence_.load(std::memory_order_relaxed) != before) return std::nullopt;
    return std::bit_cast<T>(words);
  }

 private:
  static constexpr size_t kWords = sizeof(T) / sizeof(u64);
  std::atomic<u64> sequence_{0};
  std::array<std::atomic<u64>, kWords> words_{};
};

struct LiveSegment {
  LiveHeader header;
  LiveIdentity identity;
  Seqlock<LiveRecord> record;
};

std::string live_name(i64 pid);

// The writer.
class LiveCounters {
 public:
  // Removes files of killed processes, and shows this one. If that fails, or another run of this process is shown
  // already, there is a warning, and publish() does nothing.
  LiveCounters(const LiveIdentity& identity, const LiveRecord& first);
  void publish(const LiveRecord& record) noexcept;

 private:
  std::optional<SharedRecord> memory_;
};

// Another process's counters.
class LiveView {
 public:
  // Nothing: the process shows no counters, or has ended, and its file is removed. Throws Errc::Io for another user's
  // process, Errc::Mismatch for a file of another version of libds or with other content.
  static std::optional<LiveView> open(i64 pid);

  const LiveHeader& header() const noexcept { return segment().header; }
  const LiveIdentity& identity() const noexcept { return segment().identity; }
  // Nothing if the writer was stopped while it wrote, for a second at least.
  std::optional<LiveRecord> read() const;

 private:
  explicit LiveView(SharedRecord memory) : memory_(std::move(memory)) {}
  const LiveSegment& segment() const noexcept { return *static_cast<const LiveSegment*>(memory_.data()); }
  SharedRecord memory_;
};

// Processes with such files, alive or not; sorted.
std::vector<i64> live_pids();

}  // namespace ds::run
