// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5_library.h"

#include <sys/mman.h>

#include <new>

namespace ds::hdf5 {
namespace {

// The innermost message of the library's error stack.
std::string last_reason() {
  std::string reason;
  const auto visit = [](unsigned n, const H5E_error2_t* e, void* out) -> herr_t {
    if (n == 0 && e->desc != nullptr) *static_cast<std::string*>(out) = e->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, visit, &reason);
  // "file write failed: time = ..., errno = 28, error message = 'No space left on device', buf = ...": the middle.
  constexpr std::string_view kSystem = "error message = '";
  if (const size_t at = reason.find(kSystem); at != std::string::npos) {
    reason = reason.substr(at + kSystem.size());
    reason = reason.substr(0, reason.find('\''));
  }
  reason = reason.substr(0, reason.find('\n'));
  return reason.empty() ? "no reason given" : reason;
}

// A float that HDF5 has no name for, described field by field, so that h5dump and h5py show right values.
Id small_float(const Context& c, size_t bits, size_t exponent, size_t bias) {
  const size_t mantissa = bits - 1 - exponent;
  Id type = c.id(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, "make a type");
  c.ok(H5Tset_fields(type, bits - 1, mantissa, exponent, 0, mantissa), "describe a small float");
  c.ok(H5Tset_precision(type, bits), "describe a small float");
  c.ok(H5Tset_offset(type, 0), "describe a small float");
  c.ok(H5Tset_size(type, bits / 8), "describe a small float");  // after the fields: they must fit when it shrinks
  c.ok(H5Tset_ebias(type, bias), "describe a small float");
  return type;
}

// As h5py stores truth values.
Id bool_type(const Context& c) {
  Id type = c.id(H5Tenum_create(H5T_STD_I8LE), H5Tclose, "make a type");
  const signed char values[] = {0, 1};
  c.ok(H5Tenum_insert(type, "FALSE", &values[0]), "make a type");
  c.ok(H5Tenum_insert(type, "TRUE", &values[1]), "make a type");
  return type;
}

// The library takes for granted that malloc gives what it asks for. So that it meets the end of an address space, or of
// data (both limits count this mapping), less often than the rest of the program does, there must be room for far more
// than it takes for a file.
void check_memory() {
  constexpr size_t kRoom = 8 << 20;
  void* const room = ::mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw std::bad_alloc();
  ::munmap(room, kRoom);
}

}  // namespace

std::mutex& library() noexcept {
  static std::mutex mutex;
  return mutex;
}

Quiet::Quiet() {
  check_memory();
  // After a damaged file the library cannot close itself at exit, and says so at length; everything here is closed by
  // its owner.
  [[maybe_unused]] static const herr_t once = H5dont_atexit();
  H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

void Context::fail(std::string_view what) const {
  throw Error(code, fmt::format("{}: HDF5 cannot {}: {}", path, what, last_reason()));
}

Id file_type(const Context& c, DType t) {
  const auto plain = [&](hid_t type) { return c.id(H5Tcopy(type), H5Tclose, "make a type"); };
  switch (t) {
    case DType::F32: return plain(H5T_IEEE_F32LE);
    case DType::F64: return plain(H5T_IEEE_F64LE);
    case DType::I8: return plain(H5T_STD_I8LE);
    case DType::I16: return plain(H5T_STD_I16LE);
    case DType::I32: return plain(H5T_STD_I32LE);
    case DType::I64: return plain(H5T_STD_I64LE);
    case DType::U8: return plain(H5T_STD_U8LE);
    case DType::U16: return plain(H5T_STD_U16LE);
    case DType::U32: return plain(H5T_STD_U32LE);
    case DType::U64: return plain(H5T_STD_U64LE);
    case DType::Bool: return bool_type(c);
    case DType::BF16: return small_float(c, 16, 8, 127);
    case DType::F16: return small_float(c, 16, 5, 15);
    case DType::F8E4M3: return small_float(c, 8, 4, 7);
    case DType::F8E5M2: return small_float(c, 8, 5, 15);
  }
  DS_ASSERT(false);
}

}  // namespace ds::hdf5
