// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/sentence_piece.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "base/file.h"
#include "data/tokenizer/directory.h"
#include "data/tokenizer/identity.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

using Processor = sentencepiece::SentencePieceProcessor;

template <class Status>
void check(const Status& status, const std::string& path) {
  DS_CHECK(status.ok(), Errc::Corrupt, "{}: {}", path, status.ToString());
}

std::shared_ptr<const Processor> load(const std::string& bytes, const std::string& path) {
  auto processor = std::make_shared<Processor>();
  const auto status = processor->LoadFromSerializedProto(bytes);
  DS_CHECK(status.ok(), Errc::Corrupt, "{}: not a SentencePiece model: {}", path, status.ToString());
  return processor;
}

void encode_with(const Processor& processor, const std::string& path, std::string_view text, std::vector<i32>& ids) {
  std::vector<int> found;
  check(processor.Encode({text.data(), text.size()}, &found), path);
  ids.insert(ids.end(), found.begin(), found.end());
}

std::optional<i32> special_of(const Processor& processor, SpecialToken kind) {
  const int id = kind == SpecialToken::Bos   ? processor.bos_id()
                 : kind == SpecialToken::Eos ? processor.eos_id()
                 : kind == SpecialToken::Unk ? processor.unk_id()
                 : kind == SpecialToken::Pad ? processor.pad_id()
                                             : -1;
  if (id < 0) return std::nullopt;
  return id;
}

void digest_file(Digest& digest, const std::string& content, bool as_is) {
  digest.add(content);
  digest.add(as_is);
}

// Lines of base64, a blank and a rank.
bool is_tiktoken(std::string_view text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  const size_t blank = line.find(' ');
  return blank != line.npos && blank > 0 && blank + 1 < line.size() &&
         line.substr(0, blank).find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=") ==
             line.npos &&
         line.find_first_not_of("0123456789\r", blank + 1) == line.npos;
}

// A reader of protocol buffers, as far as the library hides what they contain. The library has accepted the bytes; a
// reader that comes to an end that it does not expect stops.
class Proto {
 public:
  explicit Proto(std::string_view bytes) : rest_(bytes) {}
  struct Field {
    u64 number = 0, value = 0;  // of a varint
    std::string_view bytes = {};
  };
  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const auto tag = varint();
    if (!tag) return std::nullopt;
    Field field{.number = *tag >> 3};
    switch (*tag & 7) {
      case 0: {
        const auto value = varint();
        if (!value) return std::nullopt;
        field.value = *value;
        return field;
      }
      case 1: return skip(8) ? std::optional(field) : std::nullopt;
      case 2: {
        const auto size = varint();
        if (!size || *size > rest_.size()) return std::nullopt;
        field.bytes = rest_.substr(0, *size);
        rest_.remove_prefix(*size);
        return field;
      }
      case 5: return skip(4) ? std::optional(field) : std::nullopt;
      default: return std::nullopt;
    }
  }

 private:
  std::optional<u64> varint() {
    u64 value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<u8>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<u64>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }
  bool skip(size_t bytes) {
    if (rest_.size() < bytes) return false;
    rest_.remove_prefix(bytes);
    return true;
  }
  std::string_view rest_;
};

// Fields of sentencepiece_model.proto.
constexpr u64 kPieces = 1, kTrainer = 2, kNormalizer = 3, kModelType = 3, kUnigram = 1, kPieceType = 3, kCharsMap = 2,
              kRemoveBlanks = 4;
constexpr u64 kUserDefined = 4;

class SentencePiece : public Tokenizer {
 public:
  SentencePiece(const std::string& path, const std::string& bytes, const std::string& content,
                std::vector<EndToken> ends)
      : path_(path), processor_(load(bytes, path)) {
    Digest model;
    digest_file(model, content, true);
    identity_ = fmt::format("SentencePiece of {} ids, {}{}{}{}", processor_->GetPieceSize(), content,
                            other_files_identity(Json::object()), parts_identity(model, nullptr, nullptr, {}),
                            by_sentence_piece());
    facts_.ends = std::move(ends);
    for (const SpecialToken kind : kSpecialTokens) {
      if (const auto id = special(kind))
        facts_.named.push_back({std::string(special_name(kind)), piece(*id), *id, "tokenizer.model"});
    }
    add_eos_to_ends(path_);
  }

  void encode(std::string_view text, std::vector<i32>& ids) const override {
    std::string mended;
    if (!is_utf8(text)) text = mended = replace_invalid_utf8(text);
    for (size_t i = 0; i < facts_.named.size(); ++i) {
      if (text.find(facts_.named[i].content) != text.npos) spelt_[i].store(true, std::memory_order_relaxed);
    }
    encode_with(*processor_, path_, text, ids);
  }
  std::vector<std::string> warnings_of_texts() const override {
    std::vector<std::string> warnings;
    for (size_t i = 0; i < facts_.named.size(); ++i) {
      if (spelt_[i].load(std::memory_order_relaxed))
        warnings.push_back(
            fmt::format("{}: texts spell out '{}', which SentencePiece cuts into pieces like other text; "
                        "with a tokenizer_config.json of the class LlamaTokenizer beside it, as "
                        "transformers has it, it is the token {}",
                        path_, facts_.named[i].content, facts_.named[i].id));
    }
    return warnings;
  }

  std::string decode(std::span<const i32> ids) const override {
    std::vector<int> known;
    for (const i32 id : ids)
      if (id >= 0 && id < processor_->GetPieceSize()) known.push_back(id);
    std::string text;
    check(processor_->Decode(known, &text), path_);
    return text;
  }

  std::string piece(i32 id) const override {
    return id >= 0 && id < processor_->GetPieceSize() ? processor_->IdToPiece(id) : std::string();
  }
  i64 vocab_size() const noexcept override { return processor_->GetPieceSize(); }
  std::optional<i32> special(SpecialToken kind) const noexcept override { return special_of(*processor_, kind); }
  bool adds_bos() const noexcept override { return processor_->bos_id() >= 0; }
  std::string identity() const override { return identity_; }

 private:
  std::string path_, identity_;
  std::shared_ptr<const Processor> processor_;
  mutable std::array<std::atomic<bool>, kNumSpecialTokens> spelt_{};  // by facts_.named: in a text that was encoded
};

class SentencePieceModel : public Model {
 public:
  SentencePieceModel(std::string path, std::shared_ptr<const Processor> processor, Vocabulary vocabulary,
                     std::string content, bool as_is)
      : Model(std::move(vocabulary)),
        path_(std::move(path)),
        processor_(std::move(processor)),
        content_(std::move(content)),
        as_is_(as_is) {}
  void encode(std::string_view word, std::vector<i32>& ids) const override {
    encode_with(*processor_, path_, word, ids);
  }
  std::string_view kind() const noexcept override { return "SentencePiece"; }
  std::optional<std::string> unk_token() const override {
    return processor_->unk_id() < 0 ? std::nullopt : std::optional(processor_->IdToPiece(processor_->unk_id()));
  }
  void digest(Digest& digest) const override { digest_file(digest, content_, as_is_); }

 private:
  std::string path_;
  std::shared_ptr<const Processor> processor_;
  std::string content_;
  bool as_is_;
};

}  // namespace

SentencePieceFile::SentencePieceFile(std::string path, std::string bytes)
    : path_(std::move(path)), bytes_(std::move(bytes)) {
  if (is_tiktoken(bytes_))
    throw Error(Errc::Unavailable, fmt::format("{}: a tiktoken file, not a SentencePiece model, is not supported; the "
                                               "model's tokenizer.json is",
                                               path_));
  load(bytes_, path_);
}

std::string SentencePieceFile::content_identity() const {
  return tokenizer::content_identity("tokenizer.model", bytes_);
}

std::vector<SentencePieceFile::Piece> SentencePieceFile::pieces() const {
  const auto processor = load(bytes_, path_);
  std::vector<Piece> pieces;
  for (int id = 0; id < processor->GetPieceSize(); ++id)
    pieces.push_back({processor->IdToPiece(id), processor->IsControl(id), false});
  size_t at = 0;
  Proto model(bytes_);
  while (const auto field = model.next()) {
    if (field->number != kPieces) continue;
    Proto piece(field->bytes);
    while (const auto member = piece.next())
      if (member->number == kPieceType && at < pieces.size())
        pieces[at].is_user_defined = member->value == kUserDefined;
    ++at;
  }
  return pieces;
}

std::optional<i32> SentencePieceFile::special(SpecialToken kind) const {
  return special_of(*load(bytes_, path_), kind);
}

bool SentencePieceFile::normalizes() const {
  bool has_rules = false, removes = true;
  Proto model(bytes_);
  while (const auto field = model.next()) {
    if (field->number != kNormalizer) continue;
    Proto normalizer(field->bytes);
    while (const auto member = normalizer.next()) {
      if (member->number == kCharsMap) has_rules = !member->bytes.empty();
      if (member->number == kRemoveBlanks) removes = member->value != 0;
    }
  }
  return has_rules || removes;
}

bool SentencePieceFile::is_unigram() const {
  u64 type = kUnigram;
  Proto model(bytes_);
  while (const auto field = model.next()) {
    if (field->number != kTrainer) continue;
    Proto trainer(field->bytes);
    while (const auto member = trainer.next())
      if (member->number == kModelType) type = member->value;
  }
  return type == kUnigram;
}

std::unique_ptr<Tokenizer> SentencePieceFile::tokenizer(std::vector<EndToken> ends) const {
  return std::make_unique<SentencePiece>(path_, bytes_, content_identity(), std::move(ends));
}

std::unique_ptr<Model> SentencePieceFile::model(bool as_is) const {
  // A message that comes again is merged with the one before: no rules, no blank in front, no blank taken away.
  static constexpr std::string_view kNeutral("\x1A\x06\x12\x00\x18\x00\x20\x00", 8);
  const auto processor = load(as_is ? bytes_ : bytes_ + std::string(kNeutral), path_);
  std::vector<std::string> pieces;
  for (int id = 0; id < processor->GetPieceSize(); ++id) pieces.push_back(processor->IdToPiece(id));
  return std::make_unique<SentencePieceModel>(path_, processor, Vocabulary(pieces, {path_, "pieces"}),
                                              content_identity(), as_is);
}

std::string by_sentence_piece() { return fmt::format("{}sentencepiece {}", kByLibrary, DS_SENTENCEPIECE_VERSION); }

}  // namespace ds::tokenizer
