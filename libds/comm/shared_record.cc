// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_record.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <utility>

namespace ds {
namespace {

namespace bip = boost::interprocess;

std::string path_of(const std::string& name) { return "/dev/shm/" + name; }

// Before it is opened: another user may have put a pipe there, whose opening would not end. A regular file of ours
// nobody else can replace, for the directory is sticky.
bool is_ours(const struct stat& st) { return S_ISREG(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0; }

}  // namespace

SharedRecord::SharedRecord(const std::string& name, const void* content, i64 bytes) {
  try {
    bip::shared_memory_object object(bip::create_only, name.c_str(), bip::read_write, bip::permissions(0600));
    name_ = name;
    // Written, not mapped: where no memory is left that is an error here and no SIGBUS later. Its length comes last.
    const ssize_t n = pwrite(object.get_mapping_handle().handle, content, static_cast<size_t>(bytes), 0);
    if (n != bytes) {
      const int error = n < 0 ? errno : ENOSPC;
      remove_shared(std::exchange(name_, {}));
      throw Error(Errc::Io, fmt::format("{} cannot be written: {}", path_of(name), std::strerror(error)));
    }
    region_ = bip::mapped_region(object, bip::read_write, 0, static_cast<size_t>(bytes));
  } catch (const bip::interprocess_exception& e) {
    if (!name_.empty()) remove_shared(std::exchange(name_, {}));
    throw Error(Errc::Io, fmt::format("{}: {}", path_of(name), e.what()));
  }
}

std::optional<SharedRecord> SharedRecord::open(const std::string& name, i64 bytes) {
  struct stat st {};
  if (lstat(path_of(name).c_str(), &st) != 0) return std::nullopt;
  DS_CHECK(is_ours(st), Errc::Io, "{} belongs to another user or is open to others: refused", path_of(name));
  try {
    const bip::shared_memory_object object(bip::open_only, name.c_str(), bip::read_only);
    DS_CHECK(fstat(object.get_mapping_handle().handle, &st) == 0, Errc::Io, "{}: {}", path_of(name),
             std::strerror(errno));
    if (st.st_size == 0) return std::nullopt;
    DS_CHECK(st.st_size == bytes, Errc::Mismatch, "{} has {} bytes, not {}: another version of libds made it",
             path_of(name), st.st_size, bytes);
    SharedRecord record;
    record.region_ = bip::mapped_region(object, bip::read_only, 0, static_cast<size_t>(bytes));
    return record;
  } catch (const bip::interprocess_exception& e) {
    if (e.get_error_code() == bip::not_found_error) return std::nullopt;
    throw Error(Errc::Io, fmt::format("{}: {}", path_of(name), e.what()));
  }
}

SharedRecord& SharedRecord::operator=(SharedRecord&& other) noexcept {
  region_.swap(other.region_);
  name_.swap(other.name_);
  return *this;
}

SharedRecord::~SharedRecord() {
  if (!name_.empty()) remove_shared(name_);
}

std::vector<std::string> shared_names(std::string_view prefix) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir("/dev/shm"), closedir);
  while (const dirent* entry = dir ? readdir(dir.get()) : nullptr) {
    struct stat st {};
    if (std::string_view(entry->d_name).starts_with(prefix) &&
        fstatat(dirfd(dir.get()), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && is_ours(st))
      names.emplace_back(entry->d_name);
  }
  std::ranges::sort(names);
  return names;
}

std::string read_shared(const std::string& name, i64 bytes) {
  const int fd = ::open(path_of(name).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {};
  struct stat st {};
  std::string content(static_cast<size_t>(bytes), '\0');
  const ssize_t n = fstat(fd, &st) == 0 && is_ours(st) ? pread(fd, content.data(), content.size(), 0) : 0;
  close(fd);
  content.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return content;
}

std::optional<i64> shared_age(const std::string& name) {
  struct stat st {};
  if (lstat(path_of(name).c_str(), &st) != 0) return std::nullopt;
  return i64{time(nullptr)} - st.st_mtime;
}

bool remove_shared(const std::string& name) noexcept { return bip::shared_memory_object::remove(name.c_str()); }

}  // namespace ds
