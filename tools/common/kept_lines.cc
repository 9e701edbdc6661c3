// SPDX-License-Identifier: Apache-2.0
#include "common/kept_lines.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "common/internal.h"
#include "ds/error.h"
#include "ds/infer.h"
#include "ds/limits.h"

namespace ds::tools {
namespace {

constexpr std::string_view kMark = "ds-infer progress 1 ";

Error failed(std::string_view doing, const std::string& file) {
  return Error(Errc::Io, fmt::format("cannot {} {}: {}", doing, file, system_reason(errno)));
}

int open_file(const std::string& file, int flags) {
  const int fd = ::open(file.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) throw failed("open", file);
  return fd;
}

std::string contents(int fd, const std::string& file) {
  std::string text;
  char block[1 << 16];
  for (off_t at = 0;;) {
    const ssize_t n = ::pread(fd, block, sizeof block, at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw failed("read", file);
    if (n == 0) return text;
    text.append(block, static_cast<size_t>(n));
    at += n;
  }
}

// The offset behind the first `lines` whole lines of a file; less, in `lines`, if it does not have as many.
off_t end_of_lines(int fd, const std::string& file, i64& lines) {
  char block[1 << 16];
  i64 found = 0;
  off_t end = 0;
  for (off_t at = 0; found < lines;) {
    const ssize_t n = ::pread(fd, block, sizeof block, at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw failed("read", file);
    if (n == 0) break;
    for (ssize_t i = 0; i < n && found < lines; ++i)
      if (block[i] == '\n') ++found, end = at + i + 1;
    at += n;
  }
  lines = found;
  return end;
}

void cut(int fd, off_t size, const std::string& file) {
  if (::ftruncate(fd, size) != 0) throw failed("shorten", file);
}

}  // namespace

KeptLines::KeptLines(std::string file, const std::string& identity, bool resumes)
    : file_(std::move(file)), progress_(file_ + ".progress") {
  open(resumes, fmt::format("{}{}\n", kMark, text_digest(identity)));
}

void KeptLines::open(bool resumes, const std::string& header) {
  fd_ = open_file(file_, O_RDWR | O_CREAT | O_APPEND);
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) throw failed("read", file_);
  if (!S_ISREG(status.st_mode))
    throw Error(Errc::Config, fmt::format("--out {}: not a file; write to standard output instead", file_));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0)
    throw Error(Errc::Config, fmt::format("--out {}: another process is writing it", file_));
  if (!resumes && status.st_size > 0)
    throw Error(Errc::Config, fmt::format("--out {}: is not empty: go on with --resume, or remove it", file_));
  const bool begins = status.st_size == 0;
  if (!begins && ::access(progress_.c_str(), F_OK) != 0)
    throw Error(Errc::Config, fmt::format("--resume: {} is missing, so {} is complete or not a result of ds-infer",
                                          progress_, file_));
  progress_fd_ = open_file(progress_, O_RDWR | O_CREAT | O_APPEND | (begins ? O_TRUNC : 0));
  if (begins) {
    write_all(progress_fd_, header, progress_);
    if (::fsync(progress_fd_) != 0) throw failed("sync", progress_);
    return;
  }

  const std::string text = contents(progress_fd_, progress_);
  if (!text.starts_with(kMark))
    throw Error(Errc::Corrupt,
                fmt::format("{}: is damaged, or not the progress of ds-infer; remove it and {} to begin again",
                            progress_, file_));
  if (!text.starts_with(header))
    throw Error(Errc::Mismatch,
                fmt::format("--resume: {} was begun with another model, other options or another version", file_));
  std::vector<std::pair<i64, std::string>> lines;
  std::vector<size_t> ends = {header.size()};
  for (size_t at = header.size();;) {
    const size_t end = text.find('\n', at), blank = text.find(' ', at);
    if (end == std::string::npos) break;
    i64 number = 0;
    if (blank < end) number = std::strtoll(text.c_str() + at, nullptr, 10);
    if (number <= 0) throw Error(Errc::Corrupt, fmt::format("{}: line {} is damaged", progress_, lines.size() + 2));
    lines.emplace_back(number, text.substr(blank + 1, end - blank - 1));  // the digest, and "error"
    at = end + 1;
    ends.push_back(at);
  }
  i64 whole = std::ssize(lines);
  const off_t size = end_of_lines(fd_, file_, whole);
  cut(fd_, size, file_);
  cut(progress_fd_, static_cast<off_t>(ends[static_cast<size_t>(whole)]), progress_);
  lines.resize(static_cast<size_t>(whole));
  for (auto& [number, digest] : lines) {
    const size_t blank = digest.find(' ');
    errors_ += blank != std::string::npos;
    done_.emplace(number, digest.substr(0, blank));
  }
}

KeptLines::~KeptLines() {
  if (fd_ >= 0) ::close(fd_);
  if (progress_fd_ >= 0) ::close(progress_fd_);
}

bool KeptLines::has(i64 number, std::string_view input) {
  const auto found = done_.find(number);
  if (found == done_.end()) return false;
  if (found->second != text_digest(input))
    throw Error(Errc::Mismatch,
                fmt::format("--resume: line {} of the input is not the one that {} answers", number, file_));
  ++seen_;
  return true;
}

// The answer comes first, so that progress never names one that is not there.
void KeptLines::append(i64 number, std::string_view input, std::string_view line, bool is_error) {
  write_all(fd_, line, file_);
  write_all(progress_fd_, fmt::format("{} {}{}\n", number, text_digest(input), is_error ? " error" : ""), progress_);
}

void KeptLines::finish() {
  if (seen_ < count())
    throw Error(Errc::Mismatch,
                fmt::format("--resume: the input has ended, and {} answers {} lines that it did not have", file_,
                            count() - seen_));
  if (::fsync(fd_) != 0) throw failed("sync", file_);
  if (::unlink(progress_.c_str()) != 0) throw failed("remove", progress_);
}

}  // namespace ds::tools
