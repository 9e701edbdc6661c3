// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file without a name in TMPDIR (or /tmp), which is gone when the process is.

#include <string>

#include "ds/kernels/dtype.h"

namespace ds {

class TemporaryFile {
 public:
  // `contents` names it in messages: "the tokens of 'a.txt'". Throws Errc::Io, as append() does.
  explicit TemporaryFile(std::string contents);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void append(const void* data, i64 bytes);
  i64 bytes() const noexcept { return bytes_; }
  int descriptor() const noexcept { return fd_; }  // stays the file's

 private:
  std::string contents_, directory_;
  int fd_ = -1;
  i64 bytes_ = 0;
};

}  // namespace ds
