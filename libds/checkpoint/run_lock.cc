// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"
#include "base/limits.h"
#include "checkpoint/run_names.h"

namespace ds {
namespace {

// The number of the process that holds the lock, as the lock file states it.
std::string read_holder(int fd) {
  char holder[32] = {};
  const ssize_t n = ::read(fd, holder, sizeof holder - 1);
  return n > 0 ? std::string(holder, static_cast<size_t>(n)) : "unknown";
}

[[noreturn]] void throw_in_use(const std::string& directory, const std::string& holder) {
  throw Error(Errc::Config, fmt::format("run directory {} is in use by another run (process {})", directory, holder));
}

}  // namespace

std::string RunLock::file() const { return fmt::format("{}/{}", directory_, kLockName); }

RunLock::RunLock(const std::string& directory) : directory_(directory) {
  for (;;) {
    const int fd = ::open(file().c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    DS_CHECK(fd >= 0, Errc::Config, "cannot open {}: {}", file(), system_reason(errno));
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const std::string holder = read_holder(fd);
      ::close(fd);
      throw_in_use(directory, holder);
    }
    fd_ = fd;
    // Its last holder may have removed the file between our open and our lock: then this is the lock of nothing.
    if (is_held()) break;
    ::close(std::exchange(fd_, -1));
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, pid.data(), pid.size(), 0) > 0) return;
  const std::string why = system_reason(errno);
  ::unlink(file().c_str());
  ::close(fd_);
  throw Error(Errc::Io, fmt::format("cannot write {}: {}", file(), why));
}

RunLock::~RunLock() {
  if (fd_ < 0) return;
  if (is_held()) ::unlink(file().c_str());
  ::close(fd_);
}

void RunLock::check_free(const std::string& directory) {
  const std::string name = fmt::format("{}/{}", directory, kLockName);
  const int fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return;  // nobody's, or what the constructor will say
  const bool is_free = ::flock(fd, LOCK_SH | LOCK_NB) == 0;
  const std::string holder = is_free ? "" : read_holder(fd);
  ::close(fd);
  if (!is_free) throw_in_use(directory, holder);
}

bool RunLock::is_held() const noexcept {
  struct stat ours = {}, named = {};
  return ::fstat(fd_, &ours) == 0 && ::lstat(file().c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
         ours.st_dev == named.st_dev;
}

}  // namespace ds
