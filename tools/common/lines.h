// SPDX-License-Identifier: Apache-2.0
#pragma once
// Lines of a file, a pipe or standard input, as they come.

#include <optional>
#include <string>

#include "ds/integers.h"

namespace ds::tools {

class LineReader {
 public:
  static constexpr size_t kMostBytes = size_t{64} << 20;  // of a line

  // "-" is standard input. Throws Errc::Config for a file that cannot be opened.
  explicit LineReader(std::string path);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // The next line without its end, and without the byte-order mark of the first; none at the end of the file, or if no
  // whole line comes within the time. A line that is too long is cut: too_long(). Throws Errc::Io.
  std::optional<std::string> next(int wait_ms);
  bool at_end() const noexcept { return ended_ && buffer_.empty(); }
  i64 number() const noexcept { return number_; }  // of the last line, from 1
  bool too_long() const noexcept { return too_long_; }
  const std::string& name() const noexcept { return name_; }

 private:
  bool read_more(int wait_ms);
  std::optional<std::string> take(size_t bytes, size_t and_end);

  std::string name_, buffer_;
  size_t looked_at_ = 0;  // bytes of the buffer without an end of a line
  int fd_;
  bool ended_ = false, skips_ = false, too_long_ = false;
  i64 number_ = 0;
};

}  // namespace ds::tools
