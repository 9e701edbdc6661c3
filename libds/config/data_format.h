// SPDX-License-Identifier: Apache-2.0
#pragma once
// The format of a data file, by its name and by the files next to it.

#include <string>

#include "ds/config.h"

namespace ds {

// Never Auto. Bin if the name ends in ".bin": only the content distinguishes nanoGPT's files from llm.c's.
DataFormat data_format_of(const std::string& file);

// "a.jsonl" of "a.jsonl.gz", "a.jsonl.zst" and "a.jsonl.zstd"; any other name as it is.
std::string name_without_compression(const std::string& file);

// Whether a tokenizer reads it.
constexpr bool is_text(DataFormat format) noexcept {
  return format == DataFormat::Text || format == DataFormat::Jsonl || format == DataFormat::Parquet ||
         format == DataFormat::Arrow;
}

// FILE.h5:/path/to/dataset in its two parts; the second is empty if no dataset is named.
struct Hdf5DataName {
  std::string file, dataset;  // the dataset without its first slash
};
Hdf5DataName split_hdf5_name(const std::string& name);

// The two files of Megatron-LM behind PREFIX, PREFIX.bin or PREFIX.idx.
struct MegatronNames {
  std::string bin, idx;
};
MegatronNames megatron_names(const std::string& name);

}  // namespace ds
