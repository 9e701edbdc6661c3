// SPDX-License-Identifier: Apache-2.0
#pragma once
// libds's files in /dev/shm, and their owners. A process fills and locks its file (flock) before it names it, and the
// system releases the lock however the process ends. A named file is therefore complete, and an unlocked one belongs to
// no living process, in any container or namespace of process numbers.
//
//   ds-job.JOB, ds-job.JOB...   shared by the ranks of a job; ds-job.JOB.ended is the launcher's (ended_ranks.h)
//   ds-train.PID                a rank's counters, for other processes

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
  // Creates an empty, locked file with mode 0600 and without a name. Throws Errc::Io.
  static SharedFile create();
  // Opens a named file. Empty: it does not exist. Throws Errc::Io, also for a file of another user or with access for
  // others.
  static std::optional<SharedFile> open(const std::string& name, bool writable);

  SharedFile(SharedFile&& other) noexcept { *this = std::move(other); }
  SharedFile& operator=(SharedFile&& other) noexcept;
  ~SharedFile();

  // Names the file until this object is destroyed. False: the name is taken. Throws Errc::Io.
  bool link(const std::string& name);
  void unlink() noexcept;

  int descriptor() const noexcept { return fd_; }
  std::string opened_as() const;  // a path that opens it again
  i64 size() const;

 private:
  explicit SharedFile(int fd) : fd_(fd) {}
  int fd_ = -1;
  std::string name_;  // given by this object
};

std::string shared_path(const std::string& name);
// This user's files whose names start with `prefix`, sorted.
std::vector<std::string> shared_names(std::string_view prefix);
// Removes a file whose owner has ended. Returns whether it did.
bool remove_abandoned(const std::string& name);
// Removes all such files of this user, among the names above.
void remove_abandoned();

}  // namespace ds
