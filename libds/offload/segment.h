// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that processes of one user share: a file of a memory file system, mapped as a whole, with a name, so that it
// outlives who made it. Its maker has it locked (flock) before it has a name, and the system takes the lock back
// however the maker ends: one that nobody has locked belongs to no living process.

#include <string>

#include "offload/host_place.h"

namespace ds::offload {

class Segment {
 public:
  Segment() = default;
  // Makes the file, of zeros, for its owner alone, and takes its space. Throws Errc::Unavailable where the file system
  // has none; Errc::Io.
  static Segment create(const std::string& path, i64 bytes);
  // One that is there. Throws Errc::Io (there is none, it is another user's or open to others), Errc::Corrupt (of
  // another size).
  static Segment open(const std::string& path, i64 bytes);
  Segment(Segment&& other) noexcept { *this = std::move(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();  // the file stays
  // Removes a file whose maker has ended.
  static void remove_abandoned(const std::string& path) noexcept;

  const std::string& path() const noexcept { return path_; }
  char* data() const noexcept { return data_; }
  i64 bytes() const noexcept { return bytes_; }
  bool contains(const void* p) const noexcept { return p >= data_ && p < data_ + bytes_; }
  void remove() noexcept;  // the file's name

 private:
  Segment(int fd, const std::string& path, i64 bytes);
  std::string path_;
  char* data_ = nullptr;
  i64 bytes_ = 0;
  int lock_ = -1;  // of who made it
};

// Its memory; null, in a prediction: as much of the place's.
Buffer segment_buffer(const Segment* segment, const HostPlace& place, MemoryLedger& ledger, Tag tag, i64 bytes);

}  // namespace ds::offload
