// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5.h"

#include <algorithm>
#include <cerrno>
#include <set>

#include "base/limits.h"
#include "formats/hdf5_library.h"

namespace ds {
namespace {

using hdf5::Context;
using hdf5::file_type;
using hdf5::Id;

Id make_space(const Context& c, const std::vector<i64>& shape) {
  if (shape.empty()) return c.id(H5Screate(H5S_SCALAR), H5Sclose, "make a dataspace");
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  return c.id(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose, "make a dataspace");
}

void write_attribute(const Context& c, hid_t object, const Hdf5Attribute& attribute) {
  const Id space = make_space(c, attribute.shape);
  const Id a = c.id(H5Acreate2(object, attribute.name.c_str(), H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                    H5Aclose, "create attribute " + attribute.name);
  c.ok(H5Awrite(a, H5T_NATIVE_INT64, attribute.values.data()), "write attribute " + attribute.name);
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

// The same tensors give the same bytes, whenever they are written.
void without_times(const Context& c, hid_t creation) {
  c.ok(H5Pset_obj_track_times(creation, false), "leave times out");
}

// A new file in the format of HDF5 1.10, whose metadata is checksummed and which is refused until it has been closed.
Id create_file(const Context& c, const std::string& opened_as) {
  const Id access = c.id(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list");
  c.ok(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "set the format version");
  c.ok(H5Pset_alignment(access, 65536, 4096), "set the alignment");  // large datasets begin on a page
  // The default driver resolves the real path of a link, which a file without a name does not have.
  if (opened_as != c.path) c.ok(H5Pset_fapl_stdio(access), "choose the driver");
  const Id creation = c.id(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "make a property list");
  // Thousands of tensors in the root group: members in the order of creation, indexed.
  c.ok(H5Pset_link_creation_order(creation, H5P_CRT_ORDER_TRACKED | H5P_CRT_ORDER_INDEXED), "set the link order");
  without_times(c, creation);
  return c.id(H5Fcreate(opened_as.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose, "create the file");
}

Id link_properties(const Context& c) {
  Id links = c.id(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "make a property list");
  c.ok(H5Pset_char_encoding(links, H5T_CSET_UTF8), "set link properties");
  return links;
}

// The groups above objects of these names. The library would make them on the way, with times.
void make_groups(const Context& c, hid_t file, hid_t links, const std::vector<std::string_view>& names) {
  std::set<std::string_view> groups;  // in order: outer ones first
  for (const std::string_view name : names) {
    for (size_t slash = name.find('/'); slash != name.npos; slash = name.find('/', slash + 1))
      groups.insert(name.substr(0, slash));
  }
  const Id creation = c.id(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, "make a property list");
  without_times(c, creation);
  for (const std::string_view group : groups) {
    const std::string name(group);
    c.id(H5Gcreate2(file, name.c_str(), links, creation, H5P_DEFAULT), H5Gclose, "create group /" + name);
  }
}

// Covers elements [begin, end) of the flattened dims [dim, rank) by boxes, in row-major order: a partial first row,
// whole rows, a partial last row. `box` holds the fixed coordinates of the dims before.
struct Box {
  std::vector<hsize_t> start, count;
  i64 numel() const noexcept {
    i64 n = 1;
    for (const hsize_t c : count) n *= static_cast<i64>(c);
    return n;
  }
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

// A part of a view that shows `numel` neighbours of a dataset, in order: the elements of these boxes, which HDF5 walks
// in row-major order of the view.
struct Mapping {
  std::vector<Box> boxes;
  i64 numel;
};

// The elements of a part: some of a first row, whole rows, part of a last row, where a row is all indices of the part's
// dim and the following dims. For any number of rows these are a few boxes.
std::vector<Mapping> map_part(const std::vector<i64>& shape, const Hdf5View::Part& part) {
  const auto dim = static_cast<size_t>(part.dim);
  const std::vector<i64> outer(shape.begin(), shape.begin() + part.dim);
  i64 inner = 1, width = 0;
  for (size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
  const auto ranges = part.ranges.empty() ? std::vector{std::pair<i64, i64>{0, shape[dim]}} : part.ranges;
  for (const auto& [from, to] : ranges) width += (to - from) * inner;
  Box whole{std::vector<hsize_t>(shape.size(), 0), {}};
  for (const i64 size : shape) whole.count.push_back(static_cast<hsize_t>(size));

  std::vector<Mapping> mappings;
  const auto add_part = [&](i64 row, i64 begin, i64 end) {
    Box box = whole;
    for (size_t d = dim; d-- > 0; row /= shape[d]) {
      box.start[d] = static_cast<hsize_t>(row % shape[d]);
      box.count[d] = 1;
    }
    i64 at = 0;
    for (const auto& [from, to] : ranges) {
      const i64 first = std::max(begin, at), last = std::min(end, at + (to - from) * inner);
      std::vector<Box> boxes;
      if (first < last) cover(shape, dim, from * inner + first - at, from * inner + last - at, box, boxes);
      for (Box& b : boxes) {
        const i64 numel = b.numel();
        mappings.push_back({{std::move(b)}, numel});
      }
      at += (to - from) * inner;
    }
  };
  const i64 end = part.begin + part.count, first = part.begin / width, last = end / width;
  if (part.begin % width != 0 && first == last) {
    add_part(first, part.begin % width, end % width);
    return mappings;
  }
  if (part.begin % width != 0) add_part(first, part.begin % width, width);
  std::vector<Box> rows = {whole};
  if (dim > 0) {
    rows.clear();
    cover(outer, 0, div_ceil(part.begin, width), last, whole, rows);
  } else if (div_ceil(part.begin, width) == last) {
    rows.clear();
  }
  for (const Box& box : rows) {
    Mapping& m = mappings.emplace_back();
    for (const auto& [from, to] : ranges) {
      Box chosen = box;
      chosen.start[dim] = static_cast<hsize_t>(from);
      chosen.count[dim] = static_cast<hsize_t>(to - from);
      m.numel += chosen.numel();
      m.boxes.push_back(std::move(chosen));
    }
  }
  if (end % width != 0) add_part(last, 0, end % width);
  return mappings;
}

std::vector<i64> lay_out(const Context& c, Id file, const std::vector<Hdf5Dataset>& datasets,
                         const std::map<std::string, std::string>& attributes, const Tick& tick) {
  for (const auto& [name, value] : attributes) write_attribute(c, file, name, value);
  const Id links = link_properties(c);
  const Id creation = c.id(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "make a property list");
  c.ok(H5Pset_layout(creation, H5D_CONTIGUOUS), "set the layout");
  c.ok(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), "set the layout");
  c.ok(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), "set the layout");
  without_times(c, creation);
  std::vector<std::string_view> names;
  for (const Hdf5Dataset& d : datasets) names.push_back(d.info.name);
  make_groups(c, file, links, names);
  std::vector<i64> offsets;
  for (const Hdf5Dataset& d : datasets) {
    if (tick) tick();
    DS_CHECK(d.info.shape.size() <= H5S_MAX_RANK, Errc::Unavailable, "{}: '{}' has {} dims, HDF5 holds {}", c.path,
             d.info.name, d.info.shape.size(), H5S_MAX_RANK);
    const Id type = file_type(c, d.info.dtype);
    const Id space = make_space(c, d.info.shape);
    const Id dataset = c.id(H5Dcreate2(file, d.info.name.c_str(), type, space, links, creation, H5P_DEFAULT), H5Dclose,
                            "create dataset /" + d.info.name);
    for (const Hdf5Attribute& a : d.attributes) write_attribute(c, dataset, a);
    const haddr_t at = H5Dget_offset(dataset);
    DS_ASSERT(at != HADDR_UNDEF || d.info.numel() == 0);
    offsets.push_back(at == HADDR_UNDEF ? -1 : static_cast<i64>(at));
  }
  errno = 0;
  if (!file.close()) c.fail(fmt::format("write the file ({})", system_reason(errno)));  // not every driver says why
  return offsets;
}

}  // namespace

std::vector<i64> create_hdf5(const std::string& path, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes, const Tick& tick) {
  const Context c{path, Errc::Io};
  return lay_out(c, create_file(c, path), datasets, attributes, tick);
}

std::vector<i64> create_hdf5(const File& file, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes, const Tick& tick) {
  const Context c{file.path(), Errc::Io};
  return lay_out(c, create_file(c, file.opened_as()), datasets, attributes, tick);
}

void create_hdf5_views(const std::string& path, const std::vector<Hdf5View>& views,
                       const std::map<std::string, std::string>& links_to, const Tick& tick) {
  const Context c{path, Errc::Io};
  Id file = create_file(c, path);
  const Id links = link_properties(c);
  std::vector<std::string_view> names;
  for (const Hdf5View& v : views) names.push_back(v.info.name);
  for (const auto& [name, target] : links_to) names.push_back(name);
  make_groups(c, file, links, names);
  for (const Hdf5View& v : views) {
    if (tick) tick();
    const Id type = file_type(c, v.info.dtype);
    const Id space = make_space(c, v.info.shape);
    const Id creation = c.id(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "make a property list");
    without_times(c, creation);
    for (const Hdf5View::Part& part : v.parts) {
      const std::vector<hsize_t> ones(v.info.shape.size(), 1);
      const Id source = make_space(c, {part.count});
      hsize_t taken = 0;
      for (const Mapping& m : map_part(v.info.shape, part)) {
        H5S_seloper_t how = H5S_SELECT_SET;
        for (const Box& b : m.boxes) {
          c.ok(H5Sselect_hyperslab(space, how, b.start.data(), nullptr, ones.data(), b.count.data()),
               "select a part of a view");
          how = H5S_SELECT_OR;
        }
        const auto elements = static_cast<hsize_t>(m.numel);
        c.ok(H5Sselect_hyperslab(source, H5S_SELECT_SET, &taken, nullptr, ones.data(), &elements),
             "select a part of a shard");
        c.ok(H5Pset_virtual(creation, space, part.file.c_str(), part.dataset.c_str(), source), "map a shard");
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

constexpr i64 kMaxGroups = 30;  // above a name; readers bound how deep they look

bool is_hdf5_name(std::string_view name) noexcept {
  if (name.size() > 1024 || std::any_of(name.begin(), name.end(), [](char c) { return static_cast<u8>(c) < 0x20; }))
    return false;
  if (std::ranges::count(name, '/') > kMaxGroups) return false;
  for (;;) {
    const size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

void check_hdf5_names(std::span<const std::string_view> names, const std::string& path) {
  const std::set<std::string_view> all(names.begin(), names.end());
  for (const std::string_view name : all) {
    DS_CHECK(is_hdf5_name(name), Errc::Unavailable, "{}: HDF5 cannot hold a tensor named '{}'", path,
             name.substr(0, 200));
    for (size_t slash = name.find('/'); slash != std::string_view::npos; slash = name.find('/', slash + 1)) {
      DS_CHECK(!all.contains(name.substr(0, slash)), Errc::Unavailable,
               "{}: HDF5 cannot hold a tensor named '{}' beside one named '{}'", path, name.substr(0, 200),
               name.substr(0, std::min<size_t>(slash, 200)));
    }
  }
}

}  // namespace ds
