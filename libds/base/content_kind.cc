// SPDX-License-Identifier: Apache-2.0
#include "base/content_kind.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace ds {
namespace {

constexpr size_t kLookedAt = 4096;

struct Signature {
  std::string_view bytes, kind;
  std::string_view to_text = {};  // how to obtain its text
  size_t at = 0;
};
constexpr std::string_view kUtf16 = "UTF-16 text, where UTF-8 is expected";
constexpr std::string_view kFromUtf16 = "convert it: iconv -f UTF-16 -t UTF-8";
constexpr std::string_view kOffice = "an old Microsoft Office document";
// A pickle of the number 0x1950a86a20f9469cfc6c.
constexpr std::string_view kTorchMagic("\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);
constexpr Signature kSignatures[] = {
    {"\x89HDF\r\n\x1a\n", "an HDF5 file"},
    {"PK\3\4", "a zip archive, as PyTorch's files are"},
    {"PK\5\6", "an empty zip archive"},
    {"\x1f\x8b\x08", "a file compressed by gzip", "decompress it: gzip -d"},
    {"\x28\xb5\x2f\xfd", "a file compressed by zstd", "decompress it: zstd -d"},
    {"\xfd"
     "7zXZ",
     "a file compressed by xz", "decompress it: xz -d"},
    {"1AY&SY", "a file compressed by bzip2", "decompress it: bzip2 -d", 4},
    {"\x04\x22\x4d\x18", "a file compressed by lz4", "decompress it: lz4 -d"},
    {"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it"},
    {"Rar!\x1a\x07", "a RAR archive", "unpack it"},
    {std::string_view("ustar\0", 6), "a tar archive", "unpack it", 257},
    {"ustar  ", "a tar archive", "unpack it", 257},
    {"\x7f"
     "ELF",
     "a program or a library"},
    {std::string_view("GGUF\2\0", 6), "a GGUF file"},
    {std::string_view("GGUF\3\0", 6), "a GGUF file"},
    {"\x93NUMPY", "a NumPy file", "write it with numpy's tofile() and set data.token_dtype"},
    {"LITPKDS\1", "a chunk of LitGPT's packed dataset", "drop its header with tail -c +25 and set data.token_dtype"},
    {std::string_view("MMIDIDX\0\0", 9), "an index of Megatron-LM"},
    {"PAR1\x15", "a Parquet file", "set data.format to \"parquet\""},
    {std::string_view("ARROW1\0\0", 8), "an Arrow file", "set data.format to \"arrow\""},
    {"Obj\x01", "an Avro file", "convert it to JSONL"},
    {std::string_view("SQLite format 3\0", 16), "an SQLite database", "export its text"},
    {"version https://git-lfs", "a Git LFS pointer to a missing file", "git lfs pull"},
    {"%!PS-Adobe", "a PostScript document", "extract its text"},
    {std::string_view("TNTIDX\0\0", 8), "an index of fairseq or an older Megatron-LM"},
    {kTorchMagic, "a file in the old format of torch.save"},
    {"%PDF-", "a PDF document", "extract its text"},
    {"{\\rtf", "an RTF document", "extract its text"},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", kOffice, "extract its text"},
    {"\x89PNG\r\n\x1a\n", "a PNG image"},
    {"\xff\xd8\xff", "a JPEG image"},
    {std::string_view("\xff\xfe\0\0", 4), "UTF-32 text, where UTF-8 is expected",
     "convert it: iconv -f UTF-32 -t UTF-8"},
    {std::string_view("\0\0\xfe\xff", 4), "UTF-32 text, where UTF-8 is expected",
     "convert it: iconv -f UTF-32 -t UTF-8"},
    {"\xff\xfe", kUtf16, kFromUtf16},
    {"\xfe\xff", kUtf16, kFromUtf16},
};

// The header's length in eight bytes, little-endian, followed by a JSON object.
bool is_safetensors(std::string_view bytes) {
  return bytes.size() > 8 && bytes[4] == 0 && bytes[5] == 0 && bytes[6] == 0 && bytes[7] == 0 && bytes[8] == '{';
}

bool is_pickle(std::string_view bytes) {
  return bytes.size() > 1 && bytes[0] == '\x80' && bytes[1] >= 1 && bytes[1] <= 5;
}

u32 u32_at(std::string_view bytes, size_t at) {
  u32 value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// MosaicML Streaming's MDS shards and litdata's chunks: a count n, then n + 1 ascending offsets. The first offset
// points past the table; a description of the shard may lie between them.
bool is_offset_table(std::string_view bytes) {
  if (bytes.size() < 16) return false;
  const u64 n = u32_at(bytes, 0), table_end = 4 + 4 * (n + 1);
  const bool is_described = table_end < bytes.size() && bytes[table_end] == '{';
  if (n == 0 || n > 1 << 28 || u32_at(bytes, 4) < table_end || (u32_at(bytes, 4) > table_end && !is_described))
    return false;
  for (size_t at = 8; at + 4 <= std::min<u64>(bytes.size(), table_end); at += 4)
    if (u32_at(bytes, at) < u32_at(bytes, at - 4)) return false;
  return true;
}

}  // namespace

std::string_view kind_by_signature(std::string_view first_bytes, size_t least_bytes) {
  if (is_safetensors(first_bytes)) return "a safetensors file";  // whose length may look like a signature
  for (const Signature& s : kSignatures) {
    if (s.bytes.size() >= least_bytes && first_bytes.substr(std::min(s.at, first_bytes.size())).starts_with(s.bytes))
      return s.kind;
  }
  return is_offset_table(first_bytes) ? "a shard of MosaicML Streaming (MDS) or litdata" : "";
}

std::string_view kind_of_content(std::string_view first_bytes) {
  if (const std::string_view kind = kind_by_signature(first_bytes); !kind.empty()) return kind;
  if (is_pickle(first_bytes)) return "a pickle";
  return first_bytes.substr(0, kLookedAt).find('\0') == std::string_view::npos ? "" : kBinaryData;
}

std::string_view how_to_get_text(std::string_view kind) {
  const auto* const s = std::ranges::find(kSignatures, kind, &Signature::kind);
  return s == std::end(kSignatures) ? std::string_view{} : s->to_text;
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
  // transformers writes it into some model configurations, too.
  if (has("tokenizer_class") && !has("model_type")) return "the configuration of a tokenizer";
  return "";
}

std::string not_of_kind(const File& file, std::string_view wanted, std::string_view why) {
  const std::string kind = kind_of_content(file);
  const bool tells = !kind.empty() && kind != kBinaryData && kind != wanted;
  return tells ? fmt::format("{}: is {}, not {}", file.path(), kind, wanted) : fmt::format("{}: {}", file.path(), why);
}

}  // namespace ds
