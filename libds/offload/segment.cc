// SPDX-License-Identifier: Apache-2.0
#include "offload/segment.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"
#include "base/file.h"
#include "base/limits.h"

namespace ds::offload {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

Segment::Segment(int fd, const std::string& path, i64 bytes) : path_(path), bytes_(bytes) {
  if (bytes == 0) return;
  void* const p = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  DS_CHECK(p != MAP_FAILED, Errc::OutOfMemory, "cannot map {}: {}", path, system_reason(errno));
  data_ = static_cast<char*>(p);
}

Segment Segment::create(const std::string& path, i64 bytes) {
  Descriptor file{::open(parent_directory(path).c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600)};
  DS_CHECK(file.fd >= 0 && ::flock(file.fd, LOCK_EX | LOCK_NB) == 0, Errc::Io, "cannot create {}: {}", path,
           system_reason(errno));
  // Reserved now: touching a page without space would kill the process.
  const int failed = bytes == 0 ? 0 : ::posix_fallocate(file.fd, 0, bytes);
  DS_CHECK(failed == 0, failed == ENOSPC ? Errc::Unavailable : Errc::Io, "cannot reserve {} bytes for {}: {}", bytes,
           path, system_reason(failed));
  Segment segment(file.fd, path, bytes);
  const std::string opened = fmt::format("/proc/self/fd/{}", file.fd);
  DS_CHECK(::linkat(AT_FDCWD, opened.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0, Errc::Io,
           "cannot create {}: {}", path, system_reason(errno));
  segment.lock_ = std::exchange(file.fd, -1);
  return segment;
}

void Segment::remove_abandoned(const std::string& path) noexcept {
  const Descriptor file{::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd >= 0 && ::flock(file.fd, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
}

Segment Segment::open(const std::string& path, i64 bytes) {
  const Descriptor file{::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
  DS_CHECK(file.fd >= 0, Errc::Io, "cannot open {}: {}", path, system_reason(errno));
  struct stat st {};
  DS_CHECK(::fstat(file.fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0,
           Errc::Io, "{} is refused: it belongs to another user, or others can open it", path);
  DS_CHECK(st.st_size == bytes, Errc::Corrupt, "{} has {} bytes, not {}", path, i64{st.st_size}, bytes);
  return {file.fd, path, bytes};
}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(lock_, other.lock_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(bytes_));
  if (lock_ >= 0) ::close(lock_);
}

void Segment::remove() noexcept {
  if (!path_.empty()) ::unlink(path_.c_str());
}

Buffer segment_buffer(const Segment* segment, const HostPlace& place, MemoryLedger& ledger, Tag tag, i64 bytes) {
  return segment == nullptr ? place.take(ledger, tag, bytes) : place.hold(ledger, tag, segment->data(), bytes);
}

}  // namespace ds::offload
