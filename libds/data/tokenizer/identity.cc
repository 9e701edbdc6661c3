// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/identity.h"

#include <xxhash.h>

#include <algorithm>
#include <map>

#include "data/tokenizer.h"

namespace ds {
namespace {

// An identity without the version of a library, taken apart. Older versions leave out the hash of the files beside the
// vocabulary, or the parts.
struct TokenizerIdentity {
  std::string_view vocabulary;
  std::optional<std::string_view> others;
  std::map<std::string_view, std::string_view> parts;

  explicit TokenizerIdentity(std::string_view identity) : vocabulary(identity.substr(0, identity.find(kByLibrary))) {
    if (const size_t at = vocabulary.find(kParts); at != vocabulary.npos) {
      std::string_view rest = vocabulary.substr(at + kParts.size());
      vocabulary = vocabulary.substr(0, at);
      const auto word = [&] {
        const std::string_view found = rest.substr(0, rest.find(' '));
        rest.remove_prefix(std::min(found.size() + 1, rest.size()));
        return found;
      };
      while (!rest.empty()) {
        const std::string_view name = word();
        parts[name] = word();
      }
    }
    const size_t at = vocabulary.find(kOtherFiles);
    if (at == vocabulary.npos) return;
    others = vocabulary.substr(at);
    vocabulary = vocabulary.substr(0, at);
  }
  // Older versions hashed and counted vocab.json and vocab.txt together with the files beside them: only their names
  // can be compared.
  std::string_view comparable() const {
    for (const std::string_view name : {"vocab.json + merges.txt xxh3 ", "vocab.txt xxh3 "})
      if (const size_t at = vocabulary.find(name); at != vocabulary.npos) return vocabulary.substr(at, name.size());
    return vocabulary;
  }
};

}  // namespace

bool is_same_tokenizer(std::string_view a, std::string_view b) {
  const TokenizerIdentity x(a), y(b);
  if (!x.parts.empty() && !y.parts.empty()) return x.parts == y.parts;
  if (x.others.has_value() == y.others.has_value()) return x.vocabulary == y.vocabulary && x.others == y.others;
  return x.comparable() == y.comparable();
}

std::string difference_of_tokenizers(std::string_view now, std::string_view saved, std::string_view saved_by) {
  const TokenizerIdentity x(saved), y(now);
  std::vector<std::string_view> differ;
  for (const auto& [name, hash] : y.parts)
    if (const auto it = x.parts.find(name); it != x.parts.end() && it->second != hash) differ.push_back(name);
  if (differ.empty()) return fmt::format("data.tokenizer is {}, but {} {}", now, saved_by, saved);
  const auto without_hashes = [](const TokenizerIdentity& of) {
    return of.vocabulary.substr(0, of.vocabulary.find(" xxh3 "));
  };
  return fmt::format("data.tokenizer is {}, and {} {}, of which {} differ{}, by this file or those beside it",
                     without_hashes(y), saved_by, without_hashes(x), fmt::join(differ, " and "),
                     differ.size() == 1 ? "s" : "");
}

namespace tokenizer {

void Digest::add(std::string_view text) { value_ = XXH3_64bits_withSeed(text.data(), text.size(), value_ + 1); }

Json in_full(const Json& part) {
  if (part.is_array()) {
    Json all = Json::array();
    for (const Json& inner : part) all.push_back(in_full(inner));
    return all;
  }
  if (!part.is_object()) return part;
  Json full = Json::object();
  for (const auto& [key, value] : part.items())
    if (!value.is_null() && key != "trim_offsets" && key != "str_rep") full[key] = in_full(value);
  const Json* const type = find_member(full, "type");
  const auto otherwise = [&](std::string_view of, const char* key, const Json& value) {
    if (type != nullptr && *type == of && !full.contains(key)) full[key] = value;
  };
  otherwise("ByteLevel", "use_regex", true);
  otherwise("Punctuation", "behavior", "Isolated");
  otherwise("Split", "invert", false);
  otherwise("Metaspace", "split", true);
  otherwise("Metaspace", "prepend_scheme", full.value("add_prefix_space", Json(true)) == false ? "never" : "always");
  if (type != nullptr && *type == "Metaspace") full.erase("add_prefix_space");
  return full;
}

std::string content_identity(const std::string& name, std::string_view content) {
  return fmt::format("{} xxh3 {:016x}", name, XXH3_64bits(content.data(), content.size()));
}

std::string other_files_identity(const Json& changes) {
  const std::string text = changes.dump(-1, ' ', false, Json::error_handler_t::replace);
  return fmt::format("{}{:016x}", kOtherFiles, XXH3_64bits(text.data(), text.size()));
}

std::string parts_identity(const Digest& model, const Json& normalizer, const Json& pre_tokenizer,
                           const Digest& added_tokens) {
  const auto hash = [](const Json& part) {
    Digest digest;
    digest.add(in_full(part).dump(-1, ' ', false, Json::error_handler_t::replace));
    return digest.value();
  };
  return fmt::format("{}model {:016x} normalizer {:016x} pre_tokenizer {:016x} added_tokens {:016x}", kParts,
                     model.value(), hash(normalizer), hash(pre_tokenizer), added_tokens.value());
}

}  // namespace tokenizer
}  // namespace ds
