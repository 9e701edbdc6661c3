// SPDX-License-Identifier: Apache-2.0
#pragma once
// A table of tensors as bytes: what the process that parses a file tells the one that wants to read it.

#include "formats/safetensors.h"

namespace ds::hdf5 {

std::string encode(const TensorTable& table);

// The table again, out of bytes that nobody vouches for: names are unique UTF-8 and not empty, no count, shape or size
// contradicts another, and every tensor's elements are bytes of the file, or of the answer, that no other tensor has.
// Throws Errc::Corrupt naming `path` and what is wrong.
TensorTable decode(std::string_view answer, i64 file_bytes, const std::string& path);

// Metadata and names go to places where only this is allowed, JSON headers say.
bool is_utf8(std::string_view text);

}  // namespace ds::hdf5
