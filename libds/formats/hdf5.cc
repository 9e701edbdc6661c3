// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5.h"

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

namespace ds {
namespace {

constexpr int kMaxDepth = 32;             // groups within groups
constexpr size_t kMaxDatasets = 1 << 22;  // in a file that is read

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
  // Closes now; for files, where closing is what writes.
  bool close() noexcept { return close_(std::exchange(id_, -1)) >= 0; }

 private:
  hid_t id_;
  Closer close_;
};

// The library prints its error stack by itself unless told not to, per thread.
class Quiet {
 public:
  Quiet() {
    // After a damaged file the library cannot close itself at exit, and says so at length; everything here is closed by
    // its owner.
    [[maybe_unused]] static const herr_t once = H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Quiet() { H5Eset_auto2(H5E_DEFAULT, function_, data_); }

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

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

// The library may be built without locks of its own, and a checkpoint may be written beside whatever else reads.
std::mutex& library() {
  static std::mutex mutex;
  return mutex;
}

// One file being written or read: has the library for itself, and wraps its results into errors that name the file.
struct Context {
  const std::string& path;
  Errc code;  // what a refusal means here
  std::unique_lock<std::mutex> lock{library()};
  Quiet quiet = {};

  [[noreturn]] void fail(std::string_view what) const {
    throw Error(code, fmt::format("{}: HDF5 cannot {}: {}", path, what, last_reason()));
  }
  Id id(hid_t id, Closer close, std::string_view what) const {
    if (id < 0) fail(what);
    return {id, close};
  }
  void ok(herr_t result, std::string_view what) const {
    if (result < 0) fail(what);
  }
};

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

// HDF5's type for a DType: little-endian in the file.
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

Id make_space(const Context& c, const std::vector<i64>& shape) {
  if (shape.empty()) return c.id(H5Screate(H5S_SCALAR), H5Sclose, "make a dataspace");
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  return c.id(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose, "make a dataspace");
}

void write_attribute(const Context& c, hid_t object, const std::string& name, i64 value) {
  const Id space = c.id(H5Screate(H5S_SCALAR), H5Sclose, "make a dataspace");
  const Id a = c.id(H5Acreate2(object, name.c_str(), H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                    "create attribute " + name);
  c.ok(H5Awrite(a, H5T_NATIVE_INT64, &value), "write attribute " + name);
}

void write_attribute(const Context& c, hid_t object, const std::string& name, const std::string& value) {
  const Id space = c.id(H5Screate(H5S_SCALAR), H5Sclose, "make a dataspace");
  const Id type = c.id(H5Tcopy(H5T_C_S1), H5Tclose, "make a type");
  c.ok(H5Tset_size(type, std::max<size_t>(value.size(), 1)), "make a type");
  c.ok(H5Tset_strpad(type, H5T_STR_NULLPAD), "make a type");
  c.ok(H5Tset_cset(type, H5T_CSET_UTF8), "make a type");
  const Id a = c.id(H5Acreate2(object, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                    "create attribute " + name);
  c.ok(H5Awrite(a, type, value.empty() ? "\0" : value.c_str()), "write attribute " + name);
}

// A new file in the format of HDF5 1.10, whose metadata is checksummed and which is refused until it has been closed.
Id create_file(const Context& c, const std::string& opened_as) {
  const Id access = c.id(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list");
  c.ok(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "set the format version");
  c.ok(H5Pset_alignment(access, 65536, 4096), "set the alignment");  // large datasets begin on a page
  // The default driver asks for the real path behind a link, which a file without a name does not have.
  if (opened_as != c.path) c.ok(H5Pset_fapl_stdio(access), "choose the driver");
  const Id creation = c.id(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "make a property list");
  // Thousands of tensors in the root group: members in the order of creation, indexed.
  c.ok(H5Pset_link_creation_order(creation, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED), "set the link order");
  return c.id(H5Fcreate(opened_as.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose, "create the file");
}

Id link_properties(const Context& c) {
  Id links = c.id(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "make a property list");
  c.ok(H5Pset_create_intermediate_group(links, 1), "set link properties");
  c.ok(H5Pset_char_encoding(links, H5T_CSET_UTF8), "set link properties");
  return links;
}

bool same_type(const Context& c, hid_t type, DType t) { return H5Tequal(type, file_type(c, t)) > 0; }

std::string type_words(hid_t type) {
  constexpr const char* kClasses[] = {"integer",  "float",     "time", "string",          "bitfield", "opaque",
                                      "compound", "reference", "enum", "variable-length", "array"};
  const int k = H5Tget_class(type);
  return fmt::format("{} of {} bytes{}", k >= 0 && k < 11 ? kClasses[k] : "type", H5Tget_size(type),
                     H5Tget_order(type) == H5T_ORDER_BE ? ", big-endian" : "");
}

class Reader {
 public:
  Reader(const Context& c, i64 file_bytes) : c_(c), file_bytes_(file_bytes) {}

  void visit_group(hid_t group, const std::string& prefix, int depth) {
    DS_CHECK(depth <= kMaxDepth, Errc::Corrupt, "{}: groups are nested more than {} deep", c_.path, kMaxDepth);
    H5G_info_t info;
    c_.ok(H5Gget_info(group, &info), "read group /" + prefix);
    for (hsize_t i = 0; i < info.nlinks; ++i) visit_link(group, prefix, i, depth);
  }
  TensorTable table;

 private:
  void visit_link(hid_t group, const std::string& prefix, hsize_t i, int depth) {
    const auto get = [&](char* out, size_t n) {
      return H5Lget_name_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i, out, n, H5P_DEFAULT);
    };
    const ssize_t length = get(nullptr, 0);
    if (length <= 0 || length > 4096) c_.fail("read a link of group /" + prefix);
    std::string link(static_cast<size_t>(length), '\0');
    if (get(link.data(), link.size() + 1) != length) c_.fail("read a link of group /" + prefix);
    const std::string name = prefix + link;

    H5L_info_t info;
    c_.ok(H5Lget_info_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i, &info, H5P_DEFAULT), "read link /" + name);
    DS_CHECK(info.type != H5L_TYPE_EXTERNAL, Errc::Unavailable, "{}: /{} links to another file; this is not followed",
             c_.path, name);
    if (info.type != H5L_TYPE_HARD) return;  // a soft link is a second name of what is listed elsewhere
    const Id object = c_.id(H5Oopen(group, link.c_str(), H5P_DEFAULT), H5Oclose, "open /" + name);
    const H5I_type_t type = H5Iget_type(object);
    if (type != H5I_GROUP && type != H5I_DATASET) return;
    H5O_info_t identity;
    c_.ok(H5Oget_info(object, &identity), "read /" + name);
    DS_CHECK(visited_.insert(identity.addr).second, Errc::Corrupt, "{}: /{} is a second hard link to one object",
             c_.path, name);
    if (type == H5I_GROUP) {
      visit_group(object, name + "/", depth + 1);
    } else {
      visit_dataset(object, name);
    }
  }

  void visit_dataset(hid_t dataset, const std::string& name) {
    DS_CHECK(table.tensors.size() < kMaxDatasets, Errc::Corrupt, "{}: more than {} datasets", c_.path, kMaxDatasets);
    const Id type = c_.id(H5Dget_type(dataset), H5Tclose, "read the type of /" + name);
    constexpr DType kAll[] = {DType::F32, DType::BF16, DType::F16,  DType::F64,    DType::I32,
                              DType::I64, DType::U16,  DType::U8,   DType::I8,     DType::I16,
                              DType::U32, DType::U64,  DType::Bool, DType::F8E4M3, DType::F8E5M2};
    const auto dtype = std::find_if(std::begin(kAll), std::end(kAll), [&](DType t) { return same_type(c_, type, t); });
    if (dtype == std::end(kAll)) {
      table.foreign.push_back({name, type_words(type)});
      return;
    }
    const Id space = c_.id(H5Dget_space(dataset), H5Sclose, "read the shape of /" + name);
    const H5S_class_t kind = H5Sget_simple_extent_type(space);
    DS_CHECK(kind == H5S_SIMPLE || kind == H5S_SCALAR, Errc::Unavailable, "{}: /{} has no elements to read", c_.path,
             name);
    std::array<hsize_t, H5S_MAX_RANK> dims{};
    const int rank = H5Sget_simple_extent_dims(space, dims.data(), nullptr);
    if (rank < 0) c_.fail("read the shape of /" + name);
    TensorInfo info{name, *dtype, {}};
    for (int d = 0; d < rank; ++d) {
      const hsize_t n = dims[static_cast<size_t>(d)];
      DS_CHECK(std::in_range<i64>(n), Errc::Corrupt, "{}: /{}: dim {} is {}", c_.path, name, d, n);
      info.shape.push_back(static_cast<i64>(n));
    }
    const std::optional<i64> bytes = checked_product(info.shape, dtype_bytes(*dtype));
    DS_CHECK(bytes.has_value(), Errc::Corrupt, "{}: /{}: the product of its shape overflows", c_.path, name);
    table.offsets.push_back(*bytes == 0 ? 0 : data_offset(dataset, name, *bytes));
    table.tensors.push_back(std::move(info));
  }

  i64 data_offset(hid_t dataset, const std::string& name, i64 bytes) const {
    const Id creation = c_.id(H5Dget_create_plist(dataset), H5Pclose, "read the layout of /" + name);
    const H5D_layout_t layout = H5Pget_layout(creation);
    DS_CHECK(layout != H5D_VIRTUAL, Errc::Unavailable,
             "{}: /{} is a view of other files, whose damage it would hide; give the directory that holds them",
             c_.path, name);
    DS_CHECK(layout == H5D_CONTIGUOUS && H5Pget_external_count(creation) == 0, Errc::Unavailable,
             "{}: /{} is not stored contiguous; 'h5repack -f NONE -l CONTI' makes it so", c_.path, name);
    const haddr_t at = H5Dget_offset(dataset);
    DS_CHECK(at != HADDR_UNDEF, Errc::Unavailable, "{}: /{} was never written", c_.path, name);
    DS_CHECK(at <= static_cast<haddr_t>(file_bytes_) && bytes <= file_bytes_ - static_cast<i64>(at), Errc::Corrupt,
             "{}: /{} needs {} bytes at {}, the file has {}", c_.path, name, bytes, at, file_bytes_);
    return static_cast<i64>(at);
  }

  const Context& c_;
  i64 file_bytes_;
  std::set<haddr_t> visited_;
};

// Covers elements [begin, end) of the flattened dims [dim, rank) by boxes, in row-major order: a partial first row,
// whole rows, a partial last row. `box` holds the fixed coordinates of the dims before.
struct Box {
  std::vector<hsize_t> start, count;
};
void cover(const std::vector<i64>& shape, size_t dim, i64 begin, i64 end, Box box, std::vector<Box>& out) {
  if (begin == end) return;
  i64 row = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) row *= shape[d];
  const i64 first = begin / row, last = end / row;
  const auto partial = [&](i64 index, i64 from, i64 to) {
    Box inner = box;
    inner.start[dim] = static_cast<hsize_t>(index);
    inner.count[dim] = 1;
    cover(shape, dim + 1, from, to, std::move(inner), out);
  };
  if (begin % row != 0 && first == last) return partial(first, begin % row, end % row);
  if (begin % row != 0) partial(first, begin % row, row);
  const i64 whole = div_ceil(begin, row);
  if (whole < last) {
    Box rows = box;
    rows.start[dim] = static_cast<hsize_t>(whole);
    rows.count[dim] = static_cast<hsize_t>(last - whole);
    out.push_back(std::move(rows));
  }
  if (end % row != 0) partial(last, 0, end % row);
}

std::vector<i64> lay_out(const Context& c, Id file, const std::vector<Hdf5Dataset>& datasets,
                         const std::map<std::string, std::string>& attributes) {
  for (const auto& [name, value] : attributes) write_attribute(c, file, name, value);
  const Id links = link_properties(c);
  const Id creation = c.id(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "make a property list");
  c.ok(H5Pset_layout(creation, H5D_CONTIGUOUS), "set the layout");
  c.ok(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), "set the layout");
  c.ok(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), "set the layout");
  c.ok(H5Pset_obj_track_times(creation, false), "set the layout");  // the same tensors give the same bytes
  std::vector<i64> offsets;
  for (const Hdf5Dataset& d : datasets) {
    DS_CHECK(d.info.shape.size() <= H5S_MAX_RANK, Errc::Unavailable, "{}: '{}' has {} dims, HDF5 holds {}", c.path,
             d.info.name, d.info.shape.size(), H5S_MAX_RANK);
    const Id type = file_type(c, d.info.dtype);
    const Id space = make_space(c, d.info.shape);
    const Id dataset = c.id(H5Dcreate2(file, d.info.name.c_str(), type, space, links, creation, H5P_DEFAULT), H5Dclose,
                            "create dataset /" + d.info.name);
    for (const auto& [name, value] : d.attributes) write_attribute(c, dataset, name, value);
    const haddr_t at = H5Dget_offset(dataset);
    DS_ASSERT(at != HADDR_UNDEF || d.info.numel() == 0);
    offsets.push_back(at == HADDR_UNDEF ? -1 : static_cast<i64>(at));
  }
  errno = 0;
  if (!file.close()) c.fail(fmt::format("write the file ({})", std::strerror(errno)));  // not every driver says why
  return offsets;
}

}  // namespace

std::vector<i64> create_hdf5(const std::string& path, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes) {
  const Context c{path, Errc::Io};
  return lay_out(c, create_file(c, path), datasets, attributes);
}

std::vector<i64> create_hdf5(const File& file, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes) {
  const Context c{file.path(), Errc::Io};
  return lay_out(c, create_file(c, file.opened_as()), datasets, attributes);
}

void create_hdf5_views(const std::string& path, const std::vector<Hdf5View>& views,
                       const std::map<std::string, std::string>& links_to) {
  const Context c{path, Errc::Io};
  Id file = create_file(c, path);
  const Id links = link_properties(c);
  for (const Hdf5View& v : views) {
    const Id type = file_type(c, v.info.dtype);
    const Id space = make_space(c, v.info.shape);
    const Id creation = c.id(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "make a property list");
    for (const Hdf5View::Piece& piece : v.pieces) {
      std::vector<Box> boxes;
      const std::vector<hsize_t> ones(v.info.shape.size(), 1);
      Box whole{std::vector<hsize_t>(v.info.shape.size(), 0), {}};
      for (i64 dim : v.info.shape) whole.count.push_back(static_cast<hsize_t>(dim));
      cover(v.info.shape, 0, piece.begin, piece.begin + piece.count, whole, boxes);
      const Id source = make_space(c, {piece.count});
      hsize_t taken = 0;
      for (const Box& b : boxes) {
        hsize_t elements = 1;
        for (hsize_t n : b.count) elements *= n;
        c.ok(H5Sselect_hyperslab(space, H5S_SELECT_SET, b.start.data(), nullptr, ones.data(), b.count.data()),
             "select a part of a view");
        c.ok(H5Sselect_hyperslab(source, H5S_SELECT_SET, &taken, nullptr, ones.data(), &elements),
             "select a part of a shard");
        c.ok(H5Pset_virtual(creation, space, piece.file.c_str(), piece.dataset.c_str(), source), "map a shard");
        taken += elements;
      }
    }
    H5Sselect_all(space);
    c.id(H5Dcreate2(file, v.info.name.c_str(), type, space, links, creation, H5P_DEFAULT), H5Dclose,
         "create the view /" + v.info.name);
  }
  for (const auto& [name, target] : links_to) {
    c.ok(H5Lcreate_soft(("/" + target).c_str(), file, name.c_str(), links, H5P_DEFAULT), "link /" + name);
  }
  if (!file.close()) c.fail("write the file");
}

TensorTable read_hdf5(const File& file) {
  const Context c{file.path(), Errc::Corrupt};
  const Id id = c.id(H5Fopen(file.path().c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose, "open the file");
  Reader reader(c, file.size());
  const Id root = c.id(H5Gopen2(id, "/", H5P_DEFAULT), H5Gclose, "open the root group");
  reader.visit_group(root, "", 0);
  return std::move(reader.table);
}

}  // namespace ds
