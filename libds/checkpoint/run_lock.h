// SPDX-License-Identifier: Apache-2.0
#pragma once
// The lock of a run directory: one process at a time writes there, and the lock ends with that process.

#include <string>
#include <utility>

namespace ds {

// The lock of an existing run directory, and its file in it. Move-only.
class RunLock {
 public:
  // Throws Errc::Config if another process holds the lock, naming it, or if the file cannot be opened; Errc::Io.
  explicit RunLock(const std::string& directory);
  RunLock(RunLock&& other) noexcept : directory_(std::move(other.directory_)), fd_(std::exchange(other.fd_, -1)) {}
  RunLock& operator=(RunLock&&) = delete;
  ~RunLock();  // removes the file
  // Throws Errc::Config if another process holds the lock now. Takes no lock and makes no file.
  static void check_free(const std::string& directory);

  // False if the directory or the file has been removed or replaced.
  bool is_held() const noexcept;

 private:
  std::string file() const;
  std::string directory_;
  int fd_ = -1;
};

}  // namespace ds
