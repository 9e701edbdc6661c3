// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file that only grows, by whole texts.

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace ds {

// Move-only. Refusals of the system are Errc::Io with the path and the system's own words.
class AppendedFile {
 public:
  explicit AppendedFile(std::string path);  // is made where it is not there
  AppendedFile(AppendedFile&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  AppendedFile& operator=(AppendedFile&&) = delete;
  ~AppendedFile();

  // Whole or not at all: what a full disk has taken of it is cut off again.
  void append(std::string_view text);
  // Of a file of lines: cuts off what stands behind the last newline, which a killed process has left.
  void cut_torn_line();
  bool is_empty() const;

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace ds
