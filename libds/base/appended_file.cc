// SPDX-License-Identifier: Apache-2.0
#include "base/appended_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ds/limits.h"

namespace ds {

AppendedFile::AppendedFile(std::string path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  DS_CHECK(fd_ >= 0, Errc::Io, "cannot open {}: {}", path_, system_reason(errno));
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
    // What is there of the text would join with the next one.
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

bool AppendedFile::is_empty() const { return ::lseek(fd_, 0, SEEK_END) == 0; }

}  // namespace ds
