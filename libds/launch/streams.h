// SPDX-License-Identifier: Apache-2.0
#pragma once
// Merges the output of many ranks into one stream by whole lines. On a terminal, and with one rank, an unfinished line
// (a progress display, a prompt) appears at once. A line of more than 1 MiB is shown in pieces, so a rank that never
// ends its line takes bounded memory and does not block the others. If a line of another rank comes between two pieces,
// both the line and the next piece start on a new line.

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/channel.h"

namespace ds::launch {

// One output stream of the launcher. Writes never block for long: data that the reader does not accept is queued, and
// the launcher stops reading from ranks while a queue is full.
class Sink {
 public:
  Sink(int fd, bool partial_lines) : fd_(fd), partial_lines_(partial_lines) {}

  // Shows more of a rank's current line: `text` since the last call; `complete`: the line ends here. Every line begins
  // with the tag.
  void show(int rank, std::string_view text, bool complete, const std::string& tag);
  bool wants_partial(int rank) const noexcept { return partial_lines_ && (owner_ < 0 || owner_ == rank); }

  int fd() const noexcept { return fd_; }
  int last_rank() const noexcept { return last_rank_; }  // whose text was shown last; -1: nothing was shown
  bool pending() const noexcept { return !queue_.empty(); }
  bool full() const noexcept { return queue_.size() > 1024 * 1024; }
  void drain();                                  // after POLLOUT
  int error() const noexcept { return error_; }  // errno of a failed write, after which all output is dropped

 private:
  int fd_;
  bool partial_lines_;
  int owner_ = -1;  // the rank whose unfinished line was shown last
  int last_rank_ = -1;
  int error_ = 0;
  std::string queue_;
};

// One stream of one rank: splits bytes into lines for the sink, the log and last_lines().
class LineStream {
 public:
  LineStream(int rank, Sink& sink, int log_fd, std::string tag, std::size_t remembered)
      : rank_(rank), sink_(sink), log_fd_(log_fd), tag_(std::move(tag)), remembered_(remembered) {}

  void take(std::string_view bytes);
  void end();  // also ends a last line without a newline
  std::vector<std::string> last_lines() const { return {last_.begin(), last_.end()}; }
  int log_error() const noexcept { return log_error_; }

 private:
  void line(bool complete);

  int rank_;
  Sink& sink_;
  int log_fd_;
  std::string tag_;
  std::size_t remembered_;
  std::string line_;
  std::size_t shown_ = 0;  // bytes of line_ passed to the sink
  std::deque<std::string> last_;
  int log_error_ = 0;
};

}  // namespace ds::launch
