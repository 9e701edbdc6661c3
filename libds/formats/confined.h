// SPDX-License-Identifier: Apache-2.0
#pragma once
// A function that runs where it can do no harm: in a child process that computes, reads one open file and answers. For
// parsers of other people's making that must see other people's files.

#include <chrono>
#include <functional>
#include <string>

#include <sys/types.h>

#include "base/check.h"

namespace ds {

// What the child may use up; beyond it, the child is killed.
struct ConfinedLimits {
  i64 seconds = 30;                   // of wall-clock time, and of processor time
  i64 memory_bytes = i64{256} << 20;  // address space, beside what this process has
  i64 answer_bytes = i64{256} << 20;
};

class ConfinedChild {
 public:
  // Forks, and runs work() in the child, in a copy of this process's memory with this thread alone. The child
  //   - has no memory that is shared with anybody: mappings of that kind are gone,
  //   - has no descriptors but `descriptor` (-1: none), of which it can read; its standard streams are closed,
  //   - can open, create, lock, map and write nothing, start and signal nobody, reach no network: a seccomp filter
  //     refuses every call (EPERM) but those for memory, reading, answering and ending,
  //   - dies with the thread that made it, has default signal handlers, and leaves no core file.
  // Where the kernel has no seccomp filters, limits and closed descriptors are all there is, and without /proc what is
  // shared stays: a verbose message says so.
  // A lock that work() needs is held by the caller while this constructor runs, and counts as held in work().
  //   path, who: the file and what is run, for messages: "x.h5", "HDF5's parser"
  // Throws Errc::Io if there can be no child.
  ConfinedChild(std::string path, std::string who, int descriptor, const ConfinedLimits& limits,
                const std::function<std::string()>& work);
  ~ConfinedChild();  // kills it
  ConfinedChild(const ConfinedChild&) = delete;
  ConfinedChild& operator=(const ConfinedChild&) = delete;

  // Waits for what work() returned. It comes from a process that a hostile file may have taken over: check it.
  // Throws Errc::Corrupt when the child was killed, ended or went over a limit; what work() threw, where that is a
  // ds::Error of cause Corrupt, Unavailable or Io. Called once.
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
