// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file of one process on a disk, for data that does not fit in memory. Requests run in the background, cut into
// blocks, bypassing the page cache if the file system allows it: through io_uring or, if the kernel refuses that, by
// threads that call pread and pwrite. The file has no name, so its space is free again when the process ends, however
// it ends.

#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/clock.h"
#include "base/file.h"

namespace ds::offload {

// The time in which at least one of several overlapping activities is in progress.
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
  i64 block_bytes = i64{1} << 20;  // of one system call; a multiple of BlockFile::kPage
  int depth = 8;                   // blocks in flight at a time
  int threads = 1;                 // threads that call pread and pwrite
  bool io_uring = true;            // else threads, even if the kernel has io_uring
  BusyTime* busy = nullptr;        // counts the time in which requests are in progress
};

// Transfers between memory and files.
struct FileCounts {
  i64 read_bytes = 0, written_bytes = 0;
  double waited_s = 0;  // time spent waiting for them
  double busy_s = 0;    // time in which any of them was in progress; counted for all files together
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

// The checksum of written data, with which data that is read is compared.
u64 checksum(const char* data, i64 bytes) noexcept;

class BlockFile {
 public:
  static constexpr i64 kPage = PageBuffer::kPage;  // offsets, sizes and memory are multiples of it

  // Reserves `bytes` in the file system of directory `dir`. `memory` is the memory of most requests; it outlives the
  // file. Throws Errc::Unavailable (no such directory; no space, naming the space that is free), Errc::Io.
  BlockFile(const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options);
  // A file with a name, which only its owner may open: a new one, or an existing one of the right size, else
  // Errc::Corrupt.
  struct Named {
    std::string path;
    bool is_new = false;
  };
  BlockFile(const Named& file, i64 bytes, std::span<char> memory, const IoOptions& options);
  // Throws what making a file of so many bytes in that directory would throw, as far as that is known without making
  // it.
  static void check(const std::string& dir, i64 bytes);
  // For a prediction: there is no file; requests are counted and complete at once.
  BlockFile();
  ~BlockFile();  // waits for all requests

  // Starts a request; the memory must stay valid until wait(). Not thread-safe.
  using Ticket = i32;
  Ticket read(void* to, i64 at, i64 bytes);
  Ticket write(const void* from, i64 at, i64 bytes);
  // Whether wait() would return at once.
  bool done(Ticket ticket) const;
  // To be called once for each ticket. Throws Errc::Io naming the directory and the reason, and marks the file as
  // failed.
  void wait(Ticket ticket);
  // fail() marks the contents as unknown for this reason, which throw_if_failed() throws then. Continuing would use
  // whatever is in memory.
  void fail(std::exception_ptr why) noexcept;
  void throw_if_failed() const;

  FileCounts counts() const noexcept;
  // For messages: "io_uring, direct", "4 threads, through the page cache".
  const std::string& method() const noexcept;
  // The reason why the system refuses io_uring; empty: it does not, or was not asked.
  const std::string& refused_ring() const noexcept { return refused_ring_; }
  bool is_direct() const noexcept;
  bool is_there() const noexcept { return worker_ != nullptr; }  // false: a prediction, whose data may not be read

 private:
  class Worker;
  class Ring;
  class Threads;
  void open(File file, const std::string& dir, i64 bytes, std::span<char> memory, const IoOptions& options);
  std::unique_ptr<Worker> worker_;
  FileCounts counted_;  // for a prediction
  std::string refused_ring_;
  std::exception_ptr failed_;
};

}  // namespace ds::offload
