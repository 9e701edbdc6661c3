// SPDX-License-Identifier: Apache-2.0
// Datasets that read_hdf5 lists are contiguous in the file, so they are viewed in place; a few elements may be in a
// dataset's header, and are copied with it.

#include <algorithm>

#include "base/check.h"
#include "config/data_format.h"
#include "data/token_file.h"
#include "formats/hdf5.h"

namespace ds {
namespace {

constexpr size_t kMostListed = 20;

std::string list_datasets(const TensorTable& table) {
  std::vector<std::string> names;
  for (const TensorInfo& t : table.tensors) names.push_back("/" + t.name);
  for (const ForeignTensor& t : table.foreign) names.push_back("/" + t.name);
  const size_t shown = std::min(names.size(), kMostListed);
  const std::string more = names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "";
  return fmt::format("{}{}", fmt::join(names.begin(), names.begin() + static_cast<i64>(shown), ", "), more);
}

// The dataset that is meant: the one named, or the only one.
size_t find_dataset(const TensorTable& table, const Hdf5DataName& name) {
  const size_t num_datasets = table.tensors.size() + table.foreign.size();
  DS_CHECK(num_datasets > 0, Errc::Config, "data file '{}' has no datasets", name.file);
  DS_CHECK(num_datasets == 1 || !name.dataset.empty(), Errc::Config,
           "data file '{}' has several datasets: name one of them as {}:/NAME (there are {})", name.file, name.file,
           list_datasets(table));
  const auto is_meant = [&](const auto& t) { return name.dataset.empty() || t.name == name.dataset; };
  const auto foreign = std::find_if(table.foreign.begin(), table.foreign.end(), is_meant);
  DS_CHECK(foreign == table.foreign.end(), Errc::Unavailable,
           "data file '{}': /{} is of type {}; little-endian integers of 8 to 64 bits are read", name.file,
           foreign->name, foreign->type);
  const auto found = std::find_if(table.tensors.begin(), table.tensors.end(), is_meant);
  DS_CHECK(found != table.tensors.end(), Errc::Config, "data file '{}' has no dataset /{} (there are {})", name.file,
           name.dataset, list_datasets(table));
  return static_cast<size_t>(found - table.tensors.begin());
}

}  // namespace

std::unique_ptr<TokenFile> open_hdf5_file(const std::string& name) {
  const Hdf5DataName parts = split_hdf5_name(name);
  auto file = std::make_unique<TokenFile>();
  const MappedFile& mapped = file->map(parts.file);
  TensorTable table = read_hdf5(File::open_read(parts.file));
  const size_t index = find_dataset(table, parts);
  const TensorInfo& info = table.tensors[index];
  file->name = fmt::format("{}:/{}", parts.file, info.name);
  file->reading = "HDF5 /" + info.name;
  DS_CHECK(!is_float(info.dtype) && info.dtype != DType::Bool, Errc::Unavailable,
           "data file '{}' is of {}; tokens are integers", file->name, dtype_name(info.dtype));
  DS_CHECK(info.numel() > 0, Errc::Config, "data file '{}' has no tokens", file->name);
  file->view = {nullptr, info.dtype, info.numel()};
  if (info.shape.size() > 1 && info.shape.back() > 1) {
    file->borders = Borders::every(info.shape.back(), info.numel());
    file->borders_of = "the rows of its dataset";
    file->knows_borders = true;
  }
  const i64 offset = table.offsets[index];
  if (offset < 0) {
    file->copied = table.inlined.substr(static_cast<size_t>(-1 - offset), static_cast<size_t>(info.bytes()));
    file->view.data = reinterpret_cast<const u8*>(file->copied.data());
  } else {
    DS_CHECK(offset <= mapped.bytes() && info.bytes() <= mapped.bytes() - offset, Errc::Corrupt,
             "data file '{}' needs {} bytes at {}, the file has {}", file->name, info.bytes(), offset, mapped.bytes());
    file->view.data = mapped.data() + offset;
  }
  return file;
}

}  // namespace ds
