// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "config/named_files.h"
#include "data/tokenizer/files.h"

namespace ds {
namespace {

class Bytes : public Tokenizer {
 public:
  void encode(std::string_view text, std::vector<i32>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<u8>(c));
  }
  std::string decode(std::span<const i32> ids) const override {
    std::string text;
    for (const i32 id : ids)
      if (id >= 0 && id < 256) text += static_cast<char>(id);
    return text;
  }
  i64 vocab_size() const noexcept override { return 256; }
  std::string identity() const override { return "bytes"; }
  size_t cut_after(std::string_view text, size_t from) const noexcept override {
    return std::min(from + 1, text.size());
  }
};

std::unique_ptr<Tokenizer> open_any(const std::string& path) {
  namespace fs = std::filesystem;
  if (path == "bytes") return std::make_unique<Bytes>();
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  DS_CHECK(fs::exists(status), Errc::Config, "tokenizer '{}': no such file or directory", path);
  const auto inside = [&](const char* name) { return (fs::path(path) / name).string(); };
  if (fs::is_directory(status)) {
    const auto has = [&](const char* name) { return fs::exists(inside(name), failed); };
    if (has("tokenizer.json")) return tokenizer::open_tokenizer_json(inside("tokenizer.json"));
    if (has("vocab.json") && has("merges.txt"))
      return tokenizer::open_bpe_files(inside("vocab.json"), inside("merges.txt"));
    if (has("vocab.txt")) return tokenizer::open_vocab_txt(inside("vocab.txt"));
    if (has("tokenizer.model")) return tokenizer::open_sentence_piece(inside("tokenizer.model"));
    throw Error(Errc::Config,
                fmt::format("tokenizer '{}': the directory has no tokenizer.json, vocab.json + merges.txt, "
                            "vocab.txt or tokenizer.model; a SentencePiece file of another name can be named itself",
                            path));
  }
  const std::string name = fs::path(path).filename().string();
  const auto neighbour = [&](const char* other) { return (fs::path(path).parent_path() / other).string(); };
  if (name == "vocab.json" || name == "merges.txt") {
    const std::string vocab = neighbour("vocab.json"), merges = neighbour("merges.txt");
    for (const std::string& file : {vocab, merges})
      DS_CHECK(fs::exists(file, failed), Errc::Config, "tokenizer '{}' needs '{}', which is not there", path, file);
    return tokenizer::open_bpe_files(vocab, merges);
  }
  if (name.ends_with(".json")) return tokenizer::open_tokenizer_json(path);
  if (name.ends_with(".txt")) return tokenizer::open_vocab_txt(path);
  if (name.find(".model") != name.npos) return tokenizer::open_sentence_piece(path);
  throw Error(
      Errc::Unavailable,
      fmt::format("tokenizer '{}': this kind of file is not supported (tokenizer.json, vocab.json + merges.txt, "
                  "vocab.txt and tokenizer.model are)",
                  path));
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path) {
  return read_named("data.tokenizer", [&] { return open_any(path); });
}

}  // namespace ds
