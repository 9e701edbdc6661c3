// SPDX-License-Identifier: Apache-2.0
#pragma once
// Detects the kind of a file that is not of the expected kind, for error messages.

#include <string>
#include <string_view>

#include "base/file.h"
#include "base/json.h"

namespace ds {

inline constexpr std::string_view kBinaryData = "binary data";

// Detects the kind by the first bytes, of which a few KiB suffice: "an HDF5 file", "a safetensors file", or kBinaryData
// if nothing more is known. Empty: it may be text.
std::string_view kind_of_content(std::string_view first_bytes);
std::string kind_of_content(const File& file);

// The kind whose signature of at least `least_bytes` bytes matches; empty if there is none. Token ids may look like a
// short signature.
std::string_view kind_by_signature(std::string_view first_bytes, size_t least_bytes = 1);

// How to obtain the text of a file of this kind: "decompress it: xz -d"; empty if there is no short answer.
std::string_view how_to_get_text(std::string_view kind);

// The kind of a well-known JSON object, such as "a tokenizer"; empty: unknown.
std::string_view kind_of_json(const Json& object);

// Explains why a file is not `wanted`, such as "an HDF5 file": "path: is a pickle, not an HDF5 file", or `why` if its
// kind is unknown.
std::string not_of_kind(const File& file, std::string_view wanted, std::string_view why);

}  // namespace ds
