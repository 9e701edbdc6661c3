// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5_parse.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <numeric>
#include <set>

#include "formats/hdf5_answer.h"

namespace ds::hdf5 {
namespace {

constexpr int kMaxDepth = 32;  // groups within groups

std::string type_words(hid_t type) {
  constexpr const char* kClasses[] = {"integer",  "float",     "time", "string",          "bitfield", "opaque",
                                      "compound", "reference", "enum", "variable-length", "array"};
  const int k = H5Tget_class(type);
  return fmt::format("{} of {} bytes{}", k >= 0 && k < 11 ? kClasses[k] : "type", H5Tget_size(type),
                     H5Tget_order(type) == H5T_ORDER_BE ? ", big-endian" : "");
}

// Calls back from the library's loops, through which no exception may pass.
class Loop {
 public:
  explicit Loop(std::function<void(const char* name)> body) : body_(std::move(body)) {}
  herr_t step(const char* name) noexcept {
    try {
      body_(name);
      return 0;
    } catch (...) {
      thrown_ = std::current_exception();
      return -1;
    }
  }
  void end(const Context& c, herr_t result, std::string_view what) const {
    if (thrown_) std::rethrow_exception(thrown_);
    c.ok(result, what);
  }

 private:
  std::function<void(const char*)> body_;
  std::exception_ptr thrown_;
};

class Walk {
 public:
  Walk(const Context& c, const Bytes& bytes) : c_(c), file_bytes_(bytes.size) {
    for (const DType t :
         {DType::F32, DType::BF16, DType::F16, DType::F64, DType::I32, DType::I64, DType::U16, DType::U8, DType::I8,
          DType::I16, DType::U32, DType::U64, DType::Bool, DType::F8E4M3, DType::F8E5M2})
      types_.emplace_back(t, file_type(c, t));
  }

  TensorTable run(hid_t root) {
    read_attributes(root);
    visit_group(root, "", 0);
    if (!created_in_order_) order_by_place();
    return std::move(table_);
  }

 private:
  // Text in UTF-8 is metadata, as create_hdf5 writes it; what else stands at the root is left alone.
  void read_attributes(hid_t root) {
    Loop loop([&](const char* name) { read_attribute(root, name); });
    hsize_t at = 0;
    loop.end(c_,
             H5Aiterate2(
                 root, H5_INDEX_NAME, H5_ITER_NATIVE, &at,
                 [](hid_t, const char* name, const H5A_info_t*, void* l) { return static_cast<Loop*>(l)->step(name); },
                 &loop),
             "read the attributes of the root");
  }

  void read_attribute(hid_t root, const std::string& name) {
    const Id attribute = c_.id(H5Aopen(root, name.c_str(), H5P_DEFAULT), H5Aclose, "open attribute " + name);
    const Id type = c_.id(H5Aget_type(attribute), H5Tclose, "read the type of attribute " + name);
    const Id space = c_.id(H5Aget_space(attribute), H5Sclose, "read the shape of attribute " + name);
    if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1) return;
    const auto count = [&](size_t bytes) {
      metadata_bytes_ += static_cast<i64>(std::min<size_t>(bytes, kMaxMetadataBytes + 1));
      DS_CHECK(metadata_bytes_ <= kMaxMetadataBytes, Errc::Corrupt, "{}: the attributes of the root exceed {} MiB",
               c_.path, kMaxMetadataBytes >> 20);
    };
    count(name.size());
    std::string value;
    if (H5Tis_variable_str(type) > 0) {
      char* text = nullptr;
      c_.ok(H5Aread(attribute, type, &text), "read attribute " + name);
      if (text != nullptr) value = text;
      H5free_memory(text);
      count(value.size());
    } else {
      count(H5Tget_size(type));
      value.resize(H5Tget_size(type));
      c_.ok(H5Aread(attribute, type, value.data()), "read attribute " + name);
      switch (H5Tget_strpad(type)) {
        case H5T_STR_NULLTERM: value.resize(::strnlen(value.data(), value.size())); break;
        case H5T_STR_SPACEPAD: value.resize(value.find_last_not_of(' ') + 1); break;
        default: value.resize(value.find_last_not_of('\0') + 1);
      }
    }
    if (!name.empty() && is_utf8(name) && is_utf8(value)) table_.metadata.emplace(name, std::move(value));
  }

  void visit_group(hid_t group, const std::string& prefix, int depth) {
    DS_CHECK(depth <= kMaxDepth, Errc::Corrupt, "{}: groups are nested more than {} deep", c_.path, kMaxDepth);
    const Id list = c_.id(H5Gget_create_plist(group), H5Pclose, "read group /" + prefix);
    unsigned flags = 0;
    c_.ok(H5Pget_link_creation_order(list, &flags), "read group /" + prefix);
    const bool tracked = (flags & H5P_CRT_ORDER_TRACKED) != 0;
    created_in_order_ &= tracked;
    Loop loop([&](const char* link) { visit_link(group, prefix, link, depth); });
    hsize_t at = 0;
    loop.end(c_,
             H5Literate(
                 group, tracked ? H5_INDEX_CRT_ORDER : H5_INDEX_NAME, tracked ? H5_ITER_INC : H5_ITER_NATIVE, &at,
                 [](hid_t, const char* link, const H5L_info_t*, void* l) { return static_cast<Loop*>(l)->step(link); },
                 &loop),
             "read group /" + prefix);
  }

  void visit_link(hid_t group, const std::string& prefix, const char* link, int depth) {
    const std::string name = prefix + link;
    DS_CHECK(name.size() <= size_t{kMaxName}, Errc::Corrupt, "{}: a name of more than {} bytes", c_.path, kMaxName);
    H5L_info_t info;
    c_.ok(H5Lget_info(group, link, &info, H5P_DEFAULT), "read link /" + name);
    DS_CHECK(info.type != H5L_TYPE_EXTERNAL, Errc::Unavailable, "{}: /{} links to another file, which is not supported",
             c_.path, name);
    if (info.type != H5L_TYPE_HARD) return;  // a soft link is a second name of what is listed elsewhere
    const Id object = c_.id(H5Oopen(group, link, H5P_DEFAULT), H5Oclose, "open /" + name);
    const H5I_type_t type = H5Iget_type(object);
    if (type != H5I_GROUP && type != H5I_DATASET) return;
    H5O_info_t identity;
    c_.ok(H5Oget_info2(object, &identity, H5O_INFO_BASIC), "read /" + name);
    DS_CHECK(visited_.insert(identity.addr).second, Errc::Corrupt, "{}: /{} is a second hard link to one object",
             c_.path, name);
    if (type == H5I_GROUP) {
      visit_group(object, name + "/", depth + 1);
    } else {
      visit_dataset(object, name, identity.addr);
    }
  }

  void visit_dataset(hid_t dataset, const std::string& name, haddr_t header) {
    DS_CHECK(table_.tensors.size() + table_.foreign.size() < size_t{kMaxDatasets}, Errc::Corrupt,
             "{}: more than {} datasets", c_.path, kMaxDatasets);
    const Id type = c_.id(H5Dget_type(dataset), H5Tclose, "read the type of /" + name);
    const auto known =
        std::find_if(types_.begin(), types_.end(), [&](const auto& t) { return H5Tequal(type, t.second) > 0; });
    if (known == types_.end()) {
      table_.foreign.push_back({name, type_words(type)});
      return;
    }
    const Id creation = c_.id(H5Dget_create_plist(dataset), H5Pclose, "read the layout of /" + name);
    const H5D_layout_t layout = check_layout(creation, name);  // before its shape, for which a view asks other files
    TensorInfo info{name, known->first, read_shape(dataset, name)};
    const std::optional<i64> bytes = checked_product(info.shape, dtype_bytes(info.dtype));
    DS_CHECK(bytes.has_value(), Errc::Corrupt, "{}: /{}: the product of its shape overflows", c_.path, name);
    i64 offset = 0;
    if (*bytes > 0)
      offset = layout == H5D_COMPACT ? copy_compact(dataset, type, name, *bytes) : data_offset(dataset, name, *bytes);
    table_.tensors.push_back(std::move(info));
    table_.offsets.push_back(offset);
    places_.push_back(offset > 0 ? static_cast<haddr_t>(offset) : header);
  }

  H5D_layout_t check_layout(hid_t creation, const std::string& name) const {
    const H5D_layout_t layout = H5Pget_layout(creation);
    DS_CHECK(layout != H5D_VIRTUAL, Errc::Unavailable,
             "{}: /{} is a view of other files, whose damage it would hide; give the directory that holds them",
             c_.path, name);
    DS_CHECK(layout == H5D_COMPACT || (layout == H5D_CONTIGUOUS && H5Pget_external_count(creation) == 0),
             Errc::Unavailable, "{}: /{} is not stored contiguously; 'h5repack -f NONE -l CONTI' makes it so", c_.path,
             name);
    return layout;
  }

  std::vector<i64> read_shape(hid_t dataset, const std::string& name) const {
    const Id space = c_.id(H5Dget_space(dataset), H5Sclose, "read the shape of /" + name);
    const H5S_class_t kind = H5Sget_simple_extent_type(space);
    DS_CHECK(kind == H5S_SIMPLE || kind == H5S_SCALAR, Errc::Unavailable, "{}: /{} has no elements to read", c_.path,
             name);
    std::array<hsize_t, H5S_MAX_RANK> dims{};
    const int rank = H5Sget_simple_extent_dims(space, dims.data(), nullptr);
    if (rank < 0) c_.fail("read the shape of /" + name);
    std::vector<i64> shape;
    for (int d = 0; d < rank; ++d) {
      const hsize_t n = dims[d];
      DS_CHECK(std::in_range<i64>(n), Errc::Corrupt, "{}: /{}: dim {} is {}", c_.path, name, d, n);
      shape.push_back(static_cast<i64>(n));
    }
    return shape;
  }

  i64 data_offset(hid_t dataset, const std::string& name, i64 bytes) const {
    const haddr_t at = H5Dget_offset(dataset);
    DS_CHECK(at != HADDR_UNDEF, Errc::Unavailable, "{}: /{} was never written", c_.path, name);
    DS_CHECK(at <= static_cast<haddr_t>(file_bytes_) && bytes <= file_bytes_ - static_cast<i64>(at), Errc::Corrupt,
             "{}: /{} needs {} bytes at {}, the file has {}", c_.path, name, bytes, at, file_bytes_);
    return static_cast<i64>(at);
  }

  // The elements of a compact dataset stand in its header, where the library does not say.
  i64 copy_compact(hid_t dataset, hid_t type, const std::string& name, i64 bytes) {
    DS_CHECK(bytes <= kMaxCompactBytes, Errc::Corrupt, "{}: /{}: {} bytes in its header, which holds {}", c_.path, name,
             bytes, kMaxCompactBytes);
    const auto at = static_cast<i64>(table_.inlined.size());
    table_.inlined.resize(at + bytes);
    c_.ok(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, table_.inlined.data() + at), "read /" + name);
    return -1 - at;
  }

  // Not every file knows in which order its datasets were made; where they stand tells almost as well.
  void order_by_place() {
    std::vector<size_t> order(table_.tensors.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return places_[a] < places_[b]; });
    std::vector<TensorInfo> tensors;
    std::vector<i64> offsets;
    for (const size_t i : order) {
      tensors.push_back(std::move(table_.tensors[i]));
      offsets.push_back(table_.offsets[i]);
    }
    table_.tensors = std::move(tensors);
    table_.offsets = std::move(offsets);
  }

  const Context& c_;
  i64 file_bytes_;
  std::vector<std::pair<DType, Id>> types_;
  TensorTable table_;
  std::vector<haddr_t> places_;  // of tensors: their elements, or else their headers
  std::set<haddr_t> visited_;
  bool created_in_order_ = true;  // every group says in which order its members were made
  i64 metadata_bytes_ = 0;
};

}  // namespace

TensorTable parse(const Bytes& bytes) {
  const Context c{bytes.path, Errc::Corrupt, {}};
  c.ok(H5PLset_loading_state(0), "do without plug-ins");
  const ReadOnlyFile file(c, bytes);
  const Id root = c.id(H5Gopen2(file.id(), "/", H5P_DEFAULT), H5Gclose, "open the root group");
  return Walk(c, bytes).run(root);
}

}  // namespace ds::hdf5
