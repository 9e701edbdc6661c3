// SPDX-License-Identifier: Apache-2.0
#pragma once
// Zip archives as PyTorch writes them: every entry stored, none compressed, so that an entry is a range of the file.
// Format: PKWARE's APPNOTE 6.3, Zip64 included.

#include <string>
#include <vector>

#include "base/file.h"

namespace ds {

struct ZipEntry {
  std::string name;
  i64 offset, bytes;  // where its data stand in the file
  u32 crc32;          // of its data, as the central directory says
};

// The entries, in the order of the central directory. Strict, because archives that readers understand in different
// ways are how one file passes for two: the central directory and the local headers agree (where a data descriptor
// follows, sizes and checksum of the local header may be 0, and the descriptor is held to the directory instead);
// headers, entries, descriptors, directory and end records cover the file from its first byte to its last, exactly
// once; names are unique, relative and plain. Only the headers are read.
// Throws Errc::Corrupt (file, entry and contradiction), Errc::Unavailable (compressed, encrypted, several disks).
std::vector<ZipEntry> read_zip(const File& file);

// Reads the entry's data; throws Errc::Corrupt unless they have its CRC-32.
void check_crc32(const File& file, const ZipEntry& entry, const Tick& tick = {});

}  // namespace ds
