// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/directory.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "base/content_kind.h"
#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "data/tokenizer/classes.h"
#include "data/tokenizer/gguf_files.h"

namespace ds::tokenizer {
namespace {

namespace fs = std::filesystem;
using Kind = Directory::Kind;
constexpr const char* kExtraTokens = "extra_special_tokens";

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The names in a member that is an object, in the order of `text`, which is a valid object.
std::vector<std::string> names_in_order(const std::string& text, std::string_view member) {
  std::vector<std::string> names;
  bool inside = false;
  const auto note = [&](int depth, Json::parse_event_t event, const Json& parsed) {
    if (event != Json::parse_event_t::key) return true;
    if (depth == 1) return inside = parsed == member;
    if (depth == 2 && inside) names.push_back(parsed.get<std::string>());
    return true;
  };
  [[maybe_unused]] const Json whole = Json::parse(text, note);
  return names;
}

Json parse_settings(const std::string& text, const std::string& path) {
  Json json = parse_sorted_json(text, path, {.error = Errc::Corrupt, .comments = false});
  if (!json.is_object()) throw Error(Errc::Corrupt, fmt::format("{}: must be an object", path));
  // The names of these tokens do not matter, and their order does: an object becomes a list.
  if (const auto extra = json.find(kExtraTokens); extra != json.end() && extra->is_object()) {
    Json values = Json::array();
    for (const std::string& name : names_in_order(text, kExtraTokens)) values.push_back(extra->at(name));
    *extra = std::move(values);
  }
  return json;
}

// {} if the file is missing.
Json read_settings(const Directory& d, std::string_view name) {
  const std::string path = d.path(name);
  if (const auto it = d.inside.find(std::string(name)); it != d.inside.end()) return parse_settings(it->second, path);
  return exists(path) ? parse_settings(read_text_file(path, kMostSettingsBytes), path) : Json::object();
}

void read_neighbours(Directory& d) {
  d.config = read_settings(d, "tokenizer_config.json");
  d.special = read_settings(d, "special_tokens_map.json");
  d.added = read_settings(d, "added_tokens.json");
  d.model = read_settings(d, "config.json");
  d.generation = read_settings(d, "generation_config.json");
}

void add_ends(const Json& file, const Place& place, std::vector<EndToken>& ends) {
  const Json* const value = find_member(file, place.path);
  if (value == nullptr) return;
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer() || id < 0 || id >= std::numeric_limits<i32>::max())
      place.corrupt("must be an id, or a list of ids, from 0 to 2^31 - 2");
    if (std::ranges::find(ends, id.get<i32>(), &EndToken::id) == ends.end())
      ends.push_back({id.get<i32>(), fmt::format("{}: {}", place.file, place.path)});
  };
  if (!value->is_array()) return add(*value);
  for (const Json& id : *value) add(id);
}

}  // namespace

std::string Directory::path(std::string_view name) const { return (fs::path(folder) / name).string(); }
bool Directory::has(std::string_view name) const { return inside.contains(std::string(name)) || exists(path(name)); }

std::string Directory::vocabulary() const {
  const auto it = inside.find(fs::path(file).filename().string());
  return it != inside.end() ? it->second : read_text_file(file, kMostFileBytes);
}

const Json* Directory::setting(const std::string& key) const { return find_member(config, key); }

std::optional<bool> Directory::flag(const std::string& key) const {
  const Json* const value = setting(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) place("tokenizer_config.json", key).corrupt("must be true or false");
  return value->get<bool>();
}

ClassName class_name(const Directory& d) {
  const auto named = [&](const Json& file, const char* name) -> std::optional<ClassName> {
    const Json* const value = find_member(file, "tokenizer_class");
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) d.place(name, "tokenizer_class").corrupt("must be a string");
    std::string text = value->get<std::string>();
    if (text.ends_with("Fast")) text.resize(text.size() - 4);
    return ClassName{.name = std::move(text), .file = name};
  };
  if (auto of = named(d.config, "tokenizer_config.json")) return *std::move(of);
  if (auto of = named(d.model, "config.json")) return *std::move(of);
  const Json* const type = find_member(d.model, "model_type");
  if (type == nullptr || !type->is_string()) return {};
  return {std::string(class_of_model(type->get_ref<const std::string&>())), "config.json", true};
}

Directory read_directory(const std::string& path) {
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  DS_CHECK(fs::exists(status), Errc::Config, "tokenizer '{}': no such file or directory", path);
  Directory d;
  if (is_gguf(path)) d.inside = gguf_tokenizer_files(path);
  if (fs::is_directory(status) || !d.inside.empty()) {
    d.folder = path;
    read_neighbours(d);
    const Shape shape = shape_of(class_name(d).name).shape;
    const bool merges = d.has("vocab.json") && d.has("merges.txt");
    const auto take = [&](Kind kind, const char* name) {
      d.kind = kind;
      d.file = d.path(name);
      return d;
    };
    if (d.has("tokenizer.json")) return take(Kind::TokenizerJson, "tokenizer.json");
    if (d.has("tokenizer.model") && (is_llama(shape) || shape == Shape::Gemma))
      return take(Kind::SentencePiece, "tokenizer.model");
    if (d.has("vocab.txt") && shape == Shape::Bert) return take(Kind::VocabTxt, "vocab.txt");
    if (merges) return take(Kind::Merges, "vocab.json");
    if (d.has("vocab.txt")) return take(Kind::VocabTxt, "vocab.txt");
    if (d.has("tokenizer.model")) return take(Kind::SentencePiece, "tokenizer.model");
    throw Error(Errc::Config,
                fmt::format("tokenizer '{}': the directory has no tokenizer.json, vocab.json + merges.txt, "
                            "vocab.txt or tokenizer.model; a SentencePiece file of another name can be named itself",
                            path));
  }
  d.folder = fs::path(path).parent_path().string();
  d.file = path;
  const std::string name = fs::path(path).filename().string();
  if (name == "vocab.json" || name == "merges.txt") {
    d.kind = Kind::Merges;
    d.file = d.path("vocab.json");
    for (const char* file : {"vocab.json", "merges.txt"})
      DS_CHECK(d.has(file), Errc::Config, "tokenizer '{}' needs '{}', which is not there", path, d.path(file));
  } else if (name.ends_with(".json")) {
    d.kind = Kind::TokenizerJson;
  } else if (name.ends_with(".txt")) {
    d.kind = Kind::VocabTxt;
  } else if (name.find(".model") != name.npos) {
    d.kind = Kind::SentencePiece;
  } else {
    throw Error(
        Errc::Unavailable,
        fmt::format("tokenizer '{}': this kind of file is not supported (tokenizer.json, vocab.json + merges.txt, "
                    "vocab.txt, tokenizer.model and *.gguf are)",
                    path));
  }
  read_neighbours(d);
  return d;
}

std::vector<EndToken> end_tokens(const Directory& d) {
  std::vector<EndToken> ends;
  add_ends(d.generation, d.place("generation_config.json", "eos_token_id"), ends);
  add_ends(d.model, d.place("config.json", "eos_token_id"), ends);
  return ends;
}

std::vector<EndToken> read_end_tokens(const std::string& folder) {
  Directory d;
  d.folder = folder;
  d.model = read_settings(d, "config.json");
  d.generation = read_settings(d, "generation_config.json");
  return end_tokens(d);
}

std::string read_words(const std::string& path) {
  std::string text = read_text_file(path, kMostFileBytes);
  if (const std::string_view kind = kind_of_content(text); !kind.empty())
    throw Error(Errc::Corrupt, fmt::format("{}: is {}, not lines of text", path, kind));
  return text;
}

}  // namespace ds::tokenizer
