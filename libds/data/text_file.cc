// SPDX-License-Identifier: Apache-2.0
#include "data/token_file.h"

#include <utility>

#include "base/check.h"

namespace ds {

std::unique_ptr<TokenFile> open_text_file(const std::string& path, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& text = file->map(path);
  for (const auto& [magic, what] : {std::pair{"PAR1", "Parquet"}, {"ARROW1", "Arrow"}}) {
    DS_CHECK(!text.text().starts_with(magic), Errc::Unavailable,
             "data file '{}' is {}, and its name does not say so: set data.format", path, what);
  }
  if (encoding.tokenizer == nullptr) {
    file->view = {text.data(), DType::U8, text.bytes()};
    return file;
  }
  file->ids = std::make_unique<TokenIds>(*encoding.tokenizer, encoding.num_threads, path);
  file->ids->add_text(text.text(), [&] { text.check_size(); });
  file->ids->map();
  file->view_ids();
  return file;
}

}  // namespace ds
