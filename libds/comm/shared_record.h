// SPDX-License-Identifier: Apache-2.0
#pragma once
// A small piece of /dev/shm under a name of its own, which one process writes while it lives and others of the same
// user read: what a rank shows of itself, beside what ranks exchange (arena.h).

#include <boost/interprocess/mapped_region.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace ds {

class SharedRecord {
 public:
  // Makes it with this content, 0600; the name goes with the object. All its memory is taken now. Throws Errc::Io with
  // the system's words: the name is taken, /dev/shm is full or cannot be written.
  SharedRecord(const std::string& name, const void* content, i64 bytes);
  // Another process's, to be read; it stays readable when its maker is gone. Nothing: there is none of this name, or
  // its maker has not filled it yet. Throws Errc::Io for what is not ours or open to others, Errc::Mismatch for one of
  // another size.
  static std::optional<SharedRecord> open(const std::string& name, i64 bytes);

  SharedRecord(SharedRecord&& other) noexcept { *this = std::move(other); }
  SharedRecord& operator=(SharedRecord&& other) noexcept;
  ~SharedRecord();

  void* data() const noexcept { return region_.get_address(); }

 private:
  SharedRecord() = default;
  boost::interprocess::mapped_region region_;
  std::string name_;  // to be removed; empty: another process's
};

// The names of this user's regular files in /dev/shm that begin so, sorted.
std::vector<std::string> shared_names(std::string_view prefix);

// The first bytes of one. Less than `bytes` where it is shorter, nothing where it is gone or not ours to read.
std::string read_shared(const std::string& name, i64 bytes);
// Seconds since its last change; nothing where it is gone.
std::optional<i64> shared_age(const std::string& name);
// Returns whether it was there.
bool remove_shared(const std::string& name) noexcept;

}  // namespace ds
