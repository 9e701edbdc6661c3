// SPDX-License-Identifier: Apache-2.0
#pragma once
// The safetensors container: u64 header length | JSON header | tensor bytes, without holes.

#include "formats/tensor_io.h"

namespace ds {

// The contents of a header: offsets[i] is the position of tensors[i] from the start of the file, or -1 - k if its
// elements are part of the header, at byte k of `inlined`.
struct TensorTable {
  std::vector<TensorInfo> tensors;
  std::vector<i64> offsets;
  std::string inlined = {};
  std::vector<ForeignTensor> foreign;
  std::map<std::string, std::string> metadata;
};

// The longest JSON header that is read or written.
inline constexpr i64 kMaxSafetensorsHeader = 100'000'000;

// Reads and validates a header: well-formed, no unknown fields, no duplicate names, sizes that agree with shapes, and
// tensors that cover the file's data exactly once. Memory is a small multiple of the header. Throws Errc::Corrupt
// naming the file, the tensor and the contradiction.
TensorTable read_safetensors(const File& file);
// The same for the JSON text of a header of a file of 8 + json.size() + data_bytes bytes named `path`.
TensorTable parse_safetensors(std::string_view json, i64 data_bytes, const std::string& path);

// The first bytes of a file that contains `tensors` in this order (length, JSON, spaces up to a multiple of 8); fills
// `offsets`. Throws Errc::Unavailable if the header would be longer than readers accept.
std::string make_safetensors_header(const std::vector<TensorInfo>& tensors,
                                    const std::map<std::string, std::string>& metadata, std::vector<i64>* offsets);

// model.safetensors.index.json or pytorch_model.bin.index.json: tensor name -> file name, every file name plain and
// with the suffix that the index has before .index.json.
std::map<std::string, std::string> read_weight_index(const std::string& path);

}  // namespace ds
