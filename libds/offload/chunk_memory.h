// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where chunks of states are: in host memory, or in a file, of which some chunks are in memory at a time. Nobody keeps
// an address of a chunk that it has given back.

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
  // Whether a chunk's bytes are in memory of the device that trains, where that is not the host's.
  virtual bool on_device(i64 chunk) const noexcept { return static_cast<void>(chunk), false; }
  // A chunk's bytes, until it is given back; one at a time. Zeros at first. change: they will be changed.
  virtual char* take(i64 chunk, bool change) = 0;
  virtual void give_back(i64 chunk, bool changed) = 0;
  // A chunk will be taken soon: it begins to come, where there is room.
  virtual void expect(i64 chunk) = 0;
  // How many chunks it is of use to expect.
  virtual i64 most_expected() const noexcept = 0;
};

// All of them in memory of the host, but for the first ones, which are in that of the device.
class HostChunks final : public ChunkMemory {
 public:
  // tag: of what is in memory of the host.
  HostChunks(const ChunkLayout& layout, i64 on_device, Device& device, const HostPlace& host, MemoryLedger& ledger,
             Tag tag);
  bool on_device(i64 chunk) const noexcept override { return chunk < on_device_; }
  char* take(i64 chunk, bool) override {
    const i64 at = layout_.chunks()[chunk].at, first = first_.bytes();
    return at < first ? first_.as<char>().data() + at : memory_.as<char>().data() + (at - first);
  }
  void give_back(i64, bool) override {}
  void expect(i64) override {}
  i64 most_expected() const noexcept override { return 0; }

 private:
  const ChunkLayout& layout_;
  const i64 on_device_;
  Buffer first_, memory_;
};

// Where chunks are in a file that outlives who works with it: a chunk that has changed goes to another place than the
// one that it came from, and is there from the moment on that all of it is written.
class ChunkPlaces {
 public:
  virtual ~ChunkPlaces() = default;
  virtual bool is_there(i64 chunk) const noexcept = 0;  // else it is zeros
  virtual i64 place(i64 chunk) const noexcept = 0;
  virtual i64 next_place(i64 chunk) = 0;
  virtual void written(i64 chunk) noexcept = 0;
  // Where checksums are kept: of what goes to next_place(); and what has come from place() is held to its own. check()
  // throws Errc::Corrupt, naming `file`.
  virtual bool has_checksums() const noexcept { return false; }
  virtual void set_next_checksum(i64 chunk, u64 sum) noexcept { static_cast<void>(chunk), static_cast<void>(sum); }
  virtual void check(i64 chunk, const char* data, i64 bytes, const std::string& file) const {
    static_cast<void>(chunk), static_cast<void>(data), static_cast<void>(bytes), static_cast<void>(file);
  }
};

// In a file, and `windows` of them in memory: one that is worked with, others that come and go meanwhile. A chunk that
// is in a window still does not come again, and goes when another is asked for.
class FileChunks final : public ChunkMemory {
 public:
  struct Options {
    std::string dir;  // empty: a prediction, in which memory and requests are counted, and nobody looks at them
    IoOptions io;
    Tag tag = Tag::Offload;  // of windows
    i64 windows = 4;         // 1 or more
    i64 resident = 0;        // of the first chunks, which have memory of their own and are never in the file
    bool read_ahead = true;
    bool write_behind = true;  // else a chunk is in the file when it is given back
    bool checksums = false;    // a chunk that comes is held to what went
    // A file that has a name, and the places in it; null: one that is made, in the directory, and has none.
    const std::string* file = nullptr;
    bool file_is_new = false;
    ChunkPlaces* places = nullptr;
    i64 file_bytes = 0;
  };
  // What it takes of memory for chunks that stay, and for windows; and of the disk.
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
  void flush();                                                   // what has changed is in the file

 private:
  struct Window {
    i64 chunk = -1;
    std::optional<BlockFile::Ticket> under_way;  // it comes, or goes
    bool coming = false;
    bool taken = false;
    bool changed = false;  // and not in the file yet
    i64 used = 0;          // when, in the order of calls
  };
  char* memory(const Window& w) const noexcept;
  Window* holding(i64 chunk) noexcept;
  // A window that nobody needs; null: all are taken, or busy and `wait` is not set.
  Window* room(bool wait);
  void settle(Window& w);  // waits for what is under way
  void bring(Window& w, i64 chunk);
  bool is_written(i64 chunk) const noexcept {
    return options_.places != nullptr ? options_.places->is_there(chunk) : written_[chunk];
  }
  i64 place(i64 chunk) const noexcept {
    return options_.places != nullptr ? options_.places->place(chunk) : layout_.chunks()[chunk].at - resident_bytes_;
  }
  void write_changed(i64 but);  // what has changed and is not taken begins to go, but for one chunk

  const ChunkLayout& layout_;
  const Options options_;
  const i64 resident_bytes_;
  Buffer resident_, memory_;
  char* base_ = nullptr;  // of the windows, at a page
  std::vector<Window> windows_;
  std::vector<bool> written_;  // by chunk: the file has it; else it is zeros
  std::vector<u64> checksums_;
  i64 uses_ = 0;
  std::unique_ptr<BlockFile> file_;  // after the memory that its requests have
};

}  // namespace ds::offload
