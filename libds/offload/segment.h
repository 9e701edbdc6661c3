// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory shared by processes of one user: a file of a memory file system, mapped as a whole, with a name, so that it
// outlives its maker. The maker locks it (flock) before it has a name, and the system releases the lock however the
// maker ends: a segment that is not locked belongs to no living process.

#include <string>

#include "offload/host_place.h"

namespace ds::offload {

class Segment {
 public:
  Segment() = default;
  // Makes the file, of zeros, which only its owner may open, and reserves its space. Throws Errc::Unavailable if the
  // file system has no space; Errc::Io.
  static Segment create(const std::string& path, i64 bytes);
  // Opens an existing file. Throws Errc::Io (it does not exist, belongs to another user, or others can open it),
  // Errc::Corrupt (it has another size).
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
  void remove() noexcept;  // removes the file's name

 private:
  Segment(int fd, const std::string& path, i64 bytes);
  std::string path_;
  char* data_ = nullptr;
  i64 bytes_ = 0;
  int lock_ = -1;  // of the maker
};

// The memory of a segment; null, in a prediction: the same amount from the place.
Buffer segment_buffer(const Segment* segment, const HostPlace& place, MemoryLedger& ledger, Tag tag, i64 bytes);

}  // namespace ds::offload
