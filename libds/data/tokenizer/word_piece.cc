// SPDX-License-Identifier: Apache-2.0
// WordPiece as BERT uses it (Devlin et al., 2018): from the left, the longest piece that the vocabulary has; a word
// that cannot be spelt is unknown as a whole.

#include <algorithm>

#include "data/tokenizer/model.h"
#include "data/tokenizer/unicode.h"

namespace ds::tokenizer {
namespace {

class WordPiece : public Model {
 public:
  WordPiece(Fields& f, Vocabulary vocabulary)
      : Model(std::move(vocabulary)),
        unk_token_(f.text("unk_token", "[UNK]")),
        prefix_(f.text("continuing_subword_prefix", "##")),
        max_chars_(f.integer("max_input_chars_per_word", 100)) {
    const auto unk = vocabulary_.id(unk_token_);
    if (!unk) (f.place() / "unk_token").corrupt(fmt::format("'{}' is not in the vocabulary", unk_token_));
    unk_ = *unk;
    // A word of n characters is looked up n * n / 2 times.
    constexpr i64 kMostChars = 10'000;
    if (max_chars_ < 0 || max_chars_ > kMostChars)
      (f.place() / "max_input_chars_per_word").unsupported(fmt::format("{} is not in 0 to {}", max_chars_, kMostChars));
    for (const auto& [token, id] : vocabulary_.ids()) longest_ = std::max(longest_, token.size());
  }

  void encode(std::string_view word, std::vector<i32>& ids) const override {
    const auto is_lead = [](char c) { return (static_cast<u8>(c) & 0xC0) != 0x80; };
    const size_t before = ids.size();
    bool known = std::count_if(word.begin(), word.end(), is_lead) <= max_chars_;
    std::string piece;
    for (size_t at = 0; known && at < word.size();) {
      piece = at > 0 ? prefix_ : "";
      const size_t affix = piece.size();
      piece += word.substr(at, longest_);
      // If the bound cut a character, its rest goes too.
      for (size_t end = at + piece.size() - affix; end < word.size() && !is_lead(word[end]); --end) piece.pop_back();
      std::optional<i32> id;
      while (piece.size() > affix && !(id = vocabulary_.id(piece))) piece.resize(previous_char(piece, piece.size()));
      if (id) ids.push_back(*id);
      known = id.has_value();
      at += piece.size() - affix;
    }
    if (known) return;
    ids.resize(before);
    ids.push_back(unk_);
  }

  std::string_view kind() const noexcept override { return "WordPiece"; }
  std::optional<std::string> unk_token() const override { return unk_token_; }
  void digest(Digest& digest) const override {
    Model::digest(digest);
    for (const std::string* text : {&unk_token_, &prefix_}) digest.add(*text);
    digest.add(max_chars_);
  }

 private:
  std::string unk_token_, prefix_;
  i64 max_chars_;
  i32 unk_ = 0;
  size_t longest_ = 0;  // bytes of a token
};

}  // namespace

std::unique_ptr<Model> make_word_piece(Fields& fields, Vocabulary vocabulary) {
  return std::make_unique<WordPiece>(fields, std::move(vocabulary));
}

}  // namespace ds::tokenizer
