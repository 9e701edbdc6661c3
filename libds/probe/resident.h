// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resident memory of this process, in a measure that adds up over the ranks of a node and stands beside the counts of a
// MemoryLedger.
//
//   own = anonymous + share of shared memory           (/proc/self/smaps_rollup: Anonymous + Pss_Shmem)
//
// Anonymous memory is what the process has for itself: buffers, heap, stacks, and what it has changed of mapped files.
// A page of shared memory (/dev/shm, files on tmpfs) that n processes have mapped counts a part in n in each of them
// (proportional set size), so that a segment counts once over its ranks, although each maps it wholly; where all read
// all of it, as in collectives, the part of one of P ranks is a P-th of the segment, which is the size of its own part.
// Pages that nobody has touched count nowhere. Mapped files (programs, libraries, token files: RssFile) are left out:
// the kernel takes those pages back when it likes. So is what is swapped out, and the memory of a GPU.
//
// The kernel keeps a peak of the sum of all kinds only (VmHWM), so the peak of `own` is the highest value that was
// read. That is enough for training, which takes nothing in a step. What else was there for a moment between readings,
// as while a checkpoint is written, is told apart: by how much VmHWM exceeds the highest VmRSS that was read.

#include <chrono>

#include "base/check.h"

namespace ds::probe {

struct ResidentMemory {
  i64 own = 0;      // as above; where the kernel has no smaps_rollup, RssAnon + RssShmem: segments wholly in each rank
  i64 all = 0;      // VmRSS: of all kinds, shared pages wholly
  i64 highest = 0;  // VmHWM: the most that `all` has been
};

// Walks the page table: some 10 ms per GiB of small pages, far less of huge ones. Allocates nothing. All 0 where there
// is no /proc.
ResidentMemory resident_memory() noexcept;

// Follows the resident memory of this process from a base on.
class ResidentMeter {
 public:
  using Clock = std::chrono::steady_clock;
  ResidentMeter() noexcept;  // the base is now

  i64 base_bytes() const noexcept { return base_.own; }
  // Reads now. What is read: the peak is of these values.
  i64 read() noexcept;
  // What was read last; reads again once a second at most, and so rarely that reading takes a thousandth of the time.
  i64 sample() noexcept;

  // Peaks are counted from here on, at first from the base. Reads now.
  void begin_peaks() noexcept;
  struct Peaks {
    i64 own = 0;
    i64 momentary = 0;  // beside it, of all kinds
  };
  Peaks peaks() const noexcept;

 private:
  ResidentMemory base_, last_;
  i64 peak_own_ = 0, peak_all_ = 0, highest_before_ = 0;  // since begin_peaks()
  Clock::time_point due_;
};

}  // namespace ds::probe
