// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a file is, where it is not what was asked for: so that a message can say it.

#include <string>
#include <string_view>

#include "base/file.h"
#include "base/json.h"

namespace ds {

inline constexpr std::string_view kBinaryData = "binary data";

// "an HDF5 file", "a safetensors file", kBinaryData where that is all that can be said: by the first bytes, of which a
// few KiB suffice. Empty: it may be text.
std::string_view kind_of_content(std::string_view first_bytes);
std::string kind_of_content(const File& file);

// The kind whose signature of at least `least_bytes` the bytes begin with; empty where there is none. Token ids may
// look like a short signature.
std::string_view kind_by_signature(std::string_view first_bytes, size_t least_bytes = 1);

// How the text of a file of this kind is obtained: "decompress it: xz -d"; empty where there is no short answer.
std::string_view how_to_get_text(std::string_view kind);

// What an object of JSON is that others write, as they write it: "a tokenizer"; empty: something else.
std::string_view kind_of_json(const Json& object);

// Why a file is not `wanted`, such as "an HDF5 file": "path: is a pickle, not an HDF5 file", or `why` where nothing is
// known about it.
std::string not_of_kind(const File& file, std::string_view wanted, std::string_view why);

}  // namespace ds
