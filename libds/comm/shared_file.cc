// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <memory>

#include "base/check.h"
#include "base/limits.h"
#include "ds/log.h"
#include "ds/signals.h"

namespace ds {
namespace {

constexpr const char* kFolder = "/dev/shm";

// A regular file of this user; nobody else can replace it, since the folder is sticky.
bool is_ours(const struct stat& st) { return S_ISREG(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0; }

// Names given by objects of this process, where a signal handler can read them. A process has few at a time; if the
// list is full, a name is removed later, like those of a killed process.
struct GivenName {
  std::atomic<bool> taken = false, written = false;
  pid_t maker = 0;  // forked processes inherit the list, but not the files
  std::array<char, 256> path{};
};
std::array<GivenName, 64> given_names;

void note_name(const std::string& path) noexcept {
  for (GivenName& name : given_names) {
    if (path.size() >= name.path.size() || name.taken.exchange(true)) continue;
    name.maker = getpid();
    name.path = {};
    path.copy(name.path.data(), name.path.size() - 1);
    name.written = true;
    return;
  }
}

void forget_name(std::string_view path) noexcept {
  for (GivenName& name : given_names) {
    if (!name.written || name.path.data() != path) continue;
    name.written = false;
    name.taken = false;
    return;
  }
}

bool is_one_of_ours(std::string_view name) {
  const auto in_job = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '.'; };
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (name.starts_with(kJobPrefix)) return std::ranges::all_of(name.substr(kJobPrefix.size()), in_job);
  if (!name.starts_with(kLivePrefix)) return false;
  const std::string_view pid = name.substr(kLivePrefix.size());
  return !pid.empty() && pid.front() != '0' && std::ranges::all_of(pid, digit);
}

}  // namespace

SharedFile SharedFile::create() {
  SharedFile file(::open(kFolder, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  DS_CHECK(file.fd_ >= 0 && flock(file.fd_, LOCK_EX | LOCK_NB) == 0, Errc::Io, "cannot create a file in {}: {}{}",
           kFolder, system_reason(errno), errno == EOPNOTSUPP ? "; mount a tmpfs there" : "");
  return file;
}

std::optional<SharedFile> SharedFile::open(const std::string& name, bool writable) {
  // Without blocking, since another user may have put a pipe there.
  const int mode = writable ? O_RDWR : O_RDONLY;
  SharedFile file(::open(shared_path(name).c_str(), mode | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (file.fd_ < 0 && errno == ENOENT) return std::nullopt;
  struct stat st {};
  DS_CHECK(file.fd_ >= 0 || errno == ENXIO || errno == ELOOP || errno == EACCES, Errc::Io, "{}: {}", shared_path(name),
           system_reason(errno));
  DS_CHECK(file.fd_ >= 0 && fstat(file.fd_, &st) == 0 && is_ours(st), Errc::Io,
           "{} belongs to another user or is open to others: refused", shared_path(name));
  return file;
}

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  name_.swap(other.name_);
  return *this;
}

SharedFile::~SharedFile() {
  unlink();
  if (fd_ >= 0) close(fd_);
}

bool SharedFile::link(const std::string& name) {
  const int failed = linkat(AT_FDCWD, opened_as().c_str(), AT_FDCWD, shared_path(name).c_str(), AT_SYMLINK_FOLLOW);
  if (failed != 0 && errno == EEXIST) return false;
  DS_CHECK(failed == 0, Errc::Io, "cannot create {}: {}", shared_path(name), system_reason(errno));
  name_ = name;
  note_name(shared_path(name_));
  return true;
}

// Before the lock is released, so that no other file of this name can be affected.
void SharedFile::unlink() noexcept {
  if (name_.empty()) return;
  const std::string path = shared_path(name_);
  ::unlink(path.c_str());
  forget_name(path);
  name_.clear();
}

std::string SharedFile::opened_as() const { return fmt::format("/proc/self/fd/{}", fd_); }

i64 SharedFile::size() const {
  struct stat st {};
  DS_CHECK(fstat(fd_, &st) == 0, Errc::Io, "a file in {}: {}", kFolder, system_reason(errno));
  return st.st_size;
}

std::string shared_path(const std::string& name) { return fmt::format("{}/{}", kFolder, name); }

std::vector<std::string> shared_names(std::string_view prefix) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(kFolder), closedir);
  while (const dirent* entry = dir ? readdir(dir.get()) : nullptr) {
    struct stat st {};
    if (std::string_view(entry->d_name).starts_with(prefix) &&
        fstatat(dirfd(dir.get()), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && is_ours(st))
      names.emplace_back(entry->d_name);
  }
  std::ranges::sort(names);
  return names;
}

// The holder of the lock may remove the name: it keeps out others that want to, and the maker of a file that still has
// its name holds the lock as long as it lives.
bool remove_abandoned(const std::string& name) try {
  const std::optional<SharedFile> file = SharedFile::open(name, false);
  struct stat st {};
  const bool removed = file && flock(file->descriptor(), LOCK_EX | LOCK_NB) == 0 &&
                       fstat(file->descriptor(), &st) == 0 && st.st_nlink > 0 && unlink(shared_path(name).c_str()) == 0;
  if (removed) log_message(LogLevel::Verbose, fmt::format("removed {}: its maker has ended", shared_path(name)));
  return removed;
} catch (const Error&) {  // another user's
  return false;
}

void remove_shared_names() noexcept {
  for (const GivenName& name : given_names)
    if (name.written && name.maker == getpid()) ::unlink(name.path.data());
}

void remove_abandoned() {
  for (const std::string_view prefix : {kJobPrefix, kLivePrefix})
    for (const std::string& name : shared_names(prefix))
      if (is_one_of_ours(name)) remove_abandoned(name);
}

}  // namespace ds
