// SPDX-License-Identifier: Apache-2.0
#include "base/appended_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ds/limits.h"

namespace ds {

namespace {

std::string why_not_appendable(const struct stat& st) {
  if (S_ISLNK(st.st_mode)) return "is a symbolic link";
  if (!S_ISREG(st.st_mode)) return "is not a regular file";
  return st.st_nlink > 1 ? "has another name as well (hard link)" : "";
}

}  // namespace

std::string why_not_appendable(const std::string& path) {
  struct stat st {};
  return ::lstat(path.c_str(), &st) == 0 ? why_not_appendable(st) : "";
}

int open_to_append(const std::string& path, unsigned mode) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const int fd = ::open(path.c_str(), kFlags, mode);
  const int error = errno;
  struct stat st {};
  const std::string why = fd < 0                  ? why_not_appendable(path)
                          : ::fstat(fd, &st) == 0 ? why_not_appendable(st)
                                                  : system_reason(errno);
  if (fd >= 0 && why.empty()) return fd;
  if (fd >= 0) ::close(fd);
  throw Error(Errc::Io, why.empty()
                            ? fmt::format("cannot open {}: {}", path, system_reason(error))
                            : fmt::format("cannot write {}: it {}; remove it, or choose another directory", path, why));
}

std::optional<AppendedFile> AppendedFile::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0 && errno == EEXIST) return std::nullopt;
  DS_CHECK(fd >= 0, Errc::Io, "cannot create {}: {}", path, system_reason(errno));
  return AppendedFile(path, fd);
}

AppendedFile::~AppendedFile() {
  if (fd_ >= 0) ::close(fd_);
}

void AppendedFile::append(std::string_view text) {
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      done += static_cast<size_t>(n);
      continue;
    }
    const int error = n == 0 ? ENOSPC : errno;
    // A partial text would join with the next one.
    const bool cut = done == 0 || ::ftruncate(fd_, end) == 0;
    throw Error(Errc::Io, fmt::format("cannot write {}: {}{}", path_, system_reason(error),
                                      cut ? "" : "; its last line is torn"));
  }
}

void AppendedFile::cut_torn_line() {
  char last[4096];
  for (off_t end = ::lseek(fd_, 0, SEEK_END); end > 0;) {
    const off_t begin = std::max<off_t>(end - static_cast<off_t>(sizeof last), 0);
    const ssize_t n = ::pread(fd_, last, static_cast<size_t>(end - begin), begin);
    DS_CHECK(n == end - begin, Errc::Io, "cannot read {}: {}", path_, system_reason(errno));
    const std::string_view text(last, static_cast<size_t>(n));
    const size_t newline = text.rfind('\n');
    end = newline == text.npos ? begin : begin + static_cast<off_t>(newline) + 1;
    if (newline == text.npos && begin > 0) continue;
    DS_CHECK(::ftruncate(fd_, end) == 0, Errc::Io, "cannot cut {}: {}", path_, system_reason(errno));
    return;
  }
}

bool AppendedFile::begins(std::string_view text) const {
  std::string first(text.size(), '\0');
  const ssize_t n = ::pread(fd_, first.data(), first.size(), 0);
  DS_CHECK(n >= 0, Errc::Io, "cannot read {}: {}", path_, system_reason(errno));
  return text.starts_with(std::string_view(first).substr(0, static_cast<size_t>(n)));
}

bool AppendedFile::is_empty() const { return ::lseek(fd_, 0, SEEK_END) == 0; }

}  // namespace ds
