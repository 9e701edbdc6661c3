// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/hf_directory.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "checkpoint/state_source.h"
#include "config/gguf_model.h"
#include "config/model_config.h"
#include "data/tokenizer/gguf_files.h"
#include "ds/checkpoint.h"
#include "ds/log.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

constexpr i64 kMaxConfig = i64{1} << 20;
constexpr i64 kMaxFile = i64{256} << 20;  // of a tokenizer
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "vocab.txt",
                                           "tokenizer.model",
                                           "chat_template.jinja"};
constexpr const char* kGeneration = "generation_config.json";

// As transformers names it.
std::string torch_dtype(DType t) {
  switch (t) {
    case DType::F32: return "float32";
    case DType::BF16: return "bfloat16";
    case DType::F16: return "float16";
    case DType::F64: return "float64";
    default: return std::string(dtype_name(t));
  }
}

}  // namespace

bool is_model_file(const std::string& path) {
  const std::string name = fs::path(path).filename();
  const auto ends = [&](std::string_view end) { return name.ends_with(end); };
  constexpr std::string_view kEnds[] = {".safetensors", ".h5",    ".hdf5", ".bin",       ".pt",
                                        ".pth",         ".model", ".gguf", ".index.json"};
  return name == "config.json" || name == kGeneration || std::ranges::any_of(kEnds, ends) ||
         std::ranges::find(kTokenizerFiles, name) != std::end(kTokenizerFiles);
}

std::string read_hf_config(const std::string& dir) {
  const std::string path = dir + "/config.json";
  if (!fs::exists(path)) return "";
  const Json json = parse_json(read_text_file(path, kMaxConfig), path, {.error = Errc::Corrupt, .places = false}).root;
  DS_CHECK(json.is_object(), Errc::Corrupt, "{}: is not a JSON object", path);
  return json.dump();
}

std::string find_hf_config(const std::string& dir) {
  try {
    const std::string text = read_hf_config(dir);
    if (!text.empty() && Json::parse(text).contains("model_type")) return text;
  } catch (const Error&) {  // something else of that name
  }
  return "";
}

std::string stored_config(const std::string& path) { return is_gguf(path) ? gguf_config(Gguf(path)) : ""; }

std::string find_model_config(const StateSource& state, const std::string& named) {
  if (std::string stored = stored_config(named); !stored.empty()) return stored;
  if (!named.empty()) {
    std::error_code ignored;
    const std::string path = fs::is_directory(named, ignored) ? named + "/config.json" : named;
    const Json config = parse_json(read_text_file(path, kMaxConfig, Errc::Config), path, {.places = false}).root;
    DS_CHECK(config.is_object(), Errc::Config, "{}: is not a JSON object", path);
    return config.dump();
  }
  std::string config = state.meta().model_config_json;
  std::error_code ignored;
  if (config.empty() && fs::is_regular_file(state.path(), ignored))
    config = find_hf_config(parent_directory(state.path()));
  return config;
}

std::string model_config_of(const StateSource& state, const std::string& named) {
  std::string config = find_model_config(state, named);
  DS_CHECK(!config.empty(), Errc::Config, "{}: does not contain the model's config.json: name one with --config",
           state.path());
  return config;
}

void write_hf_config(const std::string& dir, const std::string& config, std::optional<DType> dtype) {
  Json json = Json::parse(config);
  forget_published_form(json);
  if (dtype) {
    json.erase("dtype");
    json["torch_dtype"] = torch_dtype(*dtype);
  }
  replace_text_file(dir + "/config.json", json.dump(2) + "\n");
  if (fs::exists(fmt::format("{}/{}", dir, kGeneration))) return;
  Json generation = {{"_from_model_config", true}};
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (json.contains(key) && !json[key].is_null()) generation[key] = json[key];
  }
  if (generation.size() > 1) replace_text_file(fmt::format("{}/{}", dir, kGeneration), generation.dump(2) + "\n");
}

namespace {

// Writes the tokenizer of a GGUF file as files, or warns that it cannot be read and returns false.
bool write_stored_tokenizer(const std::string& path, const std::string& dir) {
  try {
    for (const auto& [name, content] : tokenizer::gguf_tokenizer_files(path))
      replace_text_file(fmt::format("{}/{}", dir, name), content);
    return true;
  } catch (const Error& e) {
    if (e.code() != Errc::Unavailable) throw;
    log_message(LogLevel::Warning, e.what());
    return false;
  }
}

}  // namespace

std::string copy_tokenizer(const std::vector<std::string>& from, const std::string& dir) {
  for (const std::string& path : from) {
    std::error_code ignored;
    if (!fs::exists(path, ignored)) continue;
    if (is_gguf(path)) {
      if (write_stored_tokenizer(path, dir)) return path;
      continue;
    }
    const std::string folder = fs::is_directory(path, ignored) ? path : parent_directory(path);
    bool any = false;
    const auto copy = [&](const char* name) {
      const std::string file = fmt::format("{}/{}", folder, name);
      if (!fs::is_regular_file(file, ignored)) return false;
      replace_text_file(fmt::format("{}/{}", dir, name), read_text_file(file, kMaxFile));
      return true;
    };
    for (const char* name : kTokenizerFiles) any |= copy(name);
    if (any) return folder;
  }
  return "";
}

void copy_generation_config(const std::vector<std::string>& from, const std::string& dir) {
  for (const std::string& path : from) {
    std::error_code ignored;
    if (is_gguf(path)) continue;  // whose tokenizer brings its own
    const std::string folder = fs::is_directory(path, ignored) ? path : parent_directory(path);
    const std::string file = fmt::format("{}/{}", folder, kGeneration);
    if (!fs::exists(path, ignored) || !fs::is_regular_file(file, ignored)) continue;
    return replace_text_file(fmt::format("{}/{}", dir, kGeneration), read_text_file(file, kMaxFile));
  }
}

}  // namespace ds
