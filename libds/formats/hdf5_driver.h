// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file driver for HDF5 that knows one file, already open, and only reads. Through it the library opens no path,
// whatever a file says: not those of external links, of views, of locks.

#include <functional>

#include "formats/hdf5_library.h"

namespace ds::hdf5 {

// The bytes of a file. read() fills all of `out` or throws.
struct Bytes {
  std::string path;  // for messages
  i64 size;
  std::function<void(i64 offset, void* out, i64 bytes)> read;
};

// An HDF5 file that stands in `bytes`. Not movable: the library points to it.
class ReadOnlyFile {
 public:
  ReadOnlyFile(const Context& c, Bytes bytes);  // throws what `c` makes of the library's refusal
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
