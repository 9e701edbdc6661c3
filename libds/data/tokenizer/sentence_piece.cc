// SPDX-License-Identifier: Apache-2.0
#include <sentencepiece_processor.h>

#include <algorithm>

#include "base/file.h"
#include "data/tokenizer/files.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

class SentencePiece : public Tokenizer {
 public:
  explicit SentencePiece(const std::string& path) : path_(path) {
    const std::string model = read_text_file(path, kMostFileBytes);
    if (is_tiktoken(model))
      throw Error(Errc::Unavailable,
                  fmt::format("{}: a tiktoken file, not a SentencePiece model, is not supported; the "
                              "model's tokenizer.json is",
                              path));
    const auto status = processor_.LoadFromSerializedProto(model);
    DS_CHECK(status.ok(), Errc::Corrupt, "{}: not a SentencePiece model: {}", path, status.ToString());
    identity_ = fmt::format("SentencePiece of {} ids, {}{}sentencepiece {}", processor_.GetPieceSize(),
                            content_identity("tokenizer.model", model), kByLibrary, DS_SENTENCEPIECE_VERSION);
  }

  void encode(std::string_view text, std::vector<i32>& ids) const override {
    std::string mended;
    if (!is_utf8(text)) text = mended = replace_invalid_utf8(text);
    std::vector<int> found;
    check(processor_.Encode({text.data(), text.size()}, &found));
    ids.insert(ids.end(), found.begin(), found.end());
  }

  std::string decode(std::span<const i32> ids) const override {
    std::vector<int> known;
    for (const i32 id : ids)
      if (id >= 0 && id < processor_.GetPieceSize()) known.push_back(id);
    std::string text;
    check(processor_.Decode(known, &text));
    return text;
  }

  i64 vocab_size() const noexcept override { return processor_.GetPieceSize(); }
  std::optional<i32> special(SpecialToken kind) const noexcept override {
    const int id = kind == SpecialToken::Bos   ? processor_.bos_id()
                   : kind == SpecialToken::Eos ? processor_.eos_id()
                   : kind == SpecialToken::Unk ? processor_.unk_id()
                   : kind == SpecialToken::Pad ? processor_.pad_id()
                                               : -1;
    if (id < 0) return std::nullopt;
    return id;
  }
  bool adds_bos() const noexcept override { return processor_.bos_id() >= 0; }
  std::string identity() const override { return identity_; }

 private:
  // Lines of base64, a blank and a rank.
  static bool is_tiktoken(std::string_view text) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const size_t blank = line.find(' ');
    return blank != line.npos && blank > 0 && blank + 1 < line.size() &&
           line.substr(0, blank).find_first_not_of(
               "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=") == line.npos &&
           line.find_first_not_of("0123456789\r", blank + 1) == line.npos;
  }
  template <class Status>
  void check(const Status& status) const {
    DS_CHECK(status.ok(), Errc::Corrupt, "{}: {}", path_, status.ToString());
  }

  std::string path_, identity_;
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::unique_ptr<Tokenizer> open_sentence_piece(const std::string& path) {
  return std::make_unique<SentencePiece>(path);
}

}  // namespace ds::tokenizer
