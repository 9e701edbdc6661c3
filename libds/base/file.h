// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files: descriptors that close themselves, whole reads and writes at offsets, and outputs that appear whole or not at
// all. Every error of the system is Errc::Io with the path and the system's own words.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"

namespace ds {

// Called repeatedly during long work; an exception ends the work.
using Tick = std::function<void()>;

// A regular file. Move-only. Reads and writes at offsets are safe from several threads.
class File {
 public:
  static File open_read(const std::string& path);
  static File open_write(const std::string& path);  // must exist
  static File create(const std::string& path);      // must not exist; read and write
  // Creates a file without a name on the file system of `path`, which names it in messages. It is deleted when closed,
  // however the process ends. Empty if the file system does not support this.
  static std::optional<File> create_unnamed(const std::string& path);

  File(File&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), opened_as_(std::move(other.opened_as_)) {}
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const noexcept { return path_; }
  // A path that opens this file again, whether it has a name or not.
  const std::string& opened_as() const noexcept { return opened_as_.empty() ? path_ : opened_as_; }
  // For operations that need a descriptor; the file keeps ownership.
  int descriptor() const noexcept { return fd_; }
  i64 size() const;
  // Throws Errc::Corrupt if the file ends before offset + bytes.
  void read_at(i64 offset, void* out, i64 bytes) const;
  void write_at(i64 offset, const void* data, i64 bytes) const;
  void sync() const;  // writes data and metadata to the disk

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_, opened_as_{};
};

// Pages of memory for transfers that bypass the page cache (O_DIRECT). They leave the cache to others and run at the
// disk's speed, which filling fresh cache pages may not reach.
class PageBuffer {
 public:
  static constexpr i64 kPage = 4096;  // of memory and of every common disk
  static constexpr i64 kBytes = i64{4} << 20;
  PageBuffer();
  char* data() const noexcept { return data_.get(); }

 private:
  struct Free {
    void operator()(char* p) const noexcept;
  };
  std::unique_ptr<char, Free> data_;
};

// File::read_at for bulk data: large reads bypass the page cache, through `buffer`.
void read_bulk(const File& file, i64 offset, void* out, i64 bytes, PageBuffer& buffer);

// Writes bulk data past the page cache, or normally if the file system does not support that. Adjoining writes are
// joined into whole pages; incomplete pages at the ends of a run go through the cache. All data is written only after
// flush().
class DirectWriter {
 public:
  explicit DirectWriter(const File& file);  // the file must outlive the writer
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  void write(i64 offset, const void* data, i64 bytes);
  void flush();

 private:
  const File& file_;
  int fd_;             // for direct writes; -1: not possible here
  PageBuffer buffer_;  // file bytes from base_ on; [begin_, end_) of them are still to be written
  i64 base_ = 0, begin_ = 0, end_ = 0;
};

// An output without a name, or, if the file system does not support that, with a temporary name in the same directory.
// commit() syncs it, moves it to `path`, whose permissions it takes if a file is replaced, and syncs the directory.
// Without commit() nothing is left.
class PendingFile {
 public:
  explicit PendingFile(std::string path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  const File& file() const noexcept { return file_; }
  void commit();

 private:
  std::string path_;
  std::string temporary_;  // empty: no name
  File file_;
};

// The same for a directory, which is filled at path() and moved to its place by commit(). The target must be missing or
// an empty directory, whose owner and mode are kept; otherwise Errc::Config is thrown. An empty directory that cannot
// be replaced (a mount point, another user's, or one in a directory that we may not change) is filled instead, and the
// entries then appear one by one.
class PendingDirectory {
 public:
  explicit PendingDirectory(std::string target);
  ~PendingDirectory();
  PendingDirectory(const PendingDirectory&) = delete;
  PendingDirectory& operator=(const PendingDirectory&) = delete;

  const std::string& path() const noexcept { return temporary_; }
  void commit();

 private:
  void move_out();

  std::string target_, temporary_;
  bool is_inside_ = false;  // temporary_ is inside the target, and its entries are moved out of it
  bool committed_ = false;
};

// Reads a whole small file. A file larger than max_bytes is an error of code `too_large`, which should be the code of a
// small invalid file.
std::string read_text_file(const std::string& path, i64 max_bytes, Errc too_large = Errc::Corrupt);
// Reads all of a file named by the user, which may also be a pipe, a terminal or an endless device; holds at most
// max_bytes. Throws Errc::Config with a reason that does not contain the name: "is larger than 16 MiB", "cannot be
// opened: No such file or directory".
std::string read_named_text(const std::string& path, i64 max_bytes);
std::string read_standard_input(i64 max_bytes);
// Calls line(text, is_ended) for each line of a file of any length, in order, without its newline; is_ended is false
// for text after the last newline. A line longer than max_bytes is Errc::Corrupt; at most that much is held.
void for_each_line(const File& file, i64 max_bytes, const std::function<void(std::string_view, bool)>& line);
// Replaces the contents of `path` by `text` atomically and durably.
void replace_text_file(const std::string& path, std::string_view text);

// Syncs changes of a directory's entries. It is opened before they change, so that a lack of descriptors is reported
// before anything has happened.
class SyncedDirectory {
 public:
  explicit SyncedDirectory(std::string path);
  ~SyncedDirectory();
  SyncedDirectory(const SyncedDirectory&) = delete;
  SyncedDirectory& operator=(const SyncedDirectory&) = delete;

  void sync() const;

 private:
  std::string path_;
  int fd_;
};
void sync_directory(const std::string& path);
// Resolves symbolic links; the last one may lead to a missing file.
std::string follow_links(std::string path);
// The number of files that a reader of many keeps open: a quarter of the process's limit, at most 256.
i64 open_files_share() noexcept;
// "." for a bare name.
std::string parent_directory(const std::string& path);
// 16 hexadecimal digits from the system's random source.
std::string random_hex64();

}  // namespace ds
