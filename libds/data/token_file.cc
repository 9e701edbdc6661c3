// SPDX-License-Identifier: Apache-2.0
#include "data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "formats/compressed.h"

namespace ds {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

namespace {

// Calls with a zero of the C++ type.
template <class F>
auto with_type(DType type, F&& f) {
  switch (type) {
    case DType::U8: return f(u8{});
    case DType::I8: return f(std::int8_t{});
    case DType::U16: return f(u16{});
    case DType::I16: return f(std::int16_t{});
    case DType::U32: return f(u32{});
    case DType::I32: return f(i32{});
    case DType::U64: return f(u64{});
    case DType::I64: return f(i64{});
    default: throw Error(Errc::Internal, fmt::format("tokens of {}", dtype_name(type)));
  }
}

// Reads the tokens of a view, without their marks.
template <class Token>
class Reader {
 public:
  explicit Reader(const TokenView& view)
      : data_(view.data),
        bits_(static_cast<Token>(view.has_marks ? ~static_cast<u64>(0) >> 33 : ~static_cast<u64>(0))) {}
  Token operator[](i64 i) const noexcept {
    Token token;
    std::memcpy(&token, data_ + i * static_cast<i64>(sizeof token), sizeof token);
    return static_cast<Token>(token & bits_);
  }

 private:
  const u8* data_;
  Token bits_;
};

template <class Token>
bool in_vocabulary(Token smallest, Token largest, i64 vocab_size) noexcept {
  return !std::cmp_less(smallest, 0) && std::cmp_less(largest, vocab_size);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for its writer
  DS_CHECK(fd_ >= 0, Errc::Config, "cannot open data file '{}': {}", path, system_reason(errno));
  map();
}

MappedFile::MappedFile(const TemporaryFile& file, const std::string& path) : path_(path) {
  fd_ = ::fcntl(file.descriptor(), F_DUPFD_CLOEXEC, 0);
  DS_CHECK(fd_ >= 0, Errc::Io, "cannot open the decompressed '{}': {}", path, system_reason(errno));
  map();
}

void MappedFile::map() {
  try {
    struct stat status {};
    DS_CHECK(::fstat(fd_, &status) == 0, Errc::Io, "cannot read data file '{}': {}", path_, system_reason(errno));
    DS_CHECK(S_ISREG(status.st_mode), Errc::Config, "data file '{}' is not a regular file", path_);
    bytes_ = status.st_size;
    DS_CHECK(bytes_ > 0, Errc::Config, "data file '{}' is empty", path_);
    void* map = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, fd_, 0);
    DS_CHECK(map != MAP_FAILED, Errc::Io, "cannot map data file '{}': {}", path_, system_reason(errno));
    data_ = static_cast<const u8*>(map);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

MappedFile::~MappedFile() {
  ::munmap(const_cast<u8*>(data_), static_cast<size_t>(bytes_));
  ::close(fd_);
}

void MappedFile::check_size() const {
  struct stat status {};
  DS_CHECK(::fstat(fd_, &status) == 0, Errc::Io, "cannot read data file '{}': {}", path_, system_reason(errno));
  DS_CHECK(status.st_size >= bytes_, Errc::Corrupt, "data file '{}' shrank from {} to {} bytes while in use", path_,
           bytes_, static_cast<i64>(status.st_size));
}

void MappedFile::will_need(const u8* data, i64 bytes) noexcept {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes);
  // It is advice: what fails here fails where the bytes are read, and is said there.
  static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED));
}

FileFingerprint MappedFile::fingerprint() const {
  constexpr i64 kEnd = i64{1} << 20;
  check_size();
  const i64 n = std::min(bytes_, kEnd);
  const XXH64_hash_t head = XXH3_64bits(data_, static_cast<size_t>(n));
  return {path_, bytes_, XXH3_64bits_withSeed(data_ + (bytes_ - n), static_cast<size_t>(n), head)};
}

const MappedFile& TokenFile::map_text(const std::string& path) {
  const MappedFile& file = map(path);
  const Compression compression = compression_of(file.text());
  if (compression == Compression::None) return file;
  TemporaryFile text(fmt::format("the text of '{}'", path));
  try {
    decompress(compression, file.text(), [&](std::string_view piece) {
      file.check_size();
      text.append(piece.data(), std::ssize(piece));
    });
  } catch (const Error& e) {
    if (e.code() != Errc::Corrupt) throw;
    throw Error(Errc::Corrupt,
                fmt::format("data file '{}', compressed by {}, {}", path, compression_name(compression), e.what()));
  }
  decompressed = std::make_unique<MappedFile>(text, path);
  note(fmt::format("data file '{}': {} bytes of text, decompressed by {}", path, decompressed->bytes(),
                   compression_name(compression)));
  return *decompressed;
}

void TokenFile::view_ids() {
  decompressed.reset();
  DS_CHECK(ids->num_tokens() > 0, Errc::Config, "data file '{}': its text has no tokens", name);
  view = {ids->data(), ids->token_bytes() == 2 ? DType::U16 : DType::U32, ids->num_tokens(), ids->has_marks()};
}

void TokenFile::read(i64 begin, std::span<i32> out, i64 vocab_size) const {
  mapped.front()->check_size();
  with_type(view.type, [&]<class Token>(Token) {
    const Reader<Token> tokens(view);
    Token smallest = 0, largest = 0;
    for (i64 i = 0; i < std::ssize(out); ++i) {
      const Token token = tokens[begin + i];
      smallest = std::min(smallest, token);
      largest = std::max(largest, token);
      out[static_cast<size_t>(i)] = static_cast<i32>(token);
    }
    if (in_vocabulary(smallest, largest, vocab_size)) [[likely]]
      return;
    i64 bad = begin;
    while (in_vocabulary(tokens[bad], tokens[bad], vocab_size)) ++bad;
    refuse(bad, vocab_size);
  });
}

void TokenFile::read_targets(i64 begin, std::span<i32> out, i64 vocab_size) const {
  read(begin, out, vocab_size);
  if (!view.has_marks) return;
  for (i64 i = 0; i < std::ssize(out); ++i) {
    i32 marked = 0;
    std::memcpy(&marked, view.data + 4 * (begin + i), sizeof marked);
    if ((marked & TokenIds::kNoTarget) != 0) out[static_cast<size_t>(i)] = kIgnoredTarget;
  }
}

i64 TokenFile::find_token(i64 from, i64 to, i64 token) const noexcept {
  return with_type(view.type, [&]<class Token>(Token) {
    if (!std::in_range<Token>(token)) return Borders::kNone;
    const Reader<Token> tokens(view);
    const auto wanted = static_cast<Token>(token);
    constexpr i64 kBlock = 64;  // compared at once
    for (i64 at = from; at < to; at += kBlock) {
      const i64 end = std::min(at + kBlock, to);
      bool any = false;
      for (i64 i = at; i < end; ++i) any |= tokens[i] == wanted;
      if (!any) continue;
      while (tokens[at] != wanted) ++at;
      return at;
    }
    return Borders::kNone;
  });
}

i64 TokenFile::token_at(i64 position) const noexcept {
  return with_type(view.type, [&]<class Token>(Token) { return static_cast<i64>(Reader<Token>(view)[position]); });
}

i64 TokenFile::find_border(i64 from, i64 to, const DocumentRule& rule) const noexcept {
  const i64 known = borders.after(from), end = std::min(known, to);
  if (rule.token >= 0) {
    const i64 ahead = rule.at == DocumentTokenAt::End ? 0 : 1;  // of the token from the last one before the border
    const i64 found = find_token(from + ahead, std::min(end + ahead, view.count), rule.token);
    if (found != Borders::kNone) return found + 1 - ahead;
  }
  return known <= to ? known : Borders::kNone;
}

void TokenFile::add_document_tokens(const DocumentRule& rule) {
  const i64 width = dtype_bytes(view.type);
  const bool fits = with_type(view.type, [&]<class Token>(Token) { return std::in_range<Token>(rule.token); });
  DS_CHECK(fits, Errc::Config, "data.add_document_token: the ids of '{}' are {}, which cannot hold {}", name,
           dtype_name(view.type), rule.token);
  constexpr size_t kAtOnce = size_t{1} << 20;
  TemporaryFile out(fmt::format("the tokens of '{}'", name));
  std::string waiting;
  const u64 token = static_cast<u64>(rule.token);
  const auto append = [&](const void* from, i64 n) {
    waiting.append(static_cast<const char*>(from), static_cast<size_t>(n * width));
    if (waiting.size() < kAtOnce) return;
    out.append(waiting.data(), std::ssize(waiting));
    waiting.clear();
  };
  i64 documents = 0, added = 0;
  for (i64 begin = 0; begin < view.count;) {
    mapped.front()->check_size();
    const i64 end = std::min(find_border(begin, view.count, rule), view.count);
    const bool at_end = rule.at == DocumentTokenAt::End;
    const bool lacks_it = token_at(at_end ? end - 1 : begin) != rule.token;
    if (lacks_it && !at_end) append(&token, 1);
    append(view.data + begin * width, end - begin);
    if (lacks_it && at_end) append(&token, 1);
    ++documents;
    added += lacks_it ? 1 : 0;
    begin = end;
  }
  has_document_tokens = true;
  if (added == 0)
    return note(fmt::format("data file '{}': data.add_document_token adds nothing: all {} documents have {} already",
                            name, documents, rule.token));
  out.append(waiting.data(), std::ssize(waiting));
  extended = std::make_unique<MappedFile>(out, name);
  view.data = extended->data();
  view.count = extended->bytes() / width;
  borders = {};  // the token marks them all
  reading += fmt::format("{}{}{}", reading.empty() ? "" : ", ", rule.token, kTokensAdded);
  note(fmt::format("data file '{}': data.document_token {} was added to {} of its {} documents", name, rule.token,
                   added, documents));
}

void TokenFile::will_need(i64 begin, i64 count) const noexcept {
  const i64 bytes = dtype_bytes(view.type);
  MappedFile::will_need(view.data + begin * bytes, count * bytes);
}

void TokenFile::check(i64 begin, i64 end, i64 vocab_size) const {
  constexpr i64 kChunk = i64{1} << 20;
  with_type(view.type, [&]<class Token>(Token) {
    if (std::is_unsigned_v<Token> && std::cmp_less(std::numeric_limits<Token>::max(), vocab_size)) return;
    const Reader<Token> tokens(view);
    for (i64 at = begin; at < end; at += kChunk) {
      mapped.front()->check_size();
      const i64 chunk_end = std::min(at + kChunk, end);
      Token smallest = 0, largest = 0;
      for (i64 i = at; i < chunk_end; ++i) {
        const Token token = tokens[i];
        smallest = std::min(smallest, token);
        largest = std::max(largest, token);
      }
      if (in_vocabulary(smallest, largest, vocab_size)) [[likely]]
        continue;
      i64 bad = at;
      while (in_vocabulary(tokens[bad], tokens[bad], vocab_size)) ++bad;
      refuse(bad, vocab_size);
    }
  });
}

void TokenFile::refuse(i64 position, i64 vocab_size) const {
  const u8* at = view.data + position * dtype_bytes(view.type);
  const auto [token, is_negative] = with_type(view.type, [&]<class Token>(Token) {
    const Token t = Reader<Token>(view)[position];
    return std::pair(fmt::to_string(t), std::cmp_less(t, 0));
  });
  const std::string why =
      is_negative ? "is negative" : fmt::format("is outside the model's vocabulary of {}", vocab_size);
  if (ids)
    throw Error(Errc::Mismatch, fmt::format("data file '{}': its token {} has the id {} by data.tokenizer, which {}",
                                            name, position, token, why));
  const u8* first = extended || !copied.empty() ? view.data
                    : decompressed              ? decompressed->data()
                                                : mapped.front()->data();
  throw Error(Errc::Mismatch, fmt::format("data file '{}': token {} at position {} (byte {}) {}{}", name, token,
                                          position, at - first, why, read_as));
}

std::vector<FileFingerprint> TokenFile::fingerprints() const {
  std::vector<FileFingerprint> all;
  for (const auto& file : mapped) all.push_back(file->fingerprint());
  if (ids) all.front().ids = ids->hash();
  all.front().reading = reading;
  if (!reading.empty()) all.front().hash = XXH3_64bits_withSeed(reading.data(), reading.size(), all.front().hash);
  return all;
}

}  // namespace ds
