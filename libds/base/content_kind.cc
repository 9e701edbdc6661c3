// SPDX-License-Identifier: Apache-2.0
#include "base/content_kind.h"

#include <algorithm>

namespace ds {
namespace {

constexpr size_t kLookedAt = 4096;

struct Signature {
  std::string_view bytes, kind;
};
constexpr Signature kSignatures[] = {
    {"\x89HDF\r\n\x1a\n", "an HDF5 file"},
    {"PK\3\4", "a zip archive, as PyTorch's files are"},
    {"\x1f\x8b", "a file compressed by gzip"},
    {"\x28\xb5\x2f\xfd", "a file compressed by zstd"},
    {"\xfd"
     "7zXZ",
     "a file compressed by xz"},
    {"\x7f"
     "ELF",
     "a program or a library"},
    {"GGUF", "a GGUF file"},
    {"\x93NUMPY", "a NumPy file"},
    {"\xff\xfe", "text in UTF-16, where UTF-8 is read"},
    {"\xfe\xff", "text in UTF-16, where UTF-8 is read"},
};

// The length of its header in eight bytes, little-endian, and an object of JSON.
bool is_safetensors(std::string_view bytes) {
  return bytes.size() > 8 && bytes[4] == 0 && bytes[5] == 0 && bytes[6] == 0 && bytes[7] == 0 && bytes[8] == '{';
}

bool is_pickle(std::string_view bytes) {
  return bytes.size() > 1 && bytes[0] == '\x80' && bytes[1] >= 1 && bytes[1] <= 5;
}

}  // namespace

std::string_view kind_of_content(std::string_view first_bytes) {
  if (is_safetensors(first_bytes)) return "a safetensors file";  // whose length may look like a signature
  for (const auto& [bytes, kind] : kSignatures) {
    if (first_bytes.starts_with(bytes)) return kind;
  }
  if (is_pickle(first_bytes)) return "a pickle";
  return first_bytes.substr(0, kLookedAt).find('\0') == std::string_view::npos ? "" : kBinaryData;
}

std::string kind_of_content(const File& file) {
  std::string bytes(static_cast<size_t>(std::min<i64>(file.size(), kLookedAt)), '\0');
  file.read_at(0, bytes.data(), std::ssize(bytes));
  return std::string(kind_of_content(bytes));
}

std::string_view kind_of_json(const Json& object) {
  const auto says = [&](const char* key, std::string_view value) {
    return object.contains(key) && object.at(key).is_string() && object.at(key).get_ref<const std::string&>() == value;
  };
  const auto has = [&](const char* key) { return object.contains(key); };
  if (says("format", "libds-checkpoint")) return "the manifest of a checkpoint's step";
  if (says("type", "run") && has("world_size")) return "the metrics of a run";
  if (has("weight_map")) return "the index of a model in several safetensors files";
  if (has("added_tokens") && has("pre_tokenizer")) return "a tokenizer";
  // transformers writes it into the configuration of some models, too.
  if (has("tokenizer_class") && !has("model_type")) return "the configuration of a tokenizer";
  return "";
}

std::string not_of_kind(const File& file, std::string_view wanted, std::string_view why) {
  const std::string kind = kind_of_content(file);
  const bool tells = !kind.empty() && kind != kBinaryData && kind != wanted;
  return tells ? fmt::format("{}: is {}, not {}", file.path(), kind, wanted) : fmt::format("{}: {}", file.path(), why);
}

}  // namespace ds
