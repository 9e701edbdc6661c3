// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/files.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "base/content_kind.h"
#include "base/file.h"
#include "base/json.h"
#include "data/tokenizer/pipeline.h"

namespace ds::tokenizer {
namespace {

namespace fs = std::filesystem;

std::string beside(const std::string& path, const char* name) { return (fs::path(path).parent_path() / name).string(); }
bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

Json parse(const std::string& text, const std::string& path) {
  return parse_sorted_json(text, path, {.error = Errc::Corrupt, .comments = false});
}

// A file of words, a line each.
std::string read_words(const std::string& path) {
  std::string text = read_text_file(path, kMostFileBytes);
  if (const std::string_view kind = kind_of_content(text); !kind.empty())
    throw Error(Errc::Corrupt, fmt::format("{}: is {}, not lines of text", path, kind));
  return text;
}

// A file that may be missing: then {}.
Json optional_json(const std::string& path) {
  if (!exists(path)) return Json::object();
  Json json = parse(read_text_file(path, kMostFileBytes), path);
  if (!json.is_object()) throw Error(Errc::Corrupt, fmt::format("{}: must be an object", path));
  return json;
}

// tokenizer_config.json and special_tokens_map.json beside a tokenizer's files. Of their many keys only those that are
// named here reach ids.
struct Beside {
  Json config, map;
  explicit Beside(const std::string& path)
      : config(optional_json(beside(path, "tokenizer_config.json"))),
        map(optional_json(beside(path, "special_tokens_map.json"))) {}

  // A special token is a string or an object with its content.
  std::optional<std::string> content(const std::string& key) const {
    for (const Json* file : {&config, &map}) {
      const auto it = file->find(key);
      if (it == file->end()) continue;
      if (it->is_string()) return it->get<std::string>();
      if (it->is_object() && it->contains("content") && (*it)["content"].is_string())
        return (*it)["content"].get<std::string>();
    }
    return std::nullopt;
  }
  bool flag(const std::string& key, bool otherwise) const {
    const auto it = config.find(key);
    return it != config.end() && it->is_boolean() ? it->get<bool>() : otherwise;
  }
  SpecialTokens special() const {
    SpecialTokens s;
    static constexpr std::pair<SpecialToken, const char*> kKeys[] = {
        {SpecialToken::Bos, "bos_token"},   {SpecialToken::Eos, "eos_token"}, {SpecialToken::Unk, "unk_token"},
        {SpecialToken::Pad, "pad_token"},   {SpecialToken::Cls, "cls_token"}, {SpecialToken::Sep, "sep_token"},
        {SpecialToken::Mask, "mask_token"},
    };
    for (const auto& [kind, key] : kKeys)
      if (auto c = content(key)) s.content.emplace(kind, *std::move(c));
    if (const auto it = config.find("add_bos_token"); it != config.end() && it->is_boolean())
      s.add_bos = it->get<bool>();
    return s;
  }
  // Throws unless the class, if it is named, is one of these (with or without "Fast").
  std::string check_class(const std::string& path, std::initializer_list<std::string_view> known) const {
    const auto it = config.find("tokenizer_class");
    if (it == config.end() || !it->is_string()) return std::string(*known.begin());
    std::string name = it->get<std::string>();
    if (name.ends_with("Fast")) name.resize(name.size() - 4);
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw Error(
          Errc::Unavailable,
          fmt::format("{}: tokenizer_class '{}' in tokenizer_config.json is not supported without a tokenizer.json",
                      path, it->get<std::string>()));
    return name;
  }
  // Tokens that these files and added_tokens.json add to a vocabulary: id by content, flags where they are given.
  Json added_tokens(const std::string& path, const Json& vocab, std::vector<std::string> defaults) const {
    std::map<std::string, Json> tokens;
    const auto put = [&](const std::string& token, Json id, const Json& flags, bool special) {
      Json& t = tokens[token];
      if (!t.is_object()) t = {{"content", token}, {"special", special}};
      if (!id.is_null()) t["id"] = std::move(id);
      for (const char* flag : {"single_word", "lstrip", "rstrip", "normalized", "special"})
        if (flags.is_object() && flags.contains(flag)) t[flag] = flags[flag];
    };
    const Json added = optional_json(beside(path, "added_tokens.json"));
    for (const auto& [token, id] : added.items()) put(token, id, {}, false);
    for (const Json* file : {&map, &config}) {
      for (const char* key :
           {"bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token"}) {
        const auto it = file->find(key);
        if (it == file->end()) continue;
        if (const auto c = content(key)) put(*c, nullptr, *it, true);
      }
    }
    for (std::string& token : defaults)
      if (vocab.contains(token) || tokens.contains(token)) put(token, nullptr, {}, true);
    const Place place{beside(path, "tokenizer_config.json"), "added_tokens_decoder"};
    if (const auto it = config.find("added_tokens_decoder"); it != config.end()) {
      if (!it->is_object()) place.corrupt("must be an object");
      for (const auto& [id, token] : it->items()) {
        const bool digits = !id.empty() && id.size() < 10 && id.find_first_not_of("0123456789") == id.npos;
        if (!digits || !token.is_object() || !token.contains("content") || !token["content"].is_string())
          (place / id).corrupt("must be an id with an object with content");
        put(token["content"].get<std::string>(), std::stoi(id), token, false);
      }
    }
    Json list = Json::array();
    for (auto& [token, t] : tokens) {
      if (!t.contains("id")) {
        const auto known = vocab.find(token);
        if (known == vocab.end()) continue;  // named, but nowhere given an id
        t["id"] = *known;
      }
      list.push_back(t);
    }
    return list;
  }
};

constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

}  // namespace

std::optional<std::string> read_chat_template(const std::string& path) {
  std::error_code ignored;
  if (path == "bytes") return std::nullopt;
  const std::string any = fs::is_directory(path, ignored) ? (fs::path(path) / "any").string() : path;
  if (const std::string jinja = beside(any, "chat_template.jinja"); fs::is_regular_file(jinja, ignored))
    return read_text_file(jinja, kMostFileBytes);
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    const Json file = optional_json(beside(any, name));
    const auto it = file.find("chat_template");
    if (it == file.end()) continue;
    if (it->is_string()) return it->get<std::string>();
    if (it->is_object()) {
      for (const auto& [key, value] : it->items())
        if (value.is_string() && (key == "default" || it->size() == 1 || !it->contains("default")))
          return value.get<std::string>();
    }
    if (!it->is_array()) continue;
    std::optional<std::string> found;
    for (const Json& named : *it) {
      if (!named.is_object() || !named.contains("template") || !named["template"].is_string()) continue;
      const bool is_default = named.value("name", Json()) == "default";
      if (is_default || !found) found = named["template"].get<std::string>();
      if (is_default) break;
    }
    if (found) return found;
  }
  return std::nullopt;
}

std::string content_identity(const std::string& name, std::string_view content) {
  return fmt::format("{} xxh3 {:016x}", name, XXH3_64bits(content.data(), content.size()));
}

std::unique_ptr<Tokenizer> open_tokenizer_json(const std::string& path) {
  const std::string text = read_text_file(path, kMostFileBytes);
  return make_pipeline(parse(text, path), path, Beside(path).special(), content_identity("tokenizer.json", text));
}

std::unique_ptr<Tokenizer> open_bpe_files(const std::string& vocab_path, const std::string& merges_path) {
  const Beside files(vocab_path);
  const std::string kind = files.check_class(
      vocab_path, {"GPT2Tokenizer", "RobertaTokenizer", "LongformerTokenizer", "BartTokenizer", "Qwen2Tokenizer"});
  const std::string vocab_text = read_text_file(vocab_path, kMostFileBytes);
  const std::string merges_text = read_words(merges_path);
  Json vocab = parse(vocab_text, vocab_path), merges = Json::array();
  i64 line_number = 0;
  for (size_t at = 0; at < merges_text.size(); ++line_number) {
    const size_t end = std::min(merges_text.find('\n', at), merges_text.size());
    std::string line = merges_text.substr(at, end - at);
    at = end + 1;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with("#version")) continue;
    if (std::count(line.begin(), line.end(), ' ') != 1)
      throw Error(Errc::Corrupt, fmt::format("{}:{}: must be two tokens and a blank", merges_path, line_number + 1));
    merges.push_back(std::move(line));
  }
  const bool qwen = kind == "Qwen2Tokenizer";
  const std::vector<std::string> defaults = qwen || kind == "GPT2Tokenizer"
                                                ? std::vector<std::string>{"<|endoftext|>"}
                                                : std::vector<std::string>{"<s>", "</s>", "<unk>", "<pad>", "<mask>"};
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", files.flag("add_prefix_space", false)},
                           {"trim_offsets", true},
                           {"use_regex", !qwen}};
  Json file = {{"version", "1.0"}, {"decoder", {{"type", "ByteLevel"}}}, {"pre_tokenizer", byte_level}};
  if (qwen) {
    const Json split = {
        {"type", "Split"}, {"pattern", {{"Regex", kQwen2}}}, {"behavior", "Isolated"}, {"invert", false}};
    file["normalizer"] = {{"type", "NFC"}};
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
  }
  file["added_tokens"] = files.added_tokens(vocab_path, vocab, defaults);
  file["model"] = {{"type", "BPE"}, {"vocab", std::move(vocab)}, {"merges", std::move(merges)}};
  SpecialTokens special = files.special();
  special.keeps_added_ids = true;
  const bool roberta = kind != "GPT2Tokenizer" && !qwen;
  special.content.emplace(SpecialToken::Eos, roberta ? "</s>" : "<|endoftext|>");
  if (!qwen) special.content.emplace(SpecialToken::Bos, roberta ? "<s>" : "<|endoftext|>");
  // Added tokens and flags come from other files: what was made of them counts.
  return make_pipeline(
      file, vocab_path, special,
      content_identity("vocab.json + merges.txt",
                       vocab_text + merges_text + file["added_tokens"].dump() + file["pre_tokenizer"].dump()));
}

std::unique_ptr<Tokenizer> open_vocab_txt(const std::string& path) {
  const Beside files(path);
  files.check_class(path, {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"});
  const std::string text = read_words(path);
  Json vocab = Json::object();
  i64 id = 0;
  for (size_t at = 0; at < text.size(); ++id) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string token = text.substr(at, end - at);
    at = end + 1;
    while (!token.empty() && static_cast<u8>(token.back()) <= ' ') token.pop_back();
    vocab[token] = id;
  }
  const bool lower = files.flag("do_lower_case", true);
  Json normalizer = {{"type", "BertNormalizer"},
                     {"clean_text", true},
                     {"handle_chinese_chars", files.flag("tokenize_chinese_chars", true)},
                     {"strip_accents", files.flag("strip_accents", lower)},
                     {"lowercase", lower}};
  const std::string unk = files.content("unk_token").value_or("[UNK]");
  Json file = {{"version", "1.0"},
               {"normalizer", std::move(normalizer)},
               {"pre_tokenizer", {{"type", "BertPreTokenizer"}}},
               {"decoder", {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}}}};
  file["added_tokens"] = files.added_tokens(path, vocab, {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"});
  file["model"] = {{"type", "WordPiece"}, {"unk_token", unk}, {"vocab", std::move(vocab)}};
  SpecialTokens special = files.special();
  special.keeps_added_ids = true;
  return make_pipeline(
      file, path, special,
      content_identity("vocab.txt", text + file["added_tokens"].dump() + file["normalizer"].dump() + unk));
}

}  // namespace ds::tokenizer
