// SPDX-License-Identifier: Apache-2.0
// The functions below are called by the library, in C: no exception may leave them.

#include "formats/hdf5_driver.h"

#include <iterator>
#include <limits>
#include <new>

namespace ds::hdf5 {
namespace {

// The driver's entry in the property list of a file to open.
struct Access {
  ReadOnlyFile::State* state;
};

struct OpenFile {
  H5FD_t base;  // first: the library's part
  ReadOnlyFile::State* state;
  haddr_t end;  // of what the library thinks that the file holds
};

OpenFile& self(H5FD_t* f) noexcept { return *reinterpret_cast<OpenFile*>(f); }
const OpenFile& self(const H5FD_t* f) noexcept { return *reinterpret_cast<const OpenFile*>(f); }

H5FD_t* open_file(const char*, unsigned flags, hid_t list, haddr_t) noexcept {
  const auto* access = static_cast<const Access*>(H5Pget_driver_info(list));
  // A second file, which the first one names, comes here with the same properties.
  if (access == nullptr || access->state->open || (flags & H5F_ACC_RDWR) != 0) return nullptr;
  auto* f = new (std::nothrow) OpenFile{{}, access->state, 0};
  if (f == nullptr) return nullptr;
  access->state->open = true;
  return &f->base;
}

herr_t close_file(H5FD_t* f) noexcept {
  self(f).state->open = false;
  delete &self(f);
  return 0;
}

// Small reads of metadata go through a buffer of the library.
herr_t query(const H5FD_t*, unsigned long* flags) noexcept {
  *flags = H5FD_FEAT_ACCUMULATE_METADATA_READ;
  return 0;
}

haddr_t get_end(const H5FD_t* f, H5FD_mem_t) noexcept { return self(f).end; }
herr_t set_end(H5FD_t* f, H5FD_mem_t, haddr_t end) noexcept {
  self(f).end = end;
  return 0;
}
haddr_t get_size(const H5FD_t* f, H5FD_mem_t) noexcept { return static_cast<haddr_t>(self(f).state->bytes.size); }

herr_t read(H5FD_t* f, H5FD_mem_t, hid_t, haddr_t at, size_t size, void* out) noexcept {
  const Bytes& bytes = self(f).state->bytes;
  const auto all = static_cast<u64>(bytes.size);
  if (at > all || size > all - at) return -1;
  try {
    bytes.read(static_cast<i64>(at), out, static_cast<i64>(size));
    return 0;
  } catch (...) {
    return -1;
  }
}

herr_t write(H5FD_t*, H5FD_mem_t, hid_t, haddr_t, size_t, const void*) noexcept { return -1; }

constexpr H5FD_class_t make_class() noexcept {
  H5FD_class_t c{};
  c.name = "bytes";
  c.maxaddr = static_cast<haddr_t>(std::numeric_limits<i64>::max());
  c.fc_degree = H5F_CLOSE_STRONG;
  c.fapl_size = sizeof(Access);
  c.open = open_file;
  c.close = close_file;
  c.query = query;
  c.get_eoa = get_end;
  c.set_eoa = set_end;
  c.get_eof = get_size;
  c.read = read;
  c.write = write;
  const H5FD_mem_t map[] = H5FD_FLMAP_DICHOTOMY;
  for (size_t i = 0; i < std::size(map); ++i) c.fl_map[i] = map[i];
  return c;
}

}  // namespace

ReadOnlyFile::ReadOnlyFile(const Context& c, Bytes bytes)
    : state_{std::move(bytes)}, driver_(-1, H5FDunregister), file_(-1, H5Fclose) {
  static constexpr H5FD_class_t kClass = make_class();
  driver_ = c.id(H5FDregister(&kClass), H5FDunregister, "take a driver");
  const Id list = c.id(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list");
  const Access access{&state_};
  c.ok(H5Pset_driver(list, driver_, &access), "choose the driver");
  file_ = c.id(H5Fopen(state_.bytes.path.c_str(), H5F_ACC_RDONLY, list), H5Fclose, "open the file");
}

}  // namespace ds::hdf5
