// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file of one process on a disk, for what does not fit in memory. Requests run in the background, cut in blocks, past
// the page cache where the file system can: through io_uring, or, where the kernel refuses that, by threads that call
// pread and pwrite. The file has no name: its space is free again when the process ends, however it ends.

#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/file.h"

namespace ds::offload {

// The time in which something is under way, of several that may be at once.
class BusyTime {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    if (under_way_++ == 0) since_ = Clock::now();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    if (--under_way_ == 0) seconds_ += seconds_since(since_);
  }
  class Span {
   public:
    explicit Span(BusyTime* time) : time_(*time) { time_.begin(); }
    Span(const Span&) = delete;
    ~Span() { time_.end(); }

   private:
    BusyTime& time_;
  };
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return seconds_ + (under_way_ > 0 ? seconds_since(since_) : 0);
  }

 private:
  mutable std::mutex mutex_;
  i64 under_way_ = 0;
  Clock::time_point since_;
  double seconds_ = 0;
};

struct IoOptions {
  i64 block_bytes = i64{1} << 20;  // of one call to the system; a multiple of BlockFile::kPage
  int depth = 8;                   // blocks under way at a time
  int threads = 1;                 // that call pread and pwrite
  bool io_uring = true;            // else threads, whatever the kernel can
  BusyTime* busy = nullptr;        // counts the time of requests
};

// What has gone between memory and files.
struct FileCounts {
  i64 read_bytes = 0, written_bytes = 0;
  double waited_s = 0;  // for them
  double busy_s = 0;    // in which some of them were under way; not of one file
  friend FileCounts operator+(const FileCounts& a, const FileCounts& b) noexcept {
    return {a.read_bytes + b.read_bytes, a.written_bytes + b.written_bytes, a.waited_s + b.waited_s,
            a.busy_s + b.busy_s};
  }
  friend FileCounts operator-(const FileCounts& a, const FileCounts& b) noexcept { return a + (-1 * b); }
  friend FileCounts operator*(i64 n, const FileCounts& a) noexcept {
    const double times = static_cast<double>(n);
    return {n * a.read_bytes, n * a.written_bytes, times * a.waited_s, times * a.busy_s};
  }
};

// Of what goes, to which what comes back is held.
u64 checksum(const char* data, i64 bytes) noexcept;

class BlockFile {
 public:
  static constexpr i64 kPage = PageBuffer::kPage;  // what places, sizes and memory are multiples of

  // Takes `bytes` of the file system of directory `dir`. `memory` is where most requests read to and write from; it
  // outlives the file. Throws Errc::Unavailable (no such directory, no space, with what is there), Errc::Io.
  BlockFile(const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options);
  // One that keeps its name, for its owner alone: a new one, or one that is there, whole, else Errc::Corrupt.
  struct Named {
    std::string path;
    bool is_new = false;
  };
  BlockFile(const Named& file, i64 bytes, std::span<char> memory, const IoOptions& options);
  // Throws what a file of so many bytes in that directory would, as far as that is known without making one.
  static void check(const std::string& dir, i64 bytes);
  // Of a prediction: there is no file; requests are counted, and done.
  BlockFile();
  ~BlockFile();  // waits for all requests

  // Starts a request; the memory stays until wait(). One thread at a time.
  using Ticket = i32;
  Ticket read(void* to, i64 at, i64 bytes);
  Ticket write(const void* from, i64 at, i64 bytes);
  // Whether wait() would not wait.
  bool done(Ticket ticket) const;
  // Once for each ticket. Throws Errc::Io naming the directory and the reason. From then on the file has failed.
  void wait(Ticket ticket);
  // What it holds is not known any more, for this reason; and throws that, if it is so. Whoever went on would work with
  // what happens to be in memory.
  void fail(std::exception_ptr why) noexcept;
  void throw_if_failed() const;

  FileCounts counts() const noexcept;
  // For people: "io_uring, direct", "4 threads, through the page cache".
  const std::string& method() const noexcept;
  // Why the system refuses io_uring; empty: it does not, or was not asked.
  const std::string& refused_ring() const noexcept { return refused_ring_; }
  bool is_direct() const noexcept;
  bool is_there() const noexcept { return worker_ != nullptr; }  // else nobody may look at what is read

 private:
  class Worker;
  class Ring;
  class Threads;
  void open(File file, const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options);
  std::unique_ptr<Worker> worker_;
  FileCounts counted_;  // of a prediction
  std::string refused_ring_;
  std::exception_ptr failed_;
};

}  // namespace ds::offload
