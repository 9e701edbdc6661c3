// SPDX-License-Identifier: Apache-2.0
#pragma once
// The states of one run at one layout, as a server keeps them: files in a directory of their own.
//
//   NAME/lock               locked by the server, as long as it lives
//   NAME/current            names the generation that is whole
//   NAME/GENERATION/table   which chunk is in which slot, and the record of the last whole step (slots.h)
//                   layout  how each rank's states are cut in chunks; who has what
//                   run     what the run is: meta and parameters as checkpoints know them, pieces that each rank saves
//                   states  a link to the slots, which are beside it, or on the disk of --path
//                   pending a step that is decided, but perhaps not done; goes when it is
//   NAME/step-ID             a step for a run of another layout; with --path, a link to one on the disk
//
// A generation that is not current is of no use, and goes when a server starts or has another.
//
// The directory of --path may be shared: by users, and by containers and hosts that each have a /dev/shm of their own.
// A file there is called ds-offload.NAME.ID.HOST. The links above are the only proof of whose it is: a server removes
// what a link in its own directory names, by an ID that nobody else has drawn, and nothing else.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "serve/slots.h"

namespace ds::serve {

inline constexpr i64 kMostText = i64{1} << 30;  // bytes of layout, run, pending
// Small files, with the checksum of their text behind it; one replaces another in one step. Throws Errc::Corrupt.
void write_sealed(const std::string& path, std::string text);
std::string read_sealed(const std::string& path);
// What `read` says of a text, with the file's name.
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

// The lock of a server's directory, as long as it lives; nothing where another process has it, or the directory is
// gone. Throws Errc::Io, also where the lock is not a regular file.
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

// A rank's states and how they are cut.
struct RankLayout {
  std::string identity{};  // of the layout
  std::vector<offload::ServedSet> sets{};
  // Without what another start of the run has otherwise: paths of segments.
  std::string text() const;
  static RankLayout parse(std::string_view text);
  // Throws Errc::Corrupt where a part lies outside of what it is in.
  void check() const;
};

// What ds-offload dump needs to know of a run.
struct RunTexts {
  std::string meta{}, params{};
  std::vector<std::string> pieces{};  // by rank
};

class Generation {
 public:
  struct Options {
    std::string path{};  // directory of a disk; empty: slots are in memory
    std::string name{};  // of the server, for the file there
    i64 capacity = 0;    // bytes of slots; 0: what the file system has
    i64 windows = 4;     // of a file
    offload::IoOptions io{};
    ThreadPool* pool = nullptr;  // that copies in memory; outlives it
    bool serves = false;         // has a file on a disk for itself
    bool checksums = false;      // of a new one's chunks
  };
  // A new one, in the server's directory; `taken`: bytes of the capacity that another has. Throws Errc::Unavailable:
  // there is no room for it.
  Generation(const std::string& directory, std::vector<RankLayout> ranks, bool two_versions, i64 taken,
             const Options& options);
  // One that is there.
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
  // The number of a rank's chunk among all.
  i64 chunk(i64 rank, i64 set, i64 chunk) const noexcept {
    return first_[static_cast<size_t>(rank)][static_cast<size_t>(set)] + chunk;
  }
  // All that has changed is where the table says.
  void flush();
  // For people: "in memory", "in a file (io_uring, direct)".
  std::string where() const;

  // Removes its files; it cannot be used any more. If one cannot be removed, that is a warning.
  void remove() noexcept;
  // The same for any generation, also one that was never whole. Throws Errc::Io or Errc::Unavailable if the file on a
  // disk cannot be removed, is another user's, or another process has it: then all of the generation stays.
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

// The current generation of a server's directory; empty: there is none.
std::string current_generation(const std::string& directory);
// Whether it is the name of a generation: 16 hexadecimal digits.
bool is_generation_id(std::string_view name);

// The names that a server gives to files in the directory of --path: "ds-offload.NAME.ID.HOST", with "step-" before the
// ID of a step.
std::string disk_name(const std::string& server, const std::string& id);
// The parts of such a name; nothing if it is not one of `server`. host: empty for a file of earlier versions.
struct DiskName {
  std::string id, host;
};
std::optional<DiskName> parse_disk_name(std::string_view file, const std::string& server);
// Removes the file, or the directory of a step, that `link` names, in a directory that may be shared. Leaves it if its
// name has another ID. Throws as Generation::remove().
void remove_from_disk(const std::string& link, const std::string& id);

}  // namespace ds::serve
