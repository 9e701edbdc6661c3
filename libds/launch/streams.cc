// SPDX-License-Identifier: Apache-2.0
#include "launch/streams.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "ds/printable.h"

namespace ds::launch {
namespace {

constexpr std::size_t kLongestLine = 1024 * 1024;  // of a longer one, pieces
constexpr std::size_t kRemembered = 4096;          // of a line

}  // namespace

void Sink::show(int rank, std::string_view text, bool complete, const std::string& tag) {
  if (error_ != 0) return;
  if (owner_ >= 0 && owner_ != rank) queue_ += '\n';
  if (owner_ != rank) queue_ += tag;
  queue_ += text;
  owner_ = complete ? -1 : rank;
  last_rank_ = rank;
  drain();
}

void Sink::drain() {
  // After POLLOUT a pipe takes PIPE_BUF bytes without blocking.
  std::size_t done = 0;
  while (done < queue_.size()) {
    pollfd polled{fd_, POLLOUT, 0};
    if (::poll(&polled, 1, 0) <= 0) break;
    const ssize_t n = ::write(fd_, queue_.data() + done, std::min<std::size_t>(queue_.size() - done, PIPE_BUF));
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno != EINTR && errno != EAGAIN) {
      error_ = errno;
      done = queue_.size();
    }
  }
  queue_.erase(0, done);
}

void LineStream::take(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t newline = bytes.find('\n');
    const std::size_t n = std::min(newline == std::string_view::npos ? bytes.size() : newline + 1, kLongestLine);
    line_ += bytes.substr(0, n);
    bytes.remove_prefix(n);
    if (line_.ends_with('\n') || line_.size() >= kLongestLine) line(true);
  }
  if (!line_.empty() && sink_.wants_partial(rank_)) {
    sink_.show(rank_, std::string_view(line_).substr(shown_), false, tag_);
    shown_ = line_.size();
  }
}

void LineStream::end() {
  if (!line_.empty()) line(sink_.wants_partial(rank_));
}

// complete: no newline has to be added.
void LineStream::line(bool complete) {
  if (!complete) line_ += '\n';
  sink_.show(rank_, std::string_view(line_).substr(shown_), line_.ends_with('\n'), tag_);
  if (log_fd_ >= 0 && log_error_ == 0)
    for (std::string_view rest = line_; !rest.empty();) {
      const ssize_t n = ::write(log_fd_, rest.data(), rest.size());
      if (n > 0) rest.remove_prefix(static_cast<std::size_t>(n));
      if (n < 0 && errno != EINTR) {
        log_error_ = errno;
        break;
      }
    }
  if (remembered_ > 0) {
    std::string_view text(line_);
    while (text.ends_with('\n') || text.ends_with('\r')) text.remove_suffix(1);
    text.remove_prefix(text.rfind('\r') + 1);  // of a progress display, what is seen; npos + 1 = 0
    last_.push_back(shortened(text, kRemembered));
    if (last_.size() > remembered_) last_.pop_front();
  }
  line_.clear();
  shown_ = 0;
}

}  // namespace ds::launch
