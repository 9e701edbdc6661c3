// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file to which a run appends lines, and from which another one goes on where it was stopped. Beside FILE stands
// FILE.progress until the last line is written: a line that identifies the run, and one for each line of FILE, with the
// number and the digest of the line of input that it answers.

#include <map>
#include <string>
#include <string_view>

#include "ds/integers.h"

namespace ds::tools {

class KeptLines {
 public:
  // `identity`: everything on which results depend, in words. Without `resumes` the file must be new or empty. With it,
  // a torn last line is dropped, and a missing file begins. Throws Errc::Config, Errc::Io, Errc::Mismatch for another
  // identity.
  KeptLines(std::string file, const std::string& identity, bool resumes);
  ~KeptLines();
  KeptLines(const KeptLines&) = delete;
  KeptLines& operator=(const KeptLines&) = delete;

  // Whether line `number` of the input has its answer. Throws Errc::Mismatch if that was another line.
  bool has(i64 number, std::string_view input);
  i64 count() const noexcept { return std::ssize(done_); }
  i64 errors() const noexcept { return errors_; }  // lines whose answer is an error, of earlier runs
  void append(i64 number, std::string_view input, std::string_view line, bool is_error);
  // The input has ended. Throws Errc::Mismatch if it did not have all lines that are answered.
  void finish();

 private:
  void open(bool resumes, const std::string& header);

  std::string file_, progress_;
  int fd_ = -1, progress_fd_ = -1;
  std::map<i64, std::string> done_;  // digests, of earlier runs
  i64 seen_ = 0, errors_ = 0;        // of done_: those that the input has had again, those that are errors
};

}  // namespace ds::tools
