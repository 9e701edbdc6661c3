// SPDX-License-Identifier: Apache-2.0
#include "config/data_format.h"

#include <filesystem>

namespace ds {

std::string name_without_compression(const std::string& file) {
  for (const std::string_view suffix : {".gz", ".zst", ".zstd"})
    if (file.ends_with(suffix)) return file.substr(0, file.size() - suffix.size());
  return file;
}

DataFormat data_format_of(const std::string& file) {
  const auto exists = [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(path, ignored);
  };
  const std::string plain = name_without_compression(file);
  const std::string hdf5 = split_hdf5_name(plain).file;
  if (hdf5.ends_with(".h5") || hdf5.ends_with(".hdf5")) return DataFormat::Hdf5;
  for (const char* const suffix : {".jsonl", ".ndjson", ".json"}) {
    if (plain.ends_with(suffix)) return DataFormat::Jsonl;
  }
  if (plain.ends_with(".parquet")) return DataFormat::Parquet;
  if (plain.ends_with(".arrow") || plain.ends_with(".feather")) return DataFormat::Arrow;
  if (plain != file) return plain.ends_with(".bin") ? DataFormat::Bin : DataFormat::Text;
  const MegatronNames megatron = megatron_names(file);
  if (file == megatron.idx) return DataFormat::Megatron;
  if (file == megatron.bin) return exists(megatron.idx) ? DataFormat::Megatron : DataFormat::Bin;
  const bool is_prefix = !exists(file) && exists(megatron.idx) && exists(megatron.bin);
  return is_prefix ? DataFormat::Megatron : DataFormat::Text;
}

Hdf5DataName split_hdf5_name(const std::string& name) {
  for (const std::string suffix : {".h5", ".hdf5"}) {
    const size_t at = name.find(suffix + ":/");
    if (at == name.npos) continue;
    const size_t colon = at + suffix.size();
    return {name.substr(0, colon), name.substr(colon + 2)};
  }
  // A file of another name, of which data.format says what it is.
  std::error_code ignored;
  const size_t at = name.rfind(":/");
  if (at != name.npos && !std::filesystem::exists(name, ignored) &&
      std::filesystem::exists(name.substr(0, at), ignored))
    return {name.substr(0, at), name.substr(at + 2)};
  return {name, ""};
}

MegatronNames megatron_names(const std::string& name) {
  const bool is_whole = name.ends_with(".bin") || name.ends_with(".idx");
  const std::string prefix = is_whole ? name.substr(0, name.size() - 4) : name;
  return {prefix + ".bin", prefix + ".idx"};
}

}  // namespace ds
