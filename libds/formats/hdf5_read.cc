// SPDX-License-Identifier: Apache-2.0
// Reading a file that anybody may have made. HDF5's parser is known to crash on hostile files, so it runs in a child
// process, and only once the first bytes are those of an HDF5 file; what the child says is checked.

#include <algorithm>
#include <array>
#include <cstring>

#include "base/content_kind.h"
#include "formats/confined.h"
#include "formats/hdf5.h"
#include "formats/hdf5_answer.h"
#include "formats/hdf5_parse.h"

namespace ds {
namespace {

// The superblock is at byte 0 or, after a user block, at 512, 1024, 2048, ... Only versions 0 to 3 exist, and programs
// write offsets of eight bytes unless told otherwise.
void check_superblock(const File& file) {
  constexpr std::string_view kSignature = "\x89HDF\r\n\x1a\n";
  const i64 size = file.size();
  for (i64 at = 0; at + 16 <= size; at = std::max<i64>(2 * at, 512)) {
    std::array<char, 16> b{};
    file.read_at(at, b.data(), b.size());
    if (std::memcmp(b.data(), kSignature.data(), kSignature.size()) != 0) continue;
    const int version = static_cast<unsigned char>(b[8]);
    DS_CHECK(version <= 3, Errc::Unavailable, "{}: HDF5 with a superblock of version {}; 0 to 3 are supported",
             file.path(), version);
    const size_t sizes = version < 2 ? 13 : 9;
    DS_CHECK(b[sizes] == 8 && b[sizes + 1] == 8, Errc::Unavailable,
             "{}: HDF5 whose offsets and lengths have {} and {} bytes; 8 are supported", file.path(), int{b[sizes]},
             int{b[sizes + 1]});
    return;
  }
  throw Error(Errc::Corrupt, not_of_kind(file, "an HDF5 file", "not an HDF5 file"));
}

}  // namespace

TensorTable read_hdf5(const File& file) {
  check_superblock(file);
  const i64 size = file.size();
  // A table of names is never larger than the file, and a slow disk gets its time.
  ConfinedLimits limits;
  limits.seconds += std::min<i64>(size >> 30, 600);
  limits.memory_bytes = limits.answer_bytes = std::clamp<i64>(size, i64{256} << 20, i64{4} << 30);
  const hdf5::Bytes bytes{file.path(), size, [&](i64 offset, void* out, i64 n) { file.read_at(offset, out, n); }};
  const auto start = [&] {
    const std::lock_guard lock(hdf5::library());  // else another thread may be inside it as the child gets its copy
    return std::make_unique<ConfinedChild>(file.path(), "HDF5's parser", file.descriptor(), limits,
                                           [&] { return hdf5::encode(hdf5::parse(bytes)); });
  };
  return hdf5::decode(start()->answer(), size, file.path());
}

}  // namespace ds
