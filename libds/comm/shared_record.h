// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small file of /dev/shm (shared_file.h), which one process writes while it lives and others of the same user read:
// what a rank shows of itself, beside what ranks exchange (arena.h).

#include <boost/interprocess/mapped_region.hpp>
#include <optional>
#include <string>

#include "comm/shared_file.h"

namespace ds {

class SharedRecord {
 public:
  // Makes it with this content, 0600; the name goes with the object. All its memory is taken now. Throws Errc::Io with
  // the system's words: the name is taken, /dev/shm is full or cannot be written.
  SharedRecord(const std::string& name, const void* content, i64 bytes);
  // Another process's, to be read; it stays readable when its maker is gone. Nothing: there is none of this name.
  // Throws Errc::Io for what is not ours or open to others, Errc::Mismatch for one of another size.
  static std::optional<SharedRecord> open(const std::string& name, i64 bytes);

  void* data() const noexcept { return region_.get_address(); }

 private:
  explicit SharedRecord(SharedFile file) : file_(std::move(file)) {}
  void map(bool writable, i64 bytes);
  SharedFile file_;
  boost::interprocess::mapped_region region_;
};

// The first bytes of one. Less than `bytes` where it is shorter, nothing where it is gone or not ours to read.
std::string read_shared(const std::string& name, i64 bytes);

}  // namespace ds
