// SPDX-License-Identifier: Apache-2.0
#pragma once
// Zip archives as written by PyTorch: all entries are stored uncompressed, so an entry is a range of the file. Format:
// PKWARE's APPNOTE 6.3, Zip64 included.

#include <string>
#include <vector>

#include "base/file.h"

namespace ds {

struct ZipEntry {
  std::string name;
  i64 offset, bytes;  // position and size of its data in the file
  u32 crc32;          // of its data, by the central directory
};

// The entries, in the order of the central directory. Strict, because attacks use archives that two readers understand
// differently. The central directory and the local headers must agree (if a data descriptor follows, sizes and checksum
// of the local header may be 0, and the descriptor must agree instead). Headers, entries, descriptors, directory and
// end records must cover the file from its first byte to its last, exactly once. Names must be unique, relative and
// plain. Only the headers are read. Throws Errc::Corrupt (file, entry and contradiction), Errc::Unavailable
// (compressed, encrypted, several disks).
std::vector<ZipEntry> read_zip(const File& file);

// Reads the entry's data; throws Errc::Corrupt if its CRC-32 differs.
void check_crc32(const File& file, const ZipEntry& entry, const Tick& tick = {});

}  // namespace ds
