// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/token_files.h"

#include <algorithm>
#include <limits>

namespace ds::tokenizer {
namespace {

constexpr const char* kMapFile = "special_tokens_map.json";
constexpr const char* kAddedFile = "added_tokens.json";

}  // namespace

std::optional<i64> id_of(const Json* json) {
  constexpr i64 kMost = std::numeric_limits<i32>::max();
  if (json == nullptr || !json->is_number_integer() || *json < 0 || *json >= kMost) return std::nullopt;
  return json->get<i64>();
}

bool Token::same_as(const Token& o) const {
  return content == o.content && single_word == o.single_word && lstrip == o.lstrip && rstrip == o.rstrip &&
         special == o.special && is_normalized() == o.is_normalized();
}

Json Token::json(i64 id) const {
  return {{"id", id},         {"content", content}, {"single_word", single_word},   {"lstrip", lstrip},
          {"rstrip", rstrip}, {"special", special}, {"normalized", is_normalized()}};
}

Token read_token(const Json& json, const Place& place) {
  if (!json.is_object()) place.corrupt("must be an object with content");
  Token token;
  const auto flag = [&](const char* key) -> std::optional<bool> {
    const auto it = json.find(key);
    if (it == json.end() || it->is_null()) return std::nullopt;
    if (!it->is_boolean()) (place / key).corrupt("must be true or false");
    return it->get<bool>();
  };
  const auto content = json.find("content");
  if (content == json.end() || !content->is_string()) (place / "content").corrupt("must be a string");
  token.content = content->get<std::string>();
  token.single_word = flag("single_word").value_or(false);
  token.lstrip = flag("lstrip").value_or(false);
  token.rstrip = flag("rstrip").value_or(false);
  token.special = flag("special").value_or(false);
  token.normalized = flag("normalized");
  return token;
}

Special read_special(const Json& value, const std::string& file, const Place& place) {
  Special special{.token = {}, .has_flags = value.is_object(), .source = file};
  if (value.is_object()) {
    special.token = read_token(value, place);
  } else if (value.is_string()) {
    special.token.content = value.get<std::string>();
  } else {
    place.corrupt("must be a string, or an object with content");
  }
  return special;
}

OwnVocabulary::OwnVocabulary(const Model* model, const Json& file) {
  if (model != nullptr) {
    vocabulary_ = &model->vocabulary();
    count_ = vocabulary_->num_tokens();
    num_ids_ = vocabulary_->num_ids();
    return;
  }
  const Json* const part = find_member(file, "model");
  const Json* const vocab = part != nullptr && part->is_object() ? find_member(*part, "vocab") : nullptr;
  if (vocab == nullptr) return;
  count_ = std::ssize(*vocab);
  if (vocab->is_object()) {
    object_ = vocab;
    for (const auto& [content, id] : vocab->items()) num_ids_ = std::max(num_ids_, id_of(&id).value_or(-1) + 1);
  } else if (vocab->is_array()) {
    num_ids_ = count_;
    for (i64 id = 0; id < count_; ++id) {
      const Json& piece = (*vocab)[static_cast<size_t>(id)];
      if (piece.is_array() && !piece.empty() && piece[0].is_string())
        list_[piece[0].get_ref<const std::string&>()] = id;
    }
  }
}

std::optional<i64> OwnVocabulary::id(const std::string& content) const {
  if (vocabulary_ != nullptr) return vocabulary_->id(content);
  if (object_ != nullptr) return id_of(find_member(*object_, content));
  const auto it = list_.find(content);
  return it == list_.end() ? std::nullopt : std::optional(it->second);
}

TokenFiles::TokenFiles(const Directory& d, const Json& own_tokens) {
  read_settings(d, d.config, kConfigFile);
  if (const Json* const decoder = d.setting("added_tokens_decoder")) {
    read_decoder(*decoder, d.place(kConfigFile, "added_tokens_decoder"));
  } else {
    const size_t num_more = more_.size();
    read_settings(d, d.special, kMapFile);
    for (size_t i = num_more; i < more_.size(); ++i) only_in_map_.push_back(more_[i].token.content);
    read_added(d);
    for (size_t i = 0; i < own_tokens.size(); ++i) {
      const Token token = read_token(own_tokens[i], {d.file, fmt::format("added_tokens[{}]", i)});
      if (const auto id = id_of(find_member(own_tokens[i], "id"))) listed_[*id] = {token, "tokenizer.json"};
    }
  }
  for (const auto& [id, listed] : listed_) listed_ids_[listed.token.content] = id;
}

const Token* TokenFiles::find_listed(const std::string& content) const {
  const auto it = listed_ids_.find(content);
  return it == listed_ids_.end() ? nullptr : &listed_.at(it->second).token;
}

std::set<std::string> TokenFiles::names() const {
  std::set<std::string> names;
  for (const auto& [kind, special] : special_) names.insert(special.token.content);
  for (const Special& special : more_) names.insert(special.token.content);
  return names;
}

void TokenFiles::read_settings(const Directory& d, const Json& file, const char* name) {
  for (const SpecialToken kind : kSpecialTokens) {
    const std::string key(special_name(kind));
    const auto it = file.find(key);
    if (it == file.end()) continue;
    special_.erase(kind);
    none_.erase(kind);
    if (it->is_null()) {
      none_.insert(kind);
    } else {
      special_[kind] = read_special(*it, name, d.place(name, key));
    }
  }
  std::set<std::string> known;
  for (const Special& special : more_) known.insert(special.token.content);
  for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
    const Json* const list = find_member(file, key);
    if (list == nullptr) continue;
    const Place place = d.place(name, key);
    if (!list->is_array()) place.corrupt("must be a list of tokens");
    for (const Json& value : *list) {
      Special special = read_special(value, name, place);
      if (known.insert(special.token.content).second) more_.push_back(std::move(special));
    }
  }
}

void TokenFiles::read_decoder(const Json& decoder, const Place& place) {
  if (!decoder.is_object()) place.corrupt("must be an object");
  for (const auto& [id, token] : decoder.items()) {
    const bool digits = !id.empty() && id.size() < 10 && id.find_first_not_of("0123456789") == id.npos;
    if (!digits || !token.is_object()) (place / id).corrupt("must be an id with an object with content");
    listed_[std::stoll(id)] = {read_token(token, place / id), kConfigFile};
  }
}

void TokenFiles::read_added(const Directory& d) {
  const std::set<std::string> special = names();
  for (const auto& [content, id] : d.added.items()) {
    if (!id.is_number_integer() || id < 0 || id > 999'999'999)
      d.place(kAddedFile, content).corrupt("must be an id of at most nine digits");
    Token token{.content = content, .special = special.contains(content)};
    listed_[id.get<i64>()] = {std::move(token), kAddedFile};
  }
}

std::vector<Special> tokens_of_class(const Directory& d, const ClassRow& row, const std::vector<Special>& more) {
  std::vector<Special> tokens;
  const std::string source = fmt::format("class {}", row.name);
  if (row.shape == Shape::CodeLlama) {
    constexpr std::pair<const char*, const char*> kInfill[] = {{"prefix_token", "\u2581<PRE>"},
                                                               {"middle_token", "\u2581<MID>"},
                                                               {"suffix_token", "\u2581<SUF>"},
                                                               {"eot_token", "\u2581<EOT>"}};
    for (const auto& [key, content] : kInfill) {
      const auto it = d.config.find(key);
      if (it == d.config.end()) {
        tokens.push_back({.token = {.content = content}, .source = source});
      } else if (!it->is_null()) {
        tokens.push_back(read_special(*it, kConfigFile, d.place(kConfigFile, key)));
      }
    }
  }
  if (row.shape == Shape::T5) {
    Fields settings(d.config, d.place(kConfigFile, ""));
    const i64 count = settings.integer("extra_ids", 100);
    constexpr i64 kMost = 100'000;
    if (count > kMost) d.place(kConfigFile, "extra_ids").unsupported(fmt::format("more than {}", kMost));
    const i64 named = std::ranges::count_if(
        more, [](const Special& special) { return special.token.content.find("<extra_id_") != std::string::npos; });
    if (named > 0 && count > 0 && named != count)
      d.place(kConfigFile, "extra_ids")
          .unsupported(
              fmt::format("{}, and the files name {} tokens <extra_id..>, which the reference refuses", count, named));
    for (i64 i = 0; i < count && named == 0; ++i)
      tokens.push_back({.token = {.content = fmt::format("<extra_id_{}>", i)}, .source = source});
  }
  return tokens;
}

void Adding::push(Token token, std::string source) {
  by_content_[token.content].push_back(entries_.size());
  entries_.push_back({std::move(token), std::move(source)});
}

void Adding::mark_special(const std::set<std::string>& names) {
  for (Entry& entry : entries_) entry.token.special |= names.contains(entry.token.content);
}

const Token* Adding::find(const std::string& content) const {
  const auto it = by_content_.find(content);
  return it == by_content_.end() ? nullptr : &entries_[it->second.front()].token;
}

bool Adding::has_same(const Token& token) const {
  const auto it = by_content_.find(token.content);
  return it != by_content_.end() &&
         std::ranges::any_of(it->second, [&](size_t i) { return entries_[i].token.same_as(token); });
}

AddedList::AddedList(const Json& own, const OwnVocabulary& vocabulary, const Place& place)
    : vocabulary_(vocabulary), next_(vocabulary.count()) {
  for (size_t i = 0; i < own.size(); ++i) {
    Token token = read_token(own[i], {place.file, fmt::format("{}[{}]", place.path, i)});
    const i64 number = id_of(find_member(own[i], "id")).value_or(0);
    list_.push_back(own[i]);
    next_ = std::max(next_, number + 1);
    entries_[token.content] = {list_.size() - 1, number};
    note(token);
    tokens_.push_back(std::move(token));
  }
  own_ = tokens_;
}

std::optional<i64> AddedList::id(const std::string& content) const {
  const auto it = entries_.find(content);
  return it != entries_.end() ? std::optional(it->second.id) : vocabulary_.id(content);
}

bool AddedList::has_same(const Token& token) const {
  const auto it = entries_.find(token.content);
  return it != entries_.end() && tokens_[it->second.at].same_as(token);
}

void AddedList::add(const Adding& adding) {
  for (const auto& [token, source] : adding.entries())
    if (token.special && !token.content.empty()) first_special_.try_emplace(token.content, token.is_normalized());
  for (const auto& [token, source] : adding.entries())
    if (!token.content.empty()) add(token);
}

void AddedList::add(const Token& token) {
  const auto it = entries_.find(token.content);
  if (it == entries_.end()) {
    note(token);
    const i64 id = vocabulary_.id(token.content).value_or(next_);
    next_ = std::max(next_, id + 1);
    list_.push_back(token.json(id));
    tokens_.push_back(token);
    entries_[token.content] = {list_.size() - 1, id};
    return;
  }
  const auto [at, id] = it->second;
  // The library passes over a token that it had before all of these.
  if ((at < own_.size() && own_[at].same_as(token)) || tokens_[at].same_as(token)) return;
  note(token);
  list_[at] = token.json(id);
  tokens_[at] = token;
}

TokenMatches AddedList::matches() const {
  TokenMatches all;
  for (const Token& token : tokens_) {
    TokenMatch match;
    const auto special = first_special_.find(token.content);
    match.special = special != first_special_.end();
    if (match.special) (special->second ? match.normalized : match.raw) = true;
    if (const auto it = found_.find(token.content); it != found_.end()) {
      match.raw |= it->second.raw;
      match.normalized |= it->second.normalized;
    }
    if (match.raw == !token.is_normalized() && match.normalized == token.is_normalized() &&
        match.special == token.special)
      continue;
    all.emplace(token.content, match);
  }
  return all;
}

void AddedList::note(const Token& token) {
  if (token.special) first_special_.try_emplace(token.content, token.is_normalized());
  if (first_special_.contains(token.content)) return;
  TokenMatch& match = found_[token.content];
  (token.is_normalized() ? match.normalized : match.raw) = true;
}

}  // namespace ds::tokenizer
