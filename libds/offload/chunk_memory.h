// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of chunks of states: host memory, or a file, of which some chunks are in memory at a time. The address of a
// chunk is valid until it is given back.

#include <memory>
#include <optional>
#include <vector>

#include "offload/block_file.h"
#include "offload/chunk_layout.h"
#include "offload/host_place.h"

namespace ds::offload {

class ChunkMemory {
 public:
  virtual ~ChunkMemory() = default;
  // Whether a chunk is in the memory of the training device, if that is not host memory.
  virtual bool on_device(i64 chunk) const noexcept { return static_cast<void>(chunk), false; }
  // The bytes of a chunk until it is given back; one chunk at a time. Initially zeros. change: they will be changed.
  virtual char* take(i64 chunk, bool change) = 0;
  virtual void give_back(i64 chunk, bool changed) = 0;
  // Announces that a chunk will be taken soon: reading begins if there is room.
  virtual void expect(i64 chunk) = 0;
  // The number of chunks that are worth announcing.
  virtual i64 most_expected() const noexcept = 0;
  // Copies all chunks, and brings the copies back (StateStore::keep): only for memory that was made to do so.
  virtual void keep() { DS_ASSERT(false); }
  virtual void undo() { DS_ASSERT(false); }
};

// All chunks in host memory, except the first ones, which are in device memory.
class HostChunks final : public ChunkMemory {
 public:
  // tag: of the host memory. undoes: with keep() and undo().
  HostChunks(const ChunkLayout& layout, i64 on_device, Device& device, const HostPlace& host, MemoryLedger& ledger,
             Tag tag, bool undoes);
  bool on_device(i64 chunk) const noexcept override { return chunk < on_device_; }
  char* take(i64 chunk, bool) override {
    const i64 at = layout_.chunks()[chunk].at, first = first_.bytes();
    return at < first ? first_.as<char>().data() + at : memory_.as<char>().data() + (at - first);
  }
  void give_back(i64, bool) override {}
  void expect(i64) override {}
  i64 most_expected() const noexcept override { return 0; }
  void keep() override;
  void undo() override;

 private:
  const ChunkLayout& layout_;
  const i64 on_device_;
  Device& device_;
  Device& host_;
  Buffer first_, memory_, kept_first_, kept_memory_;
};

// The places of chunks in a file that outlives the process. A changed chunk is written to another place than the one
// from which it was read, and counts from the moment at which all of it is written.
class ChunkPlaces {
 public:
  virtual ~ChunkPlaces() = default;
  virtual bool is_there(i64 chunk) const noexcept = 0;  // false: it is zeros
  virtual i64 place(i64 chunk) const noexcept = 0;
  virtual i64 next_place(i64 chunk) = 0;
  virtual void written(i64 chunk) noexcept = 0;
  // If checksums are kept: stores that of a chunk for next_place(), and compares a chunk read from place() with its
  // own. check() throws Errc::Corrupt, naming `file`.
  virtual bool has_checksums() const noexcept { return false; }
  virtual void set_next_checksum(i64 chunk, u64 sum) noexcept { static_cast<void>(chunk), static_cast<void>(sum); }
  virtual void check(i64 chunk, const char* data, i64 bytes, const std::string& file) const {
    static_cast<void>(chunk), static_cast<void>(data), static_cast<void>(bytes), static_cast<void>(file);
  }
};

// Chunks in a file, `windows` of them in memory: one in use, while others are read and written. A chunk that is still
// in a window is not read again; it is written when another one needs the window.
class FileChunks final : public ChunkMemory {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, which counts memory and requests without accessing them
    IoOptions io;
    Tag tag = Tag::Offload;  // of windows
    i64 windows = 4;         // 1 or more
    i64 resident = 0;        // number of first chunks that stay in memory and are never written
    bool read_ahead = true;
    bool write_behind = true;  // false: a chunk is written when it is given back
    bool checksums = false;    // compares each chunk that is read with what was written
    // A file with a name, and the places in it; null: makes a file without a name in the directory.
    const std::string* file = nullptr;
    bool file_is_new = false;
    ChunkPlaces* places = nullptr;
    i64 file_bytes = 0;
  };
  // Bytes of memory for resident chunks and for windows, and bytes of the disk.
  static i64 resident_bytes(const ChunkLayout& layout, const Options& options) noexcept;
  static i64 window_bytes(const ChunkLayout& layout, const Options& options) noexcept;
  static i64 file_bytes(const ChunkLayout& layout, const Options& options) noexcept {
    return layout.bytes() - resident_bytes(layout, options);
  }
  FileChunks(const ChunkLayout& layout, const HostPlace& host, MemoryLedger& ledger, const Options& options);
  ~FileChunks() override;
  char* take(i64 chunk, bool change) override;
  void give_back(i64 chunk, bool changed) override;
  void expect(i64 chunk) override;
  i64 most_expected() const noexcept override {
    return options_.read_ahead ? std::max<i64>(options_.windows - 2, 0) : 0;
  }
  const BlockFile* file() const noexcept { return file_.get(); }  // null: all chunks stay in memory
  void flush();                                                   // writes all changed chunks

 private:
  struct Window {
    i64 chunk = -1;
    std::optional<BlockFile::Ticket> under_way;  // being read or written
    bool coming = false;
    bool taken = false;
    bool changed = false;  // and not yet written
    i64 used = 0;          // time of last use, in the order of calls
  };
  char* memory(const Window& w) const noexcept;
  Window* holding(i64 chunk) noexcept;
  // A free window; null: all are in use, or busy and `wait` is not set.
  Window* room(bool wait);
  void settle(Window& w);  // waits for its transfer
  void bring(Window& w, i64 chunk);
  bool is_written(i64 chunk) const noexcept {
    return options_.places != nullptr ? options_.places->is_there(chunk) : written_[chunk];
  }
  i64 place(i64 chunk) const noexcept {
    return options_.places != nullptr ? options_.places->place(chunk) : layout_.chunks()[chunk].at - resident_bytes_;
  }
  void write_changed(i64 but);  // begins to write all changed chunks not in use, except `but`

  const ChunkLayout& layout_;
  const Options options_;
  const i64 resident_bytes_;
  Buffer resident_, memory_;
  char* base_ = nullptr;  // of the windows, at a page
  std::vector<Window> windows_;
  std::vector<bool> written_;  // by chunk: is it in the file? else it is zeros
  std::vector<u64> checksums_;
  i64 uses_ = 0;
  std::unique_ptr<BlockFile> file_;  // destroyed before the memory of its requests
};

}  // namespace ds::offload
