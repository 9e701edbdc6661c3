// SPDX-License-Identifier: Apache-2.0
#pragma once
// Our files in /dev/shm, and whose they are. A maker fills and locks its file (flock) before it gives it a name, and
// the system takes the lock back however the maker ends. So a file that has a name is whole, and one that nobody has
// locked belongs to no living process, in whatever container or namespace of process numbers.
//
//   ds-job.JOB, ds-job.JOB...   what the ranks of a job share; ds-job.JOB.ended is the launcher's (ended_ranks.h)
//   ds-train.PID                what a rank shows of itself

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

inline constexpr std::string_view kJobPrefix = "ds-job.", kLivePrefix = "ds-train.";

class SharedFile {
 public:
  SharedFile() = default;
  // Empty, locked, 0600, without a name. Throws Errc::Io.
  static SharedFile create();
  // One that has a name. Nothing: there is none. Throws Errc::Io, also for one of another user or open to others.
  static std::optional<SharedFile> open(const std::string& name, bool writable);

  SharedFile(SharedFile&& other) noexcept { *this = std::move(other); }
  SharedFile& operator=(SharedFile&& other) noexcept;
  ~SharedFile();

  // The name goes with the object. False: another file has it. Throws Errc::Io.
  bool link(const std::string& name);
  void unlink() noexcept;

  int descriptor() const noexcept { return fd_; }
  std::string opened_as() const;  // a path that opens it again
  i64 size() const;

 private:
  explicit SharedFile(int fd) : fd_(fd) {}
  int fd_ = -1;
  std::string name_;  // that this object gave it
};

std::string shared_path(const std::string& name);
// The names of this user's files that begin so, sorted.
std::vector<std::string> shared_names(std::string_view prefix);
// Removes a file whose maker has ended. Returns whether it was one.
bool remove_abandoned(const std::string& name);
// Removes all of this user's, of the names above.
void remove_abandoned();

}  // namespace ds
