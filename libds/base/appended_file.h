// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file that only grows, by whole texts.
//
// We often make its name ourselves, in a directory that the user has named. Under that name there may be a symbolic
// link, a file with a second name (hard link), a directory, a pipe or a device. Writing would change a file that nobody
// has named, or wait for a reader: it is refused.

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace ds {

// Why no file of this name can be appended to: "is a symbolic link"; empty if it is a regular file with one name, or
// there is none.
std::string why_not_appendable(const std::string& path);
// A descriptor of the file, which is made if it does not exist. Throws Errc::Io.
int open_to_append(const std::string& path, unsigned mode = 0644);

// Move-only. Refusals of the system are Errc::Io with the path and the system's own words.
class AppendedFile {
 public:
  explicit AppendedFile(std::string path) : AppendedFile(path, open_to_append(path)) {}
  // A new one. Nothing: the name is taken.
  static std::optional<AppendedFile> create(const std::string& path);
  AppendedFile(AppendedFile&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  AppendedFile& operator=(AppendedFile&&) = delete;
  ~AppendedFile();

  // Whole or not at all: what a full disk has taken of it is cut off again.
  void append(std::string_view text);
  // Of a file of lines: cuts off what stands behind the last newline, which a killed process has left.
  void cut_torn_line();
  bool is_empty() const;
  // Whether the file begins with this text, or is shorter and begins it.
  bool begins(std::string_view text) const;

 private:
  AppendedFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_ = -1;
};

}  // namespace ds
