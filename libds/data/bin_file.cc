// SPDX-License-Identifier: Apache-2.0
// Token ids without a header. Nothing in such a file says how wide an id is: where the configuration does not either,
// ids are uint16, and a file whose bytes contradict that is refused.

#include <simdjson.h>

#include <algorithm>
#include <bitset>
#include <cstring>

#include "base/check.h"
#include "base/content_kind.h"
#include "config/data_format.h"
#include "data/token_file.h"
#include "formats/compressed.h"

namespace ds {
namespace {

constexpr std::string_view kSetWidth = "set data.token_dtype";

DType id_dtype(TokenDtype type) {
  switch (type) {
    case TokenDtype::U8: return DType::U8;
    case TokenDtype::Auto:
    case TokenDtype::U16: return DType::U16;
    case TokenDtype::I32: return DType::I32;
    case TokenDtype::U32: return DType::U32;
    case TokenDtype::I64: return DType::I64;
    case TokenDtype::U64: return DType::U64;
  }
  throw Error(Errc::Internal, "a type of tokens without a name");
}

// The checks look at no more than the first ids, for patterns that only a wrong width leaves.
constexpr i64 kLookedAt = i64{1} << 16;
// Ids may look like a shorter one.
constexpr size_t kLeastSignature = 3;

u64 id_at(const MappedFile& bin, i64 index, i64 width) noexcept {
  u64 id = 0;
  std::memcpy(&id, bin.data() + index * width, static_cast<size_t>(width));
  return id;
}

// Every second id is almost 0, and the others are not: the high halves of ids twice as wide.
bool looks_twice_as_wide(const MappedFile& bin, i64 width) noexcept {
  constexpr i64 kLeastPairs = 16;
  constexpr u64 kMostHigh = 3;  // of vocabularies below 2^18
  const i64 pairs = std::min(bin.bytes() / width, kLookedAt) / 2;
  u64 low = 0, high = 0;
  for (i64 i = 0; i < pairs; ++i) {
    low = std::max(low, id_at(bin, 2 * i, width));
    high = std::max(high, id_at(bin, 2 * i + 1, width));
  }
  return width < 8 && pairs >= kLeastPairs && high <= kMostHigh && low > kMostHigh;
}

// No id of 256 has a low byte above 127, and their high bytes are many.
bool looks_half_as_wide(const MappedFile& bin, i64 width) noexcept {
  constexpr i64 kLeast = 256;
  constexpr size_t kLeastHigh = 8;
  const i64 count = std::min(bin.bytes() / width, kLookedAt);
  u64 low = 0;
  std::bitset<256> high;
  for (i64 i = 0; i < count; ++i) {
    const u64 id = id_at(bin, i, width);
    low |= id & 0xff;
    high.set(id >> 8 & 0xff);
  }
  return width > 1 && count >= kLeast && low < 128 && high.count() >= kLeastHigh;
}

bool looks_like_text(const MappedFile& bin) noexcept {
  constexpr size_t kLeast = 64;
  std::string_view text = bin.text().substr(0, kLookedAt);
  for (int back = 0; text.size() < bin.text().size() && back < 4 && !simdjson::validate_utf8(text); ++back)
    text.remove_suffix(1);  // a character that is cut
  return text.size() >= kLeast && text.find('\0') == text.npos && simdjson::validate_utf8(text);
}

// Why the ids do not look like ids of `width` bytes; empty: they may be.
std::string what_it_looks_like(const MappedFile& bin, i64 width) {
  if (const std::string_view kind = kind_by_signature(bin.text().substr(0, 4096), kLeastSignature); !kind.empty()) {
    const std::string_view advice = how_to_get_text(kind);
    return fmt::format("is {}, not token ids without a header{}{}", kind, advice.empty() ? "" : ": ", advice);
  }
  if (looks_like_text(bin)) return "looks like text: it is UTF-8 without NUL";
  if (looks_twice_as_wide(bin, width))
    return fmt::format("looks like ids of {} or more bytes: every second one is almost 0", 2 * width);
  if (looks_half_as_wide(bin, width)) return "looks like ids of 1 byte or big-endian ids: no low byte is above 127";
  return {};
}

// By its name and its content: ids may begin like a compressed file.
bool is_compressed(const std::string& path, const MappedFile& bin) {
  return name_without_compression(path) != path && compression_of(bin.text()) != Compression::None;
}

}  // namespace

std::unique_ptr<TokenFile> open_bin_file(const std::string& path, TokenDtype type) {
  auto file = std::make_unique<TokenFile>();
  file->name = path;
  const MappedFile& bin = file->map(path);
  const DType dtype = id_dtype(type);
  const i64 width = dtype_bytes(dtype);
  const std::string_view name = dtype_name(dtype);
  const bool is_given = type != TokenDtype::Auto;
  file->read_as = fmt::format("; the file is read as {} ({})", name, is_given ? "data.token_dtype" : kSetWidth);
  if (const std::string looks = what_it_looks_like(bin, width); !looks.empty()) {
    DS_CHECK(is_given && !is_compressed(path, bin), Errc::Mismatch, "data file '{}' {} ({})", path, looks, kSetWidth);
    file->warn(fmt::format("data file '{}' {}{}", path, looks, file->read_as));
  }
  DS_CHECK(bin.bytes() % width == 0, Errc::Corrupt, "data file '{}' has {} bytes, no multiple of {}{}", path,
           bin.bytes(), width, file->read_as);
  file->view = {bin.data(), dtype, bin.bytes() / width};
  file->width_is_assumed = !is_given;
  if (dtype != DType::U16) file->reading = fmt::format("{} without a header", name);
  return file;
}

}  // namespace ds
