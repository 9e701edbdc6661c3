// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "config/named_files.h"
#include "data/tokenizer/definition.h"
#include "data/tokenizer/sentence_piece.h"

namespace ds {
namespace {

using tokenizer::Directory;

class Bytes : public Tokenizer {
 public:
  void encode(std::string_view text, std::vector<i32>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<u8>(c));
  }
  std::string decode(std::span<const i32> ids) const override {
    std::string text;
    for (const i32 id : ids) text += piece(id);
    return text;
  }
  std::string piece(i32 id) const override {
    return id >= 0 && id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
  }
  i64 vocab_size() const noexcept override { return 256; }
  std::string identity() const override { return "bytes"; }
  size_t cut_after(std::string_view text, size_t from) const noexcept override {
    return std::min(from + 1, text.size());
  }
};

std::unique_ptr<Tokenizer> open_any(const std::string& path) {
  if (path == "bytes") return std::make_unique<Bytes>();
  const Directory directory = tokenizer::read_directory(path);
  // A model by itself is SentencePiece's affair.
  const bool alone = directory.config.empty() && directory.special.empty() && directory.added.empty() &&
                     tokenizer::class_name(directory).name.empty();
  if (alone && directory.kind == Directory::Kind::SentencePiece)
    return tokenizer::SentencePieceFile(directory.file, directory.vocabulary())
        .tokenizer(tokenizer::end_tokens(directory));
  return tokenizer::make_pipeline(tokenizer::define(directory));
}

}  // namespace

std::string_view special_name(SpecialToken kind) {
  constexpr std::string_view kNames[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                         "cls_token", "sep_token", "mask_token"};
  static_assert(std::size(kNames) == kNumSpecialTokens);
  return kNames[static_cast<size_t>(kind)];
}

void Tokenizer::add_eos_to_ends(const std::string& file) {
  const std::optional<i32> eos = special(SpecialToken::Eos);
  if (!eos || std::ranges::find(facts_.ends, *eos, &EndToken::id) != facts_.ends.end()) return;
  const std::string role(special_name(SpecialToken::Eos));
  const auto named = std::ranges::find(facts_.named, role, &NamedToken::role);
  const bool by_file = named != facts_.named.end() && !named->source.starts_with("class ");
  const std::filesystem::path path(file);
  facts_.ends.push_back(
      {*eos, fmt::format("{}: {}", by_file ? (path.parent_path() / named->source).string() : file, role)});
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path) {
  return read_named("data.tokenizer", [&] { return open_any(path); });
}

std::vector<i32> end_tokens(const Tokenizer& tokenizer, const std::string& model_folder, i64 vocab_size) {
  std::vector<EndToken> ends = tokenizer.facts().ends;
  if (!model_folder.empty()) std::ranges::move(tokenizer::read_end_tokens(model_folder), std::back_inserter(ends));
  std::vector<i32> ids;
  for (const auto& [id, source] : ends) {
    DS_CHECK(id < vocab_size, Errc::Unavailable, "{}: {} is no token of the model, whose vocabulary has {}", source, id,
             vocab_size);
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

}  // namespace ds
