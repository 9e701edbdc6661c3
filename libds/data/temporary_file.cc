// SPDX-License-Identifier: Apache-2.0
#include "data/temporary_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "base/variables.h"

namespace ds {

TemporaryFile::TemporaryFile(std::string contents)
    : contents_(std::move(contents)), directory_(variables::temporary_directory()) {
  std::string path = directory_ + "/ds-data-XXXXXX";
  fd_ = ::mkostemp(path.data(), O_CLOEXEC);
  DS_CHECK(fd_ >= 0, Errc::Io, "cannot create a temporary file in {}, which TMPDIR can move: {}", directory_,
           system_reason(errno));
  ::unlink(path.c_str());
}

TemporaryFile::~TemporaryFile() { ::close(fd_); }

void TemporaryFile::append(const void* data, i64 bytes) {
  for (i64 done = 0; done < bytes;) {
    const ssize_t n =
        ::pwrite(fd_, static_cast<const char*>(data) + done, static_cast<size_t>(bytes - done), bytes_ + done);
    if (n < 0 && errno == EINTR) continue;
    DS_CHECK(n > 0, Errc::Io, "cannot write {} to a temporary file in {}, which TMPDIR can move: {}", contents_,
             directory_, system_reason(errno));
    done += n;
  }
  bytes_ += bytes;
}

}  // namespace ds
