// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long a thread that waits for peers polls before it sleeps. It learns from its own waits, because ranks may share
// cores with each other, by affinity or a quota, and with any other process.

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds {

// Gives the core to others, as long as it comes back soon. If another process wants it, it returns after a time slice,
// milliseconds, while a thread that sleeps usually runs within microseconds of being woken.
class Yields {
 public:
  // Yields; false if the caller should sleep instead of polling further.
  bool once() noexcept {
    if (skipped_ > 0) {
      --skipped_;
      return false;
    }
    const auto before = std::chrono::steady_clock::now();
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() - before < kLong) {
      if (++short_ == kShortOnes) short_ = 0, next_skip_ = kLeastSkipped;
      return true;
    }
    skipped_ = next_skip_;
    next_skip_ = std::min(2 * next_skip_, kMostSkipped);
    short_ = 0;
    return false;
  }

 private:
  static constexpr auto kLong = std::chrono::microseconds(200);
  static constexpr int kLeastSkipped = 4, kMostSkipped = 512, kShortOnes = 64;
  int skipped_ = 0, next_skip_ = kLeastSkipped;  // calls without a yield: left, and after the next long one
  int short_ = 0;                                // yields in a row
};

// Spins, if ranks have cores of their own, and yields.
class Polling {
 public:
  // crowded: there are more ranks than cores, so a spin only keeps a peer from its core.
  explicit Polling(bool crowded) noexcept : crowded_(crowded) {}

  // Polls until done() or until sleeping is better; returns done().
  template <class Done>
  bool until(Done done) noexcept {
    if (!crowded_ && (failures_ < kMostFailures || ++skipped_ % kRetry == 0)) {
      for (int i = 0; i < kSpins; ++i) {
        if (done()) return succeed();
        relax();
      }
    }
    for (int i = 0; i < kYields; ++i) {
      if (done()) return succeed();
      if (!yields_.once()) break;
    }
    if (done()) return succeed();
    if (failures_ < kMostFailures) ++failures_;
    return false;
  }

 private:
  bool succeed() noexcept {
    failures_ = 0;
    return true;
  }
  static void relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  static constexpr int kSpins = 400;  // about 10 us
  static constexpr int kYields = 16;
  // After so many waits in a row that ended asleep, only every kRetry-th spins.
  static constexpr int kMostFailures = 64;
  static constexpr unsigned kRetry = 256;

  const bool crowded_;
  int failures_ = 0;
  unsigned skipped_ = 0;
  Yields yields_;
};

}  // namespace ds
