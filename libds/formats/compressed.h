// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decompresses files of gzip (RFC 1952) and zstd (RFC 8878) with their own libraries. Files may have several members or
// frames one after the other, as pigz, bgzip and pzstd write them.

#include <functional>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

enum class Compression : u8 { None, Gzip, Zstd };
std::string_view compression_name(Compression);  // "gzip"

// By the first bytes; a zstd file may begin with a skippable frame.
Compression compression_of(std::string_view first_bytes) noexcept;

// Decompresses all members of `compressed` in order, and calls write() with pieces of at most 1 MiB. Zero bytes after
// the last member are padding. write() may throw, which ends the work. Memory: for zstd the window that a frame
// requests, at most 2 GiB (zstd --long=31). Throws Errc::Corrupt with a reason that does not name the file: "ends
// inside a compressed stream", "is damaged: ...".
void decompress(Compression, std::string_view compressed, const std::function<void(std::string_view)>& write);

}  // namespace ds
