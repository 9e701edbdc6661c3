// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files of a tokenizer's directory, read once: the one that holds the vocabulary, and those beside it that say how
// it is used. definition.h states which of them counts where they disagree.

#include <map>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizer/fields.h"

namespace ds::tokenizer {

constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr i64 kMostFileBytes = i64{256} << 20;
constexpr i64 kMostSettingsBytes = i64{32} << 20;  // of a file beside the vocabulary

struct Directory {
  enum class Kind : u8 { TokenizerJson, Merges, VocabTxt, SentencePiece };

  std::string folder;
  Kind kind = Kind::TokenizerJson;
  std::string file;  // its path; of vocab.json + merges.txt, vocab.json
  // Objects, empty where the file is missing.
  Json config;      // tokenizer_config.json
  Json special;     // special_tokens_map.json
  Json added;       // added_tokens.json
  Json model;       // config.json
  Json generation;  // generation_config.json
  // The files of a GGUF file, which is read as a directory: their contents by their names.
  std::map<std::string, std::string> inside;

  std::string path(std::string_view name) const;
  bool has(std::string_view name) const;
  std::string vocabulary() const;  // the content of `file`
  Place place(std::string_view name, const std::string& key) const { return {path(name), key}; }
  // A member of tokenizer_config.json; null where it is missing or null. Throws Errc::Corrupt for another type.
  const Json* setting(const std::string& key) const;
  std::optional<bool> flag(const std::string& key) const;
};

// The class of transformers that reads the vocabulary; empty where no file names one. In this order: tokenizer_class of
// tokenizer_config.json and of config.json, and the class of config.json's model_type. Without "Fast".
struct ClassName {
  std::string name;
  std::string file;      // that names it
  bool by_type = false;  // by its model_type alone
};
ClassName class_name(const Directory& directory);

// `path` is a directory, whose vocabulary is the first of tokenizer.json, vocab.json + merges.txt, vocab.txt and
// tokenizer.model, where the class does not ask for another; or one of these files, or a GGUF file. Throws as
// open_tokenizer().
Directory read_directory(const std::string& path);

// The tokens that end a text that is generated: eos_token_id of generation_config.json and of config.json, a number or
// a list. Throws Errc::Corrupt.
std::vector<EndToken> end_tokens(const Directory& directory);
// The same for a directory that need not have a tokenizer.
std::vector<EndToken> read_end_tokens(const std::string& folder);

// A file of words, a line each.
std::string read_words(const std::string& path);

}  // namespace ds::tokenizer
