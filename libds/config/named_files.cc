// SPDX-License-Identifier: Apache-2.0
#include "config/named_files.h"

#include <fmt/format.h>

#include <filesystem>

#include "base/json.h"
#include "config/data_format.h"

namespace ds {
namespace {

void add_data(std::vector<NamedFile>& all, std::string_view key, const DataConfig& data,
              const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    const std::string of = names.size() == 1 ? std::string(key) : json_element(key, i);
    switch (data.format == DataFormat::Auto ? data_format_of(name) : data.format) {
      case DataFormat::Megatron:
        all.push_back({of, megatron_names(name).bin});
        all.push_back({of, megatron_names(name).idx});
        break;
      case DataFormat::Hdf5: all.push_back({of, split_hdf5_name(name).file}); break;
      default: all.push_back({of, name}); break;
    }
  }
}

}  // namespace

std::vector<NamedFile> named_inputs(const Config& c) {
  std::vector<NamedFile> all;
  if (!c.published.path.empty()) all.push_back({"model.path", c.published.path, true});
  add_data(all, "data.train", c.data, c.data.train);
  add_data(all, "data.validation", c.data, c.data.validation);
  if (!c.data.tokenizer.empty() && c.data.tokenizer != "bytes")
    all.push_back({"data.tokenizer", c.data.tokenizer, true});
  if (!c.sparse_attention.layout.empty()) all.push_back({"sparse_attention.layout", c.sparse_attention.layout});
  if (!c.cuda.autotune_file.empty()) all.push_back({"cuda.autotune_file", c.cuda.autotune_file});
  return all;
}

std::string why_not_input(const NamedFile& file) {
  namespace fs = std::filesystem;
  std::error_code error;
  switch (fs::status(file.path, error).type()) {
    case fs::file_type::directory: return file.may_be_directory ? "" : "is a directory, not a file";
    case fs::file_type::fifo: return "is a pipe, which can be read only once; name a file";
    case fs::file_type::socket: return "is a socket, not a file";
    case fs::file_type::block:
    case fs::file_type::character: return "is a device, not a file";
    default: return "";
  }
}

}  // namespace ds
