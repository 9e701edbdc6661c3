// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files as libds uses them: descriptors that close themselves, whole reads and writes at offsets, and outputs that
// appear whole or not at all. Every refusal of the system is Errc::Io with the path and the system's own words.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"

namespace ds {

// Called now and then in long work; what it throws ends that.
using Tick = std::function<void()>;

// A regular file. Move-only. Reads and writes at offsets are safe from several threads.
class File {
 public:
  static File open_read(const std::string& path);
  static File open_write(const std::string& path);  // exists
  static File create(const std::string& path);      // must not exist; read and write
  // A file of the directory of `path`, which stands for it in messages, that has no name and is gone when it is closed,
  // however the process ends. Nothing where the file system has no such files.
  static std::optional<File> create_unnamed(const std::string& path);

  File(File&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), opened_as_(std::move(other.opened_as_)) {}
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const noexcept { return path_; }
  // A path that opens this file again, with or without a name.
  const std::string& opened_as() const noexcept { return opened_as_.empty() ? path_ : opened_as_; }
  // For what only a descriptor can do; stays the file's.
  int descriptor() const noexcept { return fd_; }
  i64 size() const;
  // A file that ends before offset + bytes is Errc::Corrupt.
  void read_at(i64 offset, void* out, i64 bytes) const;
  void write_at(i64 offset, const void* data, i64 bytes) const;
  void sync() const;  // data and metadata are on the disk

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_, opened_as_{};
};

// Pages of memory for transfers past the page cache (O_DIRECT). Those leave the cache to others, and run at the disk's
// speed where filling fresh cache pages would not.
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

// File::read_at for bulk: large reads go past the page cache, through `buffer`.
void read_bulk(const File& file, i64 offset, void* out, i64 bytes, PageBuffer& buffer);

// Writes bulk past the page cache; in the ordinary way where the file system cannot. Adjoining writes are joined into
// whole pages; the ragged ends of a run go through the cache, on pages of their own. Nothing is sure to be written
// before flush().
class DirectWriter {
 public:
  explicit DirectWriter(const File& file);  // the file outlives the writer
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  void write(i64 offset, const void* data, i64 bytes);
  void flush();

 private:
  const File& file_;
  int fd_;             // for direct writes; -1: not possible here
  PageBuffer buffer_;  // file bytes from base_ on, of which [begin_, end_) wait to be written
  i64 base_ = 0, begin_ = 0, end_ = 0;
};

// An output that has no name yet, or, where the file system knows no such files, a temporary name in the same
// directory. commit() syncs it and moves it to `path`, replacing what was there, whose permissions it takes, and syncs
// the directory; without commit() nothing is left.
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
  std::string temporary_;  // empty: it has no name
  File file_;
};

// The same for a directory, which is filled at path() and moved to its place by commit(). The target does not exist or
// is an empty directory, which keeps its owner and mode: anything else is Errc::Config. An empty one that we cannot
// replace (a mount point, somebody else's, or one in a directory that we may not change) is filled instead: then the
// entries appear one after the other.
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
  bool is_inside_ = false;  // temporary_ is in the target, and what it holds is moved out of it
  bool committed_ = false;
};

// The whole of a small file. Larger than max_bytes is an error of code `too_large`: what the same file would be, were
// it small and wrong.
std::string read_text_file(const std::string& path, i64 max_bytes, Errc too_large = Errc::Corrupt);
// The whole of what somebody has named, which may be a pipe, a terminal or a device without an end: never more than
// max_bytes are held. Throws Errc::Config with a reason that does not name it: "is larger than 16 MiB", "cannot be
// opened: No such file or directory".
std::string read_named_text(const std::string& path, i64 max_bytes);
std::string read_standard_input(i64 max_bytes);
// Calls line(text, is_ended) for each line of a file of any length, in order, without its newline; what stands behind
// the last newline comes as one that is not ended. Longer than max_bytes is Errc::Corrupt: never more than that is
// held.
void for_each_line(const File& file, i64 max_bytes, const std::function<void(std::string_view, bool)>& line);
// Replaces `path` by `text` in one step, durably.
void replace_text_file(const std::string& path, std::string_view text);

// A directory whose entries are to last. It is opened before they change: whoever has no descriptor left learns it
// while nothing has happened.
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
// Where `path` leads through symbolic links; the last one may lead to a file that does not exist yet.
std::string follow_links(std::string path);
// How many files a reader of many keeps open: a quarter of what the process may, at most 256.
i64 open_files_share() noexcept;
// "." for a bare name.
std::string parent_directory(const std::string& path);
// 16 hexadecimal digits from the system's random source.
std::string random_hex64();

}  // namespace ds
