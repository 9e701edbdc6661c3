// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by writing and reading HDF5: the lock of the library, identifiers that close themselves, errors that name the
// file, element types.

#include <hdf5.h>

#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace ds::hdf5 {

// To be held during every call of the library, which may be built without locks, since a checkpoint may be written
// while other threads read.
std::mutex& library() noexcept;

using Closer = herr_t (*)(hid_t);

// An HDF5 identifier that closes itself. An open one keeps its file open, so none may leak.
class Id {
 public:
  Id(hid_t id, Closer closer) noexcept : id_(id), close_(closer) {}
  Id(Id&& o) noexcept : id_(std::exchange(o.id_, -1)), close_(o.close_) {}
  Id& operator=(Id&& o) noexcept {
    std::swap(id_, o.id_);
    std::swap(close_, o.close_);
    return *this;
  }
  ~Id() {
    if (id_ >= 0) close_(id_);
  }
  operator hid_t() const noexcept { return id_; }  // NOLINT: used as the library's own type
  // Closes now; for files, which are written by closing.
  bool close() noexcept { return close_(std::exchange(id_, -1)) >= 0; }

 private:
  hid_t id_;
  Closer close_;
};

// The library prints its error stack by itself unless told not to, per thread.
class Quiet {
 public:
  Quiet();
  ~Quiet() { H5Eset_auto2(H5E_DEFAULT, function_, data_); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

// One file being written or read: holds the lock of the library, and turns its results into errors that name the file.
struct Context {
  const std::string& path;
  Errc code;                                     // the code of an error of the library
  std::unique_lock<std::mutex> lock{library()};  // {}: the caller holds it
  Quiet quiet{};

  // Throws, with the innermost message of the library's error stack.
  [[noreturn]] void fail(std::string_view what) const;
  Id id(hid_t id, Closer close, std::string_view what) const {
    if (id < 0) fail(what);
    return {id, close};
  }
  void ok(herr_t result, std::string_view what) const {
    if (result < 0) fail(what);
  }
};

// HDF5's type for a DType: little-endian in the file.
Id file_type(const Context& c, DType t);

}  // namespace ds::hdf5
