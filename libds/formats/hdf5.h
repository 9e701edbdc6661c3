// SPDX-License-Identifier: Apache-2.0
#pragma once
// HDF5 as a container of named tensors. Files are written in two steps: the library lays out the structure (contiguous
// datasets, allocated early, never filled), and the caller then writes the bulk directly to the returned offsets. Files
// carry the checksummed metadata of HDF5 1.10.

#include <span>

#include "formats/safetensors.h"

namespace ds {

// Whether `name` is a valid path in HDF5: no empty part, "." or "..", no control characters, at most 1024 bytes and 30
// groups.
bool is_hdf5_name(std::string_view name) noexcept;
// Throws Errc::Unavailable, naming `path` and the name, unless one file can contain objects of all these names: each is
// valid, and none is a group of another.
void check_hdf5_names(std::span<const std::string_view> names, const std::string& path);

struct Hdf5Attribute {
  std::string name;
  std::vector<i64> shape;  // none: a scalar
  std::vector<i64> values;
};

struct Hdf5Dataset {
  TensorInfo info;  // name: path below the root, groups made as needed
  std::vector<Hdf5Attribute> attributes = {};
};

// Creates `path` (overwriting an existing file), or lays out an empty file that is open for writing, and returns the
// offset of every dataset; -1 for one without elements. Throws Errc::Io with the path and the system's reason. A
// million datasets take most of a minute: the tick is called for each.
std::vector<i64> create_hdf5(const std::string& path, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes, const Tick& tick = {});
std::vector<i64> create_hdf5(const File& file, const std::vector<Hdf5Dataset>& datasets,
                             const std::map<std::string, std::string>& attributes, const Tick& tick = {});

// A dataset that shows elements of one-dimensional datasets of other files under one name and shape.
struct Hdf5View {
  struct Part {
    i64 begin, count;           // range of the flattened view, or of the part of it that `ranges` select
    std::string file, dataset;  // file name relative to the view's directory
    int dim = 0;
    std::vector<std::pair<i64, i64>> ranges = {};  // of the indices of `dim`, ascending and disjoint; none: all
  };
  TensorInfo info;
  std::vector<Part> parts;
};
// links: name -> name of a view.
void create_hdf5_views(const std::string& path, const std::vector<Hdf5View>& views,
                       const std::map<std::string, std::string>& links, const Tick& tick = {});

// Lists the datasets of an untrusted file in the order of their creation if every group records it, else in that of
// their positions in the file. Contiguous and compact little-endian datasets of known types are read; other types are
// foreign. Chunked, compressed, external and virtual data is refused with its name and advice, and links to other files
// are never followed. Attributes of the root that are text are the metadata. The library's parser runs in a child
// process without rights (formats/confined.h), whose answer is checked. Throws Errc::Corrupt, also if the parser
// crashes, hangs or needs too much memory; Errc::Io, Errc::Unavailable.
TensorTable read_hdf5(const File& file);

}  // namespace ds
