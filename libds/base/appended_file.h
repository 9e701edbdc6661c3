// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file to which whole texts are appended.
//
// libds often chooses the file's name itself, in a directory that the user has named. That name may already belong to a
// symbolic link, a file with other hard links, a directory, a pipe or a device. Writing would then change a file that
// nobody has named, or wait for a reader, so it is refused.

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace ds {

// Why a file of this name cannot be appended to: "is a symbolic link"; empty if it is a regular file with a single
// name, or missing.
std::string why_not_appendable(const std::string& path);
// Opens the file, and creates it if it is missing. Throws Errc::Io.
int open_to_append(const std::string& path, unsigned mode = 0644);

// Move-only. Errors of the system are Errc::Io with the path and the system's own words.
class AppendedFile {
 public:
  explicit AppendedFile(std::string path) : AppendedFile(path, open_to_append(path)) {}
  // Creates a new file. Empty if the name is taken.
  static std::optional<AppendedFile> create(const std::string& path);
  AppendedFile(AppendedFile&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  AppendedFile& operator=(AppendedFile&&) = delete;
  ~AppendedFile();

  // Appends all or nothing: if the disk is full, the part already written is cut off again.
  void append(std::string_view text);
  // For a file of lines: cuts off an incomplete last line, which a killed process has left.
  void cut_torn_line();
  bool is_empty() const;
  // True if the file begins with this text, or is a prefix of it.
  bool begins(std::string_view text) const;

 private:
  AppendedFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_ = -1;
};

}  // namespace ds
