// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small file in /dev/shm (shared_file.h) that one process writes while it lives and others of the same user read. A
// rank publishes its counters in one; arena.h is for data that ranks exchange.

#include <boost/interprocess/mapped_region.hpp>
#include <optional>
#include <string>

#include "comm/shared_file.h"

namespace ds {

class SharedRecord {
 public:
  // Creates it with this content and mode 0600; the name disappears with the object. Takes all its memory now. Throws
  // Errc::Io with the system's words: the name is taken, /dev/shm is full or cannot be written.
  SharedRecord(const std::string& name, const void* content, i64 bytes);
  // Opens another process's record for reading; it stays readable after that process ends. Empty: it does not exist.
  // Throws Errc::Io for a file of another user or with access for others, Errc::Mismatch for one of another size.
  static std::optional<SharedRecord> open(const std::string& name, i64 bytes);

  void* data() const noexcept { return region_.get_address(); }

 private:
  explicit SharedRecord(SharedFile file) : file_(std::move(file)) {}
  void map(bool writable, i64 bytes);
  SharedFile file_;
  boost::interprocess::mapped_region region_;
};

// The first `bytes` bytes of a record; fewer if it is shorter, none if it is gone or must not be read.
std::string read_shared(const std::string& name, i64 bytes);

}  // namespace ds
