// SPDX-License-Identifier: Apache-2.0
#include "common/lines.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "ds/error.h"
#include "ds/limits.h"

namespace ds::tools {

LineReader::LineReader(std::string path) : name_(std::move(path)), fd_(STDIN_FILENO) {
  if (name_ == "-") {
    name_ = "standard input";
    return;
  }
  fd_ = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC);
  if (struct stat status = {}; fd_ >= 0 && ::fstat(fd_, &status) == 0 && S_ISDIR(status.st_mode)) {
    ::close(fd_);
    throw Error(Errc::Config, fmt::format("{}: is a directory, not a file of lines", name_));
  }
  if (fd_ < 0) throw Error(Errc::Config, fmt::format("{}: {}", name_, system_reason(errno)));
}

LineReader::~LineReader() {
  if (fd_ != STDIN_FILENO) ::close(fd_);
}

bool LineReader::read_more(int wait_ms) {
  constexpr size_t kBlock = size_t{1} << 16;
  if (ended_) return false;
  pollfd poll{.fd = fd_, .events = POLLIN, .revents = 0};
  if (::poll(&poll, 1, wait_ms) <= 0) return false;  // nothing, or a signal
  const size_t had = buffer_.size();
  buffer_.resize(had + kBlock);
  ssize_t n = 0;
  while ((n = ::read(fd_, buffer_.data() + had, kBlock)) < 0 && errno == EINTR) {
  }
  buffer_.resize(had + static_cast<size_t>(n > 0 ? n : 0));
  if (n < 0) throw Error(Errc::Io, fmt::format("{}: {}", name_, system_reason(errno)));
  ended_ = n == 0;
  return n > 0;
}

std::optional<std::string> LineReader::take(size_t bytes, size_t and_end) {
  std::string line = buffer_.substr(0, bytes);
  buffer_.erase(0, bytes + and_end);
  looked_at_ = 0;
  if (++number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
  if (line.ends_with('\r')) line.pop_back();
  return line;
}

std::optional<std::string> LineReader::next(int wait_ms) {
  too_long_ = false;
  for (;;) {
    const size_t end = buffer_.find('\n', looked_at_);
    if (skips_) {  // the rest of a line that was too long
      buffer_.erase(0, end == std::string::npos ? buffer_.size() : end + 1);
      skips_ = end == std::string::npos;
      looked_at_ = 0;
      if (!skips_) continue;
    } else if (end != std::string::npos) {
      return take(end, 1);
    } else if (buffer_.size() > kMostBytes) {
      too_long_ = skips_ = true;
      return take(kMostBytes, buffer_.size() - kMostBytes);
    }
    looked_at_ = buffer_.size();
    if (read_more(wait_ms)) continue;
    if (ended_ && !buffer_.empty()) return take(buffer_.size(), 0);
    return std::nullopt;
  }
}

}  // namespace ds::tools
