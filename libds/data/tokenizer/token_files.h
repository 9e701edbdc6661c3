// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens that a tokenizer's files name beside its vocabulary, and the list of added tokens that becomes of them. All
// look-ups take the logarithm of their number.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/classes.h"
#include "data/tokenizer/directory.h"

namespace ds::tokenizer {

// An id that a file states; nothing for one that no token can have, which is reported where the file is read whole.
std::optional<i64> id_of(const Json* json);

// An added token; where no file says whether it is normalized, that depends on the other flags when it is added.
struct Token {
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, special = false;
  std::optional<bool> normalized = std::nullopt;

  bool is_normalized() const { return normalized.value_or(!special); }
  bool same_as(const Token& other) const;
  bool has_strips() const { return lstrip || rstrip || single_word; }
  bool is_plain() const { return !has_strips() && special && !is_normalized(); }
  Json json(i64 id) const;
};
// Throws Errc::Corrupt.
Token read_token(const Json& json, const Place& place);

// The tokens of a model, before any are added.
class OwnVocabulary {
 public:
  // Of `model` or, if that is null, of the "model" of `file`, which this looks into. Members that cannot be right count
  // for nothing here.
  OwnVocabulary(const Model* model, const Json& file);
  std::optional<i64> id(const std::string& content) const;
  i64 count() const noexcept { return count_; }
  i64 num_ids() const noexcept { return num_ids_; }  // one more than the largest

 private:
  const Vocabulary* vocabulary_ = nullptr;
  const Json* object_ = nullptr;
  std::unordered_map<std::string_view, i64> list_;
  i64 count_ = 0, num_ids_ = 0;
};

// A special token of the files: its name and, if the file has an object, its flags.
struct Special {
  Token token;
  bool has_flags = false;
  std::string source;  // the file
};

// A name, or an object with flags. Throws Errc::Corrupt.
Special read_special(const Json& value, const std::string& file, const Place& place);

// The tokens of tokenizer_config.json, special_tokens_map.json and added_tokens.json, by the rules of AutoTokenizer:
// the last two do not count beside added_tokens_decoder.
class TokenFiles {
 public:
  // `own_tokens`: the added tokens of tokenizer.json, or an empty array. Throws Errc::Corrupt.
  TokenFiles(const Directory& directory, const Json& own_tokens);

  struct Listed {
    Token token;
    std::string source;
  };
  const std::map<i64, Listed>& listed() const noexcept { return listed_; }  // by the ids that the files state
  const std::map<SpecialToken, Special>& special() const noexcept { return special_; }
  // Whether the files say, by null, that there is no such token; the class's name for it does not count then.
  bool has_none(SpecialToken kind) const { return none_.contains(kind); }
  const std::vector<Special>& more() const noexcept { return more_; }  // without a role
  // Tokens without a role that only special_tokens_map.json names.
  const std::vector<std::string>& only_in_map() const noexcept { return only_in_map_; }
  // The token that is listed under this content; null: none.
  const Token* find_listed(const std::string& content) const;
  // The contents of all special tokens.
  std::set<std::string> names() const;

 private:
  void read_settings(const Directory& d, const Json& file, const char* name);
  void read_decoder(const Json& decoder, const Place& place);
  void read_added(const Directory& d);

  std::map<i64, Listed> listed_;
  std::map<std::string, i64> listed_ids_;
  std::map<SpecialToken, Special> special_;
  std::set<SpecialToken> none_;
  std::vector<Special> more_;
  std::vector<std::string> only_in_map_;
};

// Tokens without a role that a class adds to `more`, those of the files. Throws Errc::Corrupt and Errc::Unavailable.
std::vector<Special> tokens_of_class(const Directory& directory, const ClassRow& row, const std::vector<Special>& more);

// Tokens to add, in order, with the file or class that each comes from. One content may come several times.
class Adding {
 public:
  struct Entry {
    Token token;
    std::string source;
  };
  void push(Token token, std::string source);
  // Makes those special that have one of these contents.
  void mark_special(const std::set<std::string>& names);
  const Token* find(const std::string& content) const;  // the first one; null: none
  bool has_same(const Token& token) const;
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::map<std::string, std::vector<size_t>> by_content_;
};

// The added tokens of a tokenizer, numbered and replaced as Hugging Face's tokenizers do it.
class AddedList {
 public:
  // `own`: those of the vocabulary's file.
  AddedList(const Json& own, const OwnVocabulary& vocabulary, const Place& place);

  const Json& list() const noexcept { return list_; }
  const std::vector<Token>& tokens() const noexcept { return tokens_; }
  std::optional<i64> id(const std::string& content) const;
  bool contains(const std::string& content) const { return entries_.contains(content); }
  bool has_same(const Token& token) const;

  void add(const Adding& adding);

  // Tokens that are found in another way than their last flags say: as in transformers 4, a special token is found as
  // its first flags say, and another one as any of its flags say.
  TokenMatches matches() const;

 private:
  struct Entry {
    size_t at = 0;
    i64 id = 0;
  };
  void add(const Token& token);
  void note(const Token& token);

  const OwnVocabulary& vocabulary_;
  i64 next_;
  Json list_ = Json::array();
  std::vector<Token> tokens_, own_;  // own_: of the first ones, as they were
  std::map<std::string, Entry> entries_;
  std::map<std::string, bool> first_special_;  // whether the first special token of this content is normalized
  TokenMatches found_;                         // of those that are not special
};

}  // namespace ds::tokenizer
