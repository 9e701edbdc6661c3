// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/model.h"

#include <xxhash.h>

#include <algorithm>
#include <limits>

namespace ds::tokenizer {

size_t Vocabulary::Hash::operator()(std::string_view s) const noexcept { return XXH3_64bits(s.data(), s.size()); }

Vocabulary::Vocabulary(const Json& object, const Place& place) {
  if (!object.is_object()) place.corrupt("must be an object of tokens and ids");
  ids_.reserve(object.size());
  tokens_.reserve(object.size());
  for (const auto& [token, id] : object.items()) {
    if (!id.is_number_integer() || id < 0 || id >= std::numeric_limits<i32>::max())
      (place / token).corrupt("an id must be an integer from 0 to 2^31 - 2");
    const auto [entry, inserted] = ids_.emplace(token, id.get<i32>());
    if (const auto [other, added] = tokens_.emplace(entry->second, &entry->first); !added)
      place.corrupt(fmt::format("'{}' and '{}' have the same id {}", *other->second, token, entry->second));
    num_ids_ = std::max<i64>(num_ids_, entry->second + 1);
  }
}

std::optional<i32> Vocabulary::id(std::string_view token) const {
  const auto it = ids_.find(token);
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

const std::string* Vocabulary::token(i32 id) const {
  const auto it = tokens_.find(id);
  return it == tokens_.end() ? nullptr : it->second;
}

std::unique_ptr<Model> make_model(const Json& part, const Place& place, bool byte_level) {
  Fields f(part, place);
  // Old files name no type; the merges tell.
  const std::string type = f.text("type", part.is_object() && part.contains("merges") ? "BPE" : "WordPiece");
  if (type != "BPE" && type != "WordPiece")
    place.unsupported(fmt::format("'{}' is not supported{}", type,
                                  type == "Unigram" ? "; its SentencePiece file, tokenizer.model, is" : ""));
  if (byte_level && type == "WordPiece") place.unsupported("'WordPiece' behind 'ByteLevel' is not supported");
  Vocabulary vocabulary(f.at("vocab"), place / "vocab");
  std::unique_ptr<Model> model =
      type == "BPE" ? make_bpe(f, std::move(vocabulary), byte_level) : make_word_piece(f, std::move(vocabulary));
  f.done();
  return model;
}

}  // namespace ds::tokenizer
