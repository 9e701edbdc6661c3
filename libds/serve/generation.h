// SPDX-License-Identifier: Apache-2.0
#pragma once
// The states of one run at one layout in a server: files in a directory.
//
//   NAME/lock               locked by the server while it runs
//   NAME/current            names the complete generation
//   NAME/GENERATION/table   which chunk is in which slot, and the record of the last complete step (slots.h)
//                   layout  how the states of each rank are cut into chunks
//                   run     identity of the run: meta and parameters as in checkpoints, and the pieces that each rank
//                   saves states  a link to the slots, in the same directory or on the disk of --path pending a step
//                   that is committed, but perhaps not completed; then removed
//   NAME/step-ID             a step for a run of another layout; with --path, a link to one on the disk
//
// A generation that is not current is useless; it is removed when a server starts or has a new one.
//
// The directory of --path may be shared by users, and by containers and hosts that each have their own /dev/shm. A file
// there is called ds-offload.NAME.ID.HOST. Only the links above prove whose it is: a server removes files that a link
// in its own directory names, with an ID that no other server has drawn, and nothing else.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "serve/slots.h"

namespace ds::serve {

inline constexpr i64 kMostText = i64{1} << 30;  // bytes of layout, run, pending
// Small files, which end with the checksum of their text; replaced atomically. Throws Errc::Corrupt.
void write_sealed(const std::string& path, std::string text);
std::string read_sealed(const std::string& path);
// Reads a small file and calls read(Unpacker of its text); adds the file's name to errors.
template <class Read>
void parse_file(const std::string& path, Read&& read) {
  const std::string text = read_sealed(path);
  try {
    offload::Unpacker in(text);
    read(in);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", path, e.what()));
  }
}

// The lock of a server's directory, held while the object exists; nothing if another process holds it, or the directory
// does not exist. Throws Errc::Io, also if the lock is not a regular file.
class DirectoryLock {
 public:
  static std::optional<DirectoryLock> take(const std::string& directory);
  DirectoryLock(DirectoryLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  DirectoryLock& operator=(DirectoryLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~DirectoryLock();

 private:
  explicit DirectoryLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// The states of a rank and how they are cut.
struct RankLayout {
  std::string identity{};  // of the layout
  std::vector<offload::ServedSet> sets{};
  // Without the parts that differ in another start of the run: paths of segments.
  std::string text() const;
  static RankLayout parse(std::string_view text);
  // Throws Errc::Corrupt if a part is outside its chunk or segment.
  void check() const;
};

// The description of a run, for ds-offload dump.
struct RunTexts {
  std::string meta{}, params{};
  std::vector<std::string> pieces{};  // by rank
};

class Generation {
 public:
  struct Options {
    std::string path{};  // directory of a disk; empty: slots are in memory
    std::string name{};  // of the server, for the name of the file there
    i64 capacity = 0;    // bytes of slots; 0: what the file system has
    i64 windows = 4;     // of a file
    offload::IoOptions io{};
    ThreadPool* pool = nullptr;  // copies chunks in memory; outlives it
    bool serves = false;         // locks its file on a disk
    bool checksums = false;      // for a new generation
  };
  // Makes a new one in the server's directory; `taken`: bytes of the capacity that another generation uses. Throws
  // Errc::Unavailable if there is no room for it.
  Generation(const std::string& directory, std::vector<RankLayout> ranks, bool two_versions, i64 taken,
             const Options& options);
  // Opens an existing one.
  Generation(const std::string& directory, const std::string& id, const Options& options);
  Generation(const Generation&) = delete;
  ~Generation();

  const std::string& id() const noexcept { return id_; }
  std::string file(std::string_view name) const { return fmt::format("{}/{}/{}", directory_, id_, name); }
  const std::vector<RankLayout>& ranks() const noexcept { return ranks_; }
  TableHeader& header() const noexcept { return slots_->header(); }
  Slots& slots() noexcept { return *slots_; }
  offload::ChunkMemory& memory() noexcept { return *memory_; }
  i64 bytes() const noexcept { return header().slots * header().slot_bytes; }
  // The number of a rank's chunk among all chunks.
  i64 chunk(i64 rank, i64 set, i64 chunk) const noexcept {
    return first_[static_cast<size_t>(rank)][static_cast<size_t>(set)] + chunk;
  }
  // Writes all changed chunks to where the table says.
  void flush();
  // For messages: "in memory", "in a file (io_uring, direct)".
  std::string where() const;

  // Removes its files; the object cannot be used afterwards. A file that cannot be removed gives a warning.
  void remove() noexcept;
  // The same for any generation, also one that was never complete. Throws Errc::Io or Errc::Unavailable if the file on
  // a disk cannot be removed, belongs to another user, or is locked by another process: then all of the generation
  // stays.
  static void remove(const std::string& directory, const std::string& id);

 private:
  void number_chunks();
  void open_memory(bool is_new);

  const std::string directory_, id_;
  const Options options_;
  std::string states_;  // the file of slots
  std::vector<RankLayout> ranks_;
  std::vector<i64> chunk_bytes_;
  std::vector<std::vector<i64>> first_;
  std::unique_ptr<Slots> slots_;
  offload::Segment segment_;
  MemoryLedger ledger_;
  std::unique_ptr<Device> host_;  // of windows
  std::unique_ptr<offload::ChunkLayout> layout_;
  std::unique_ptr<offload::ChunkMemory> memory_;
  offload::FileChunks* file_ = nullptr;
  std::optional<File> locked_;  // the file on a disk
};

// The name of the current generation in a server's directory; empty: there is none.
std::string current_generation(const std::string& directory);
// Whether this is the name of a generation: 16 hexadecimal digits.
bool is_generation_id(std::string_view name);

// Names of files in the directory of --path: "ds-offload.NAME.ID.HOST", with "step-" before the ID of a step.
std::string disk_name(const std::string& server, const std::string& id);
// The parts of such a name; nothing if it does not belong to `server`. host: empty for a file of an earlier version.
struct DiskName {
  std::string id, host;
};
std::optional<DiskName> parse_disk_name(std::string_view file, const std::string& server);
// Removes the file, or the directory of a step, that `link` names, in a directory that may be shared. Leaves it if its
// name has another ID. Throws like Generation::remove().
void remove_from_disk(const std::string& link, const std::string& id);

}  // namespace ds::serve
