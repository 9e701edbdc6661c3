// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs a function where it can do no harm: in a child process that can only compute, read one open file and answer. For
// third-party parsers of untrusted files.

#include <chrono>
#include <functional>
#include <string>

#include <sys/types.h>

#include "base/check.h"

namespace ds {

// Limits of the child, which is killed when it exceeds them.
struct ConfinedLimits {
  i64 seconds = 30;                   // of elapsed time, and of processor time
  i64 memory_bytes = i64{256} << 20;  // of address space, in addition to that of this process
  i64 answer_bytes = i64{256} << 20;
};

class ConfinedChild {
 public:
  // Forks, and runs work() in the child, in a copy of this process's memory with this thread alone. The child
  //   - has no shared memory: such mappings are removed,
  //   - has no descriptors but `descriptor` (-1: none), which it can read; its standard streams are closed,
  //   - cannot open, create, lock, map or write files, start or signal processes, or use a network: a seccomp filter
  //     refuses every call (EPERM) but those for memory, reading, answering and ending,
  //   - dies with the thread that made it, has default signal handlers, and leaves no core file.
  // If the kernel has no seccomp filters, only limits and closed descriptors confine it, and without /proc shared
  // memory stays mapped; a verbose message says so. The caller must hold locks that work() needs while this constructor
  // runs; they count as held in work().
  //   path, who: the file and the function, for messages: "x.h5", "HDF5's parser"
  // Throws Errc::Io if no child can be started.
  ConfinedChild(std::string path, std::string who, int descriptor, const ConfinedLimits& limits,
                const std::function<std::string()>& work);
  ~ConfinedChild();  // kills it
  ConfinedChild(const ConfinedChild&) = delete;
  ConfinedChild& operator=(const ConfinedChild&) = delete;

  // Waits for the result of work(). A hostile file may have taken over the child, so the caller must check the result.
  // Throws Errc::Corrupt if the child was killed, ended or exceeded a limit; the error of work() if that is a ds::Error
  // of code Corrupt, Unavailable or Io. To be called once.
  std::string answer();

 private:
  std::string receive();  // all that the child writes
  int reap() noexcept;    // its status as wait(2) gives it
  [[noreturn]] void refuse(std::string_view what) const;

  std::string path_, who_;
  ConfinedLimits limits_;
  std::chrono::steady_clock::time_point deadline_;
  int pipe_ = -1;
  pid_t pid_ = -1;
};

}  // namespace ds
