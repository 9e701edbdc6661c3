// SPDX-License-Identifier: Apache-2.0
// Files of text: UTF-8 without NUL. Whatever else a file contains would be trained on as characters that nobody wrote,
// so it is refused by its content, unless data.format says that it is text.

#include <simdjson.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/check.h"
#include "base/content_kind.h"
#include "base/utf8.h"
#include "data/foreign_members.h"
#include "data/token_file.h"

namespace ds {
namespace {

constexpr std::string_view kTakesAll = "set data.format to \"text\", which takes any bytes";

// text[begin, end) of at most 4 MiB, which ends where a character does.
size_t chunk_end(std::string_view text, size_t begin) {
  constexpr size_t kChunk = size_t{4} << 20;
  size_t end = std::min(begin + kChunk, text.size());
  for (int back = 0; end < text.size() && back < 3 && (static_cast<u8>(text[end]) & 0xC0) == 0x80; ++back) --end;
  return end;
}

[[noreturn]] void refuse_byte(const MappedFile& file, size_t at) {
  const auto before = file.text().substr(0, at);
  const i64 line = std::ranges::count(before, '\n') + 1;
  const char* why = file.text()[at] == '\0'
                        ? "is NUL, which text does not contain, but UTF-16, binary data and token ids do (data.format "
                          "\"bin\"): convert the file"
                        : "is not UTF-8: convert the file, as by iconv";
  throw Error(Errc::Mismatch,
              fmt::format("data file '{}', line {}: byte {} {}, or {}", file.path(), line, at, why, kTakesAll));
}

void check_characters(const MappedFile& file) {
  const std::string_view text = file.text();
  for (size_t begin = 0; begin < text.size();) {
    file.check_size();
    const size_t end = chunk_end(text, begin);
    const std::string_view chunk = text.substr(begin, end - begin);
    const size_t nul = std::min(chunk.find('\0'), chunk.size());
    if (nul < chunk.size() || !simdjson::validate_utf8(chunk)) {
      size_t at = 0;
      while (at < nul) {
        const size_t bytes = utf8_length(chunk.substr(at));
        if (bytes == 0) break;
        at += bytes;
      }
      refuse_byte(file, begin + at);
    }
    begin = end;
  }
}

// Lines of JSON under a name that does not say so would be trained on as text, with their braces.
bool looks_like_jsonl(std::string_view text) {
  constexpr size_t kMostLooked = size_t{1} << 20;
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == text.npos || text[begin] != '{') return false;
  const std::string_view line = text.substr(begin, std::min(text.find('\n', begin), begin + kMostLooked) - begin);
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) return false;
  for (const char* name : {"text", "messages", "prompt"})
    if (json.contains(name)) return true;
  return !jq_filter_for(json).empty();
}

void check_text(TokenFile& of, const MappedFile& file, bool takes_any_bytes) {
  const std::string_view kind = kind_of_content(file.text());
  const bool is_known = !kind.empty() && kind != kBinaryData;
  if (takes_any_bytes) {
    if (is_known)
      of.warn(fmt::format("data file '{}' is {}, and is read as text because data.format is \"text\"", of.name, kind));
    return;
  }
  if (is_known) {
    const std::string_view advice = how_to_get_text(kind);
    throw Error(Errc::Mismatch, fmt::format("data file '{}' is {}, not text{}{}", file.path(), kind,
                                            advice.empty() ? "" : ": ", advice));
  }
  DS_CHECK(
      !looks_like_jsonl(file.text()), Errc::Mismatch,
      "data file '{}' has lines of JSON: set data.format to \"jsonl\" to read them as records (or to \"text\", which "
      "trains on the lines as they are)",
      file.path());
  check_characters(file);
}

}  // namespace

std::unique_ptr<TokenFile> open_text_file(const std::string& path, const TextEncoding& encoding) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& text = file->map_text(path);
  check_text(*file, text, encoding.takes_any_bytes);
  if (encoding.tokenizer == nullptr) {
    file->view = {text.data(), DType::U8, text.bytes()};
    return file;
  }
  file->ids = std::make_unique<TokenIds>(*encoding.tokenizer, encoding.num_threads, path);
  file->ids->add_text(text.text(), [&] { text.check_size(); });
  file->ids->map();
  file->view_ids();
  return file;
}

}  // namespace ds
