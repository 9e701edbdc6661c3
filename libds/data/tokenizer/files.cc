// SPDX-License-Identifier: Apache-2.0
#include "data/tokenizer/files.h"

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "data/tokenizer.h"
#include "data/tokenizer/directory.h"
#include "data/tokenizer/identity.h"
#include "data/tokenizer/model.h"
#include "data/tokenizer/token_files.h"

namespace ds::tokenizer {
namespace {

namespace fs = std::filesystem;

std::string beside(const std::string& path, const char* name) { return (fs::path(path).parent_path() / name).string(); }

Json parse(const std::string& text, const std::string& path) {
  return parse_sorted_json(text, path, {.error = Errc::Corrupt, .comments = false});
}

}  // namespace

ChatTemplates read_chat_templates(const std::string& path) {
  std::error_code ignored;
  if (path == "bytes") return {};
  if (is_gguf(path)) {
    ChatTemplates inside{.sources = {}, .place = path + ": tokenizer.chat_template"};
    if (std::optional<std::string> source = Gguf(path).text("tokenizer.chat_template"))
      inside.sources["default"] = std::move(*source);
    return inside;
  }
  const std::string any = fs::is_directory(path, ignored) ? (fs::path(path) / "any").string() : path;
  ChatTemplates found{.sources = {}, .place = beside(any, "chat_template.jinja")};
  if (fs::is_regular_file(found.place, ignored))
    found.sources["default"] = read_text_file(found.place, kMostSettingsBytes);
  for (const auto& entry : fs::directory_iterator(beside(any, "additional_chat_templates"), ignored))
    if (entry.path().extension() == ".jinja" && entry.is_regular_file(ignored))
      found.sources[entry.path().stem().string()] = read_text_file(entry.path().string(), kMostSettingsBytes);
  if (!found.sources.empty()) return found;
  const std::string path_of = beside(any, "tokenizer_config.json");
  found.place = path_of + ": chat_template";
  if (!fs::exists(path_of, ignored)) return found;
  const Json file = parse(read_text_file(path_of, kMostSettingsBytes), path_of);
  if (!file.is_object()) throw Error(Errc::Corrupt, fmt::format("{}: must be an object", path_of));
  const Json* const value = find_member(file, "chat_template");
  if (value == nullptr) return found;
  const Place place{path_of, "chat_template"};
  const auto add = [&](const std::string& name, const Json& source) {
    if (!source.is_string()) place.corrupt(fmt::format("the template \"{}\" must be a string", name));
    found.sources[name] = source.get<std::string>();
  };
  if (value->is_string()) {
    add("default", *value);
  } else if (value->is_object()) {
    for (const auto& [name, source] : value->items()) add(name, source);
  } else if (value->is_array()) {
    for (const Json& named : *value) {
      const Json* const name = named.is_object() ? find_member(named, "name") : nullptr;
      if (name == nullptr || !name->is_string()) place.corrupt("each of several templates must have a name");
      add(name->get<std::string>(), named.value("template", Json()));
    }
  } else {
    place.corrupt("must be a template, or several with names");
  }
  return found;
}

std::optional<std::string> read_chat_template(const std::string& path) {
  const ChatTemplates found = read_chat_templates(path);
  if (found.sources.empty()) return std::nullopt;
  const auto chosen = found.sources.find("default");
  if (chosen == found.sources.end())
    throw Error(Errc::Unavailable,
                fmt::format("{}: none of its templates is \"default\": data.chat_template writes a form of "
                            "messages out",
                            found.place));
  return chosen->second;
}

Json byte_level_model(const std::string& vocab_path, const std::string& merges_path, std::string& identity) {
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
  identity = content_identity("vocab.json + merges.txt", vocab_text + merges_text);
  return {{"version", "1.0"}, {"model", {{"type", "BPE"}, {"vocab", std::move(vocab)}, {"merges", std::move(merges)}}}};
}

void check_from_slow(const Directory& d, Shape shape, const Json& file) {
  const Place place = d.place(kConfigFile, "from_slow");
  if (shape != Shape::Gpt2 || !d.has("vocab.json") || !d.has("merges.txt"))
    place.unsupported(
        "true is not supported beside a tokenizer.json, but for the class GPT2Tokenizer with vocab.json "
        "and merges.txt");
  std::string ignored;
  const Json slow = byte_level_model(d.path("vocab.json"), d.path("merges.txt"), ignored);
  const auto hash = [](const Json& of, const std::string& name) {
    Digest digest;
    make_model(of.at("model"), {name, "model"}, true)->digest(digest);
    return digest.value();
  };
  const bool same_model = hash(slow, d.path("vocab.json")) == hash(file, d.file);
  const TextForm form = form_of(shape, {.add_prefix_space = d.flag("add_prefix_space").value_or(false)});
  const bool same_form = in_full(file.value("normalizer", Json())) == in_full(form.normalizer) &&
                         in_full(file.value("pre_tokenizer", Json())) == in_full(form.pre_tokenizer);
  const Json* const decoder = d.setting("added_tokens_decoder");
  const bool same_tokens = std::ranges::all_of(file.value("added_tokens", Json::array()), [&](const Json& token) {
    const auto id = id_of(find_member(token, "id"));
    return decoder == nullptr || (id && decoder->contains(std::to_string(*id)));
  });
  if (!same_model || !same_form || !same_tokens)
    place.unsupported(
        fmt::format("true, and tokenizer.json has another {} than the other files, which the reference reads then",
                    !same_model  ? "model"
                    : !same_form ? "normalizer or pre_tokenizer"
                                 : "list of added tokens"));
}

Json word_piece_model(const std::string& path, std::string& identity) {
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
  identity = content_identity("vocab.txt", text);
  return {{"version", "1.0"}, {"model", {{"type", "WordPiece"}, {"vocab", std::move(vocab)}}}};
}

}  // namespace ds::tokenizer
