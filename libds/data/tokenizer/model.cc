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

Vocabulary::Vocabulary(const std::vector<std::string>& list, const Place& place) {
  ids_.reserve(list.size());
  tokens_.reserve(list.size());
  for (const std::string& token : list) {
    const auto [entry, inserted] = ids_.emplace(token, narrow<i32>(num_ids_));
    if (!inserted) place.corrupt(fmt::format("'{}' has the ids {} and {}", token, entry->second, num_ids_));
    tokens_.emplace(entry->second, &entry->first);
    ++num_ids_;
  }
}

void Vocabulary::digest(Digest& digest) const {
  u64 sum = 0;  // in any order
  for (const auto& [token, id] : ids_) sum += XXH3_64bits_withSeed(token.data(), token.size(), static_cast<u64>(id));
  digest.add(static_cast<i64>(sum));
}

void Model::digest(Digest& digest) const {
  digest.add(kind());
  vocabulary_.digest(digest);
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
  if (type != "BPE" && type != "WordPiece" && type != "Unigram")
    place.unsupported(fmt::format("'{}' is not supported", type));
  if (byte_level && type != "BPE") place.unsupported(fmt::format("'{}' behind 'ByteLevel' is not supported", type));
  const auto vocabulary = [&] { return Vocabulary(f.at("vocab"), place / "vocab"); };
  std::unique_ptr<Model> model = type == "BPE"         ? make_bpe(f, vocabulary(), byte_level)
                                 : type == "WordPiece" ? make_word_piece(f, vocabulary())
                                                       : make_unigram(f);
  f.done();
  return model;
}

}  // namespace ds::tokenizer
