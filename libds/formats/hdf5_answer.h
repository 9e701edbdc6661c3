// SPDX-License-Identifier: Apache-2.0
#pragma once
// A table of tensors as bytes: the answer of the process that parses a file.

#include "formats/safetensors.h"

namespace ds::hdf5 {

std::string encode(const TensorTable& table);

// Decodes the table from untrusted bytes, and checks it: names are unique UTF-8 and not empty, no count, shape or size
// contradicts another, and every tensor's elements are bytes of the file, or of the answer, that belong to no other
// tensor. Throws Errc::Corrupt naming `path` and the reason.
TensorTable decode(std::string_view answer, i64 file_bytes, const std::string& path);

// Metadata and names may later be written to JSON headers, which allow only UTF-8.
bool is_utf8(std::string_view text);

}  // namespace ds::hdf5
