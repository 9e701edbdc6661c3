// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resident memory of this process, measured so that it adds up over the ranks of a node and compares with the counts of
// a MemoryLedger.
//
//   own = anonymous + share of shared memory           (/proc/self/smaps_rollup: Anonymous + Pss_Shmem)
//
// Anonymous memory is private to the process: buffers, heap, stacks, and modified pages of mapped files. A page of
// shared memory (/dev/shm, files on tmpfs) that n processes have mapped counts as 1/n in each (proportional set size),
// so a segment counts once over its ranks, although each maps all of it. If all P ranks read all of a segment, as in
// collectives, each counts a P-th of it, the size of its own part. Untouched pages count nowhere. Mapped files
// (programs, libraries, token files: RssFile) are left out, since the kernel may reclaim their pages at any time. So
// are swapped pages and GPU memory.
//
// The kernel records a peak only for the sum of all kinds (VmHWM), so the peak of `own` is the highest value read. That
// is enough for training, whose steps allocate nothing. Short-lived memory between readings, such as that of writing a
// checkpoint, is reported separately: the amount by which VmHWM exceeds the highest VmRSS read.

#include <chrono>

#include "base/check.h"

namespace ds::probe {

struct ResidentMemory {
  i64 own = 0;      // as above; without smaps_rollup, RssAnon + RssShmem, which counts whole segments in each rank
  i64 all = 0;      // VmRSS: all kinds, with whole shared pages
  i64 highest = 0;  // VmHWM: the peak of `all`
};

// Walks the page table: about 10 ms per GiB of small pages, far less for huge pages. Allocates nothing. All values are
// 0 without /proc.
ResidentMemory resident_memory() noexcept;

// Follows the resident memory of this process from a base.
class ResidentMeter {
 public:
  using Clock = std::chrono::steady_clock;
  ResidentMeter() noexcept;  // takes the base

  i64 base_bytes() const noexcept { return base_.own; }
  // Reads now and returns `own`. Peaks are maxima over these readings.
  i64 read() noexcept;
  // Returns the last reading. Reads again at most once a second, and rarely enough to take at most a thousandth of the
  // time.
  i64 sample() noexcept;

  // Restarts the peaks, which start at the base. Reads now.
  void begin_peaks() noexcept;
  struct Peaks {
    i64 own = 0;
    i64 momentary = 0;  // more than `own` for a moment, of all kinds
  };
  Peaks peaks() const noexcept;

 private:
  ResidentMemory base_, last_;
  i64 peak_own_ = 0, peak_all_ = 0, highest_before_ = 0;  // since begin_peaks()
  Clock::time_point due_;
};

}  // namespace ds::probe
