// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <vector>

#include "base/content_kind.h"
#include "base/limits.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// Linux transfers at most this much per call; whole pages keep the next offset aligned.
constexpr i64 kMaxTransfer = i64{1} << 30;

[[noreturn]] void fail(std::string_view what, const std::string& path) {
  const int error = errno;
  throw Error(Errc::Io, fmt::format("cannot {} {}: {}", what, path, system_reason(error)));
}

// Opens without waiting for the other end of a pipe; refuses everything but regular files.
int open_regular(const std::string& path, int flags, std::string_view what) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) fail(what, path);
  struct stat st;
  if (::fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) return fd;
  ::close(fd);
  throw Error(Errc::Io, fmt::format("cannot {} {}: not a regular file", what, path));
}

// A name beside `path`; long names are shortened so that file systems accept them.
std::string temporary_name(const std::string& path) {
  constexpr size_t kMostBytes = 255 - std::string_view("..tmp-0123456789abcdef").size();
  const size_t slash = path.rfind('/');
  const size_t name = slash == std::string::npos ? 0 : slash + 1;
  return fmt::format("{}.{}.tmp-{}", path.substr(0, name), path.substr(name, kMostBytes), random_hex64());
}

// True if `dir` is empty, except for the entries of a new file system.
bool is_empty_directory(const std::string& dir) {
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error))
    if (it->path().filename() != "lost+found") return false;
  return true;
}

// Gives `path` the owner, group and mode of the directory that it will replace.
bool take_on(const std::string& path, const std::string& dir) {
  struct stat own = {}, wanted = {};
  if (::stat(path.c_str(), &own) != 0 || ::stat(dir.c_str(), &wanted) != 0) return false;
  if ((own.st_uid != wanted.st_uid || own.st_gid != wanted.st_gid) &&
      ::chown(path.c_str(), wanted.st_uid, wanted.st_gid) != 0)
    return false;
  return own.st_mode == wanted.st_mode || ::chmod(path.c_str(), wanted.st_mode & 07777u) == 0;
}

// True if another directory can take the name of this empty one: nothing is mounted on it, and we may change its
// parent.
bool is_replaceable(const std::string& dir, const std::string& parent) {
  struct statx own = {};
  const bool is_mount_point = ::statx(AT_FDCWD, dir.c_str(), 0, STATX_TYPE, &own) == 0 &&
                              (own.stx_attributes & u64{STATX_ATTR_MOUNT_ROOT}) != 0;
  return !is_mount_point && ::access(parent.c_str(), W_OK | X_OK) == 0;
}

void check_named(bool good, std::string_view what) {
  const int error = errno;
  DS_CHECK(good, Errc::Config, "cannot be {}: {}", what, system_reason(error));
}

std::string read_to_end(int fd, i64 max_bytes) {
  constexpr size_t kBlock = 64 << 10;
  std::string text;
  for (;;) {
    const size_t before = text.size();
    text.resize(before + kBlock);
    ssize_t n = 0;
    do n = ::read(fd, text.data() + before, kBlock);
    while (n < 0 && errno == EINTR);
    check_named(n >= 0, "read");
    text.resize(before + static_cast<size_t>(n));
    if (std::ssize(text) > max_bytes) {
      const std::string_view kind = kind_of_content(text);
      const bool known = !kind.empty() && kind != kBinaryData;
      throw Error(Errc::Config, fmt::format("{}is larger than {} MiB", known ? fmt::format("is {}, and ", kind) : "",
                                            max_bytes >> 20));
    }
    if (n == 0) return text;
  }
}

}  // namespace

File File::open_read(const std::string& path) { return {open_regular(path, O_RDONLY, "open"), path}; }
File File::open_write(const std::string& path) { return {open_regular(path, O_RDWR, "open for writing"), path}; }
File File::create(const std::string& path) { return {open_regular(path, O_RDWR | O_CREAT | O_EXCL, "create"), path}; }

std::optional<File> File::create_unnamed(const std::string& path) {
  const int fd = ::open(parent_directory(path).c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0666);
  if (fd < 0) return std::nullopt;
  File file(fd, path);
  file.opened_as_ = fmt::format("/proc/self/fd/{}", fd);
  if (::access(file.opened_as_.c_str(), F_OK) != 0) return std::nullopt;  // no /proc here
  return file;
}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(opened_as_, other.opened_as_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

i64 File::size() const {
  struct stat st;
  if (::fstat(fd_, &st) != 0) fail("stat", path_);
  return st.st_size;
}

void File::read_at(i64 offset, void* out, i64 bytes) const {
  auto* p = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, static_cast<size_t>(std::min(bytes, kMaxTransfer)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("read", path_);
    DS_CHECK(n > 0, Errc::Corrupt, "{}: ends at byte {}, {} more are missing", path_, offset, bytes);
    p += n, offset += n, bytes -= n;
  }
}

void File::write_at(i64 offset, const void* data, i64 bytes) const {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, static_cast<size_t>(std::min(bytes, kMaxTransfer)), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("write", path_);
    p += n, offset += n, bytes -= n;
  }
}

void File::sync() const {
  if (::fsync(fd_) != 0) fail("sync", path_);
}

void PageBuffer::Free::operator()(char* p) const noexcept { ::munmap(p, kBytes); }

// Not from the heap, which would keep the memory after it is freed.
PageBuffer::PageBuffer() {
  void* const pages = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  DS_CHECK(pages != MAP_FAILED, Errc::OutOfMemory, "no memory for a transfer buffer: {}", system_reason(errno));
  data_.reset(static_cast<char*>(pages));
}

void read_bulk(const File& file, i64 offset, void* out, i64 bytes, PageBuffer& buffer) {
  constexpr i64 kWorthIt = 64 << 10;
  auto* p = static_cast<char*>(out);
  const int fd = bytes < kWorthIt ? -1 : ::open(file.opened_as().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  while (fd >= 0 && bytes > 0) {
    const i64 base = offset / PageBuffer::kPage * PageBuffer::kPage, skip = offset - base;
    const i64 wanted = std::min(align_up(skip + bytes, PageBuffer::kPage), PageBuffer::kBytes);
    const i64 n = std::min(::pread(fd, buffer.data(), static_cast<size_t>(wanted), base) - skip, bytes);
    if (n <= 0) break;  // end of file, or an error, which the ordinary read below reports
    std::memcpy(p, buffer.data() + skip, static_cast<size_t>(n));
    p += n, offset += n, bytes -= n;
  }
  if (fd >= 0) ::close(fd);
  file.read_at(offset, p, bytes);
}

DirectWriter::DirectWriter(const File& file)
    : file_(file), fd_(::open(file.opened_as().c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC)) {}

DirectWriter::~DirectWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void DirectWriter::write(i64 offset, const void* data, i64 bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    if (offset != end_ || end_ == base_ + PageBuffer::kBytes) {
      flush();
      base_ = offset / PageBuffer::kPage * PageBuffer::kPage;
      begin_ = end_ = offset;
    }
    const i64 n = std::min(bytes, base_ + PageBuffer::kBytes - end_);
    std::memcpy(buffer_.data() + (end_ - base_), p, static_cast<size_t>(n));
    p += n, offset += n, bytes -= n, end_ += n;
  }
}

void DirectWriter::flush() {
  const i64 head = std::min(align_up(begin_, PageBuffer::kPage), end_),
            tail = std::max(end_ / PageBuffer::kPage * PageBuffer::kPage, head);
  const auto at = [this](i64 offset) { return buffer_.data() + (offset - base_); };
  file_.write_at(begin_, at(begin_), head - begin_);
  begin_ = head;
  while (fd_ >= 0 && begin_ < tail) {
    const ssize_t n = ::pwrite(fd_, at(begin_), static_cast<size_t>(tail - begin_), begin_);
    if (n > 0) {
      begin_ += n;
    } else if (n == 0 || errno == EINVAL) {  // unsupported by this file system: continue with ordinary writes
      ::close(std::exchange(fd_, -1));
    } else if (errno != EINTR) {
      fail("write", file_.path());
    }
  }
  file_.write_at(begin_, at(begin_), end_ - begin_);
  begin_ = end_;
}

PendingFile::PendingFile(std::string path)
    : path_(std::move(path)), file_([this] {
        if (std::optional<File> unnamed = File::create_unnamed(path_)) return std::move(*unnamed);
        temporary_ = temporary_name(path_);
        return File::create(temporary_);
      }()) {}

PendingFile::~PendingFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void PendingFile::commit() {
  struct stat replaced, now;  // users who could not read the old file must not read the new one
  const bool differs = ::stat(path_.c_str(), &replaced) == 0 && ::fstat(file_.descriptor(), &now) == 0 &&
                       replaced.st_mode != now.st_mode;
  if (differs && ::fchmod(file_.descriptor(), replaced.st_mode & 07777u) != 0) fail("set the mode of the new", path_);
  file_.sync();
  const SyncedDirectory parent(parent_directory(path_));
  if (temporary_.empty()) {  // a link cannot replace a file; a rename can
    const std::string name = temporary_name(path_);
    if (::linkat(AT_FDCWD, file_.opened_as().c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0)
      fail("give the finished file a name beside", path_);
    temporary_ = name;
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename the finished file to", path_);
  temporary_.clear();
  parent.sync();
}

PendingDirectory::PendingDirectory(std::string target) : target_(std::move(target)) {
  while (target_.size() > 1 && target_.back() == '/') target_.pop_back();
  std::error_code error;
  target_ = follow_links(target_);
  const fs::file_status status = fs::status(target_, error);
  DS_CHECK(!fs::exists(status) || fs::is_directory(status), Errc::Config, "{}: is not a directory", target_);
  DS_CHECK(!fs::exists(status) || is_empty_directory(target_), Errc::Config,
           "{}: is not empty; choose another directory", target_);
  const std::string parent = parent_directory(target_);
  DS_CHECK(fs::is_directory(parent, error), Errc::Config, "{}: there is no directory {}", target_, parent);
  is_inside_ = fs::exists(status) && !is_replaceable(target_, parent);
  DS_CHECK(is_inside_ || !fs::equivalent(target_, ".", error), Errc::Config,
           "{}: is the working directory, which cannot be replaced; name another", target_);
  const std::string name = fs::path(target_).filename();
  const auto make = [&] {
    std::string temporary = temporary_name(is_inside_ ? target_ + "/" + name : target_);
    if (::mkdir(temporary.c_str(), 0777) != 0)
      fail(is_inside_ ? "create a directory in" : "create a directory beside", target_);
    temporary_ = std::move(temporary);
  };
  make();
  if (is_inside_ || !fs::exists(status) || take_on(temporary_, target_)) return;
  ::rmdir(temporary_.c_str());  // fails, harmlessly, if another process uses it
  is_inside_ = true;
  make();
}

PendingDirectory::~PendingDirectory() {
  std::error_code ignored;
  if (committed_) return;
  // Reading a directory needs memory, which may be what the writer lacked; removing an empty one does not.
  if (!fs::remove(temporary_, ignored)) fs::remove_all(temporary_, ignored);
}

void PendingDirectory::commit() {
  sync_directory(temporary_);
  if (is_inside_) return move_out();
  const SyncedDirectory parent(parent_directory(target_));
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("rename the finished directory to", target_);
  committed_ = true;
  parent.sync();
}

// Moves entry by entry: directories first, then files in the order in which they were written, so that files which name
// others come last. After an error the entries are moved back and deleted with the directory.
void PendingDirectory::move_out() {
  const SyncedDirectory into(target_);
  std::vector<fs::directory_entry> entries(fs::directory_iterator(temporary_), {});
  std::ranges::sort(entries, {}, [](const fs::directory_entry& e) {
    return std::make_tuple(!e.is_directory(), e.last_write_time(), e.path());
  });
  const auto target = [&](const fs::directory_entry& e) { return target_ + "/" + e.path().filename().string(); };
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string from = entries[i].path(), to = target(entries[i]);
    int failed = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
    // A file system without support for flags.
    if (failed != 0 && errno == EINVAL) failed = ::rename(from.c_str(), to.c_str());
    if (failed == 0) continue;
    const int error = errno;
    while (i-- > 0) ::rename(target(entries[i]).c_str(), entries[i].path().c_str());
    errno = error;
    fail("move the finished files into", target_);
  }
  committed_ = true;
  std::error_code ignored;
  fs::remove(temporary_, ignored);
  into.sync();
}

std::string read_text_file(const std::string& path, i64 max_bytes, Errc too_large) {
  const File file = File::open_read(path);
  const i64 bytes = file.size();
  if (bytes > max_bytes) {
    const std::string kind = kind_of_content(file);
    throw Error(too_large, fmt::format("{}: {}{} bytes, at most {} are expected", path,
                                       kind.empty() ? "" : fmt::format("is {} of ", kind), bytes, max_bytes));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(0, text.data(), bytes);
  return text;
}

std::string read_named_text(const std::string& path, i64 max_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
  check_named(fd >= 0, "opened");
  struct Close {
    int fd;
    ~Close() { ::close(fd); }
  } const close_at_end{fd};
  return read_to_end(fd, max_bytes);
}

std::string read_standard_input(i64 max_bytes) { return read_to_end(STDIN_FILENO, max_bytes); }

void for_each_line(const File& file, i64 max_bytes, const std::function<void(std::string_view, bool)>& line) {
  constexpr i64 kBlock = i64{1} << 20;
  const i64 size = file.size();
  i64 number = 1;
  std::string block, text;
  for (i64 at = 0; at < size; at += std::ssize(block)) {
    block.resize(std::min(kBlock, size - at));
    file.read_at(at, block.data(), std::ssize(block));
    for (size_t from = 0; from < block.size();) {
      const size_t end = block.find('\n', from);
      text.append(block, from, end == block.npos ? end : end - from);
      DS_CHECK(std::ssize(text) <= max_bytes, Errc::Corrupt, "{}:{}: the line is longer than {} bytes", file.path(),
               number, max_bytes);
      if (end == block.npos) break;
      line(text, true);
      ++number;
      text.clear();
      from = end + 1;
    }
  }
  if (!text.empty()) line(text, false);
}

void replace_text_file(const std::string& path, std::string_view text) {
  PendingFile pending(path);
  pending.file().write_at(0, text.data(), narrow<i64>(text.size()));
  pending.commit();
}

SyncedDirectory::SyncedDirectory(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0) fail("open the directory", path_);
}

SyncedDirectory::~SyncedDirectory() { ::close(fd_); }

void SyncedDirectory::sync() const {
  // Some file systems cannot sync a directory (EINVAL); their renames cannot be made more durable.
  if (::fsync(fd_) != 0 && errno != EINVAL) fail("sync the directory", path_);
}

void sync_directory(const std::string& path) { SyncedDirectory(path).sync(); }

std::string follow_links(std::string path) {
  constexpr int kMaxLinks = 40;  // the system's own limit
  char target[PATH_MAX];
  for (int links = 0; links <= kMaxLinks; ++links) {
    const ssize_t n = ::readlink(path.c_str(), target, sizeof target);
    if (n < 0) {
      while (path.size() > 1 && path.back() == '/') path.pop_back();
      return path;
    }
    const std::string_view to(target, static_cast<size_t>(n));
    path = to.starts_with('/') ? std::string(to) : fmt::format("{}/{}", parent_directory(path), to);
  }
  errno = ELOOP;
  fail("follow", path);
}

i64 open_files_share() noexcept {
  constexpr i64 kMost = 256;
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::clamp<i64>(static_cast<i64>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) / 4, 1, kMost);
}

std::string parent_directory(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string random_hex64() {
  u64 bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) fail("read", "the system's random source");
  return fmt::format("{:016x}", bits);
}

}  // namespace ds
