// SPDX-License-Identifier: Apache-2.0
#pragma once
// A read-only file driver for HDF5 with one open file. Through it the library opens no other path, whatever a file
// contains: no external links, views or locks.

#include <functional>

#include "formats/hdf5_library.h"

namespace ds::hdf5 {

// The bytes of a file. read() fills all of `out` or throws.
struct Bytes {
  std::string path;  // for messages
  i64 size;
  std::function<void(i64 offset, void* out, i64 bytes)> read;
};

// An HDF5 file in `bytes`. Not movable: the library points to it.
class ReadOnlyFile {
 public:
  ReadOnlyFile(const Context& c, Bytes bytes);  // throws the library's error as reported by `c`
  ReadOnlyFile(const ReadOnlyFile&) = delete;
  ReadOnlyFile& operator=(const ReadOnlyFile&) = delete;
  hid_t id() const noexcept { return file_; }

  struct State {
    Bytes bytes;
    bool open = false;
  };

 private:
  State state_;
  Id driver_, file_;
};

}  // namespace ds::hdf5
