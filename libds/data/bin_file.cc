// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"
#include "data/token_file.h"

namespace ds {

std::unique_ptr<TokenFile> open_bin_file(const std::string& path) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& bin = file->map(path);
  DS_CHECK(bin.bytes() % 2 == 0, Errc::Corrupt,
           "data file '{}' has an odd number of bytes ({}): not a file of uint16 tokens", path, bin.bytes());
  file->view = {bin.data(), DType::U16, bin.bytes() / 2};
  return file;
}

}  // namespace ds
