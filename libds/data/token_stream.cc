// SPDX-License-Identifier: Apache-2.0
// Token files: mapping, concatenation, fingerprints, and the split into training and validation tokens.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "data/objective.h"
#include "data/token_ids.h"

namespace ds {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

struct TokenStream::File {
  File(const std::string& path, DataFormat format) : name(path) {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for its writer
    DS_CHECK(fd >= 0, Errc::Config, "cannot open data file '{}': {}", path, system_reason(errno));
    try {
      struct stat status {};
      DS_CHECK(::fstat(fd, &status) == 0, Errc::Io, "cannot read data file '{}': {}", path, system_reason(errno));
      DS_CHECK(S_ISREG(status.st_mode), Errc::Config, "data file '{}' is not a regular file", path);
      bytes = status.st_size;
      DS_CHECK(bytes > 0, Errc::Config, "data file '{}' is empty", path);
      token_bytes = format == DataFormat::Bin ? 2 : 1;
      DS_CHECK(bytes % token_bytes == 0, Errc::Corrupt,
               "data file '{}' has an odd number of bytes ({}): not a file of uint16 tokens", path, bytes);
      void* map = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
      DS_CHECK(map != MAP_FAILED, Errc::Io, "cannot map data file '{}': {}", path, system_reason(errno));
      data = static_cast<const u8*>(map);
    } catch (...) {
      ::close(fd);
      throw;
    }
  }
  ~File() {
    ::munmap(const_cast<u8*>(data), static_cast<size_t>(bytes));
    ::close(fd);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // From here on the tokens are the tokenizer's.
  void encode(const Tokenizer& tokenizer, int num_threads) {
    const std::string_view text(reinterpret_cast<const char*>(data), static_cast<size_t>(bytes));
    ids = std::make_unique<TokenIds>(text, tokenizer, num_threads, name, [&] { check_size(); });
    DS_CHECK(ids->num_tokens() > 0, Errc::Config, "data file '{}': its text has no tokens", name);
    token_bytes = ids->token_bytes();
  }

  const u8* tokens() const noexcept { return ids ? ids->data() : data; }
  i64 num_tokens() const noexcept { return ids ? ids->num_tokens() : bytes / token_bytes; }

  // Touching a mapped page past the end of a file kills the process, so a file that was cut off is found first.
  void check_size() const {
    struct stat status {};
    DS_CHECK(::fstat(fd, &status) == 0, Errc::Io, "cannot read data file '{}': {}", name, system_reason(errno));
    DS_CHECK(status.st_size >= bytes, Errc::Corrupt, "data file '{}' shrank from {} to {} bytes while in use", name,
             bytes, static_cast<i64>(status.st_size));
  }

  // out = tokens [begin, begin + out.size()) of this file.
  void read(i64 begin, std::span<i32> out, i64 vocab_size) const {
    i32 largest = 0;
    const u8* from = tokens() + begin * token_bytes;
    const auto copy = [&]<class Token>(Token token) {
      for (size_t i = 0; i < out.size(); ++i) {
        std::memcpy(&token, from + sizeof token * i, sizeof token);
        largest = std::max(largest, out[i] = static_cast<i32>(token));
      }
    };
    token_bytes == 1 ? copy(u8{}) : token_bytes == 2 ? copy(u16{}) : copy(u32{});
    if (largest < vocab_size) [[likely]]
      return;
    const auto bad = std::find_if(out.begin(), out.end(), [&](i32 id) { return id >= vocab_size; });
    refuse(*bad, begin + (bad - out.begin()), vocab_size);
  }

  // Tokens [begin, end) are all below vocab_size.
  void check(i64 begin, i64 end, i64 vocab_size) const {
    constexpr i64 kChunk = i64{1} << 20;
    if (vocab_size > (i64{1} << (8 * token_bytes)) - 1) return;
    const auto scan = [&]<class Token>(const Token* all) {
      for (i64 at = begin; at < end; at += kChunk) {
        check_size();
        const std::span part(all + at, static_cast<size_t>(std::min(kChunk, end - at)));
        Token largest = 0;
        for (const Token token : part) largest = std::max(largest, token);
        if (largest < vocab_size) continue;
        const auto bad = std::find_if(part.begin(), part.end(), [&](Token id) { return id >= vocab_size; });
        refuse(*bad, at + (bad - part.begin()), vocab_size);
      }
    };
    if (token_bytes == 1) return scan(tokens());
    if (token_bytes == 2) return scan(reinterpret_cast<const u16*>(tokens()));  // a mapping begins on a page
    scan(reinterpret_cast<const u32*>(tokens()));
  }

  [[noreturn]] void refuse(i64 token, i64 position, i64 vocab_size) const {
    if (ids)
      throw Error(
          Errc::Mismatch,
          fmt::format("data file '{}': its token {} has the id {} by data.tokenizer, which is outside the model's "
                      "vocabulary of {}",
                      name, position, token, vocab_size));
    throw Error(Errc::Mismatch,
                fmt::format("data file '{}': token {} at position {} (byte {}) is outside the model's vocabulary of {}",
                            name, token, position, position * token_bytes, vocab_size));
  }

  FileFingerprint fingerprint() const {
    constexpr i64 kEnd = i64{1} << 20;
    check_size();
    const i64 n = std::min(bytes, kEnd);
    const XXH64_hash_t head = XXH3_64bits(data, static_cast<size_t>(n));
    return {name, bytes, XXH3_64bits_withSeed(data + (bytes - n), static_cast<size_t>(n), head)};
  }

  std::string name;
  int fd = -1;
  const u8* data = nullptr;
  i64 bytes = 0;
  std::unique_ptr<TokenIds> ids;  // null: the file holds the tokens itself
  i64 token_bytes = 1;
  i64 first_token = 0;  // position in the stream
};

namespace {

DataFormat resolve_format(std::span<const std::string> files, DataFormat format) {
  if (format != DataFormat::Auto) return format;
  const auto is_bin = [](const std::string& file) { return file.ends_with(".bin"); };
  const auto num_bin = std::count_if(files.begin(), files.end(), is_bin);
  DS_CHECK(num_bin == 0 || num_bin == std::ssize(files), Errc::Config,
           "data files mix .bin tokens and text ('{}' and '{}'): set data.format or use one kind",
           *std::find_if(files.begin(), files.end(), is_bin), *std::find_if_not(files.begin(), files.end(), is_bin));
  return num_bin == 0 ? DataFormat::Text : DataFormat::Bin;
}

void check_holds_a_sample(const TokenStream& stream, i64 seq_length, const Objective& objective, const char* part,
                          const std::string& first_file, const char* advice) {
  const i64 needed = objective.extent(seq_length);
  DS_CHECK(stream.num_tokens() >= needed, Errc::Config,
           "the {} data (from '{}') has {} tokens, but one sample of seq_length {} needs {}: {}", part, first_file,
           stream.num_tokens(), seq_length, needed, advice);
}

}  // namespace

TokenStream::TokenStream(std::span<const std::string> files, DataFormat format, const std::string& tokenizer,
                         int num_threads) {
  const bool is_text = resolve_format(files, format) == DataFormat::Text;
  if (is_text) tokenizer_ = tokenizer;
  std::unique_ptr<Tokenizer> encoder;
  if (is_text && tokenizer != "bytes") {
    encoder = open_tokenizer(tokenizer);
    tokenizer_ = encoder->identity();
  }
  for (const std::string& path : files) {
    const auto file = std::make_shared<File>(path, is_text ? DataFormat::Text : DataFormat::Bin);
    if (encoder) file->encode(*encoder, num_threads);
    file->first_token = end_;
    end_ += file->num_tokens();
    files_.push_back(file);
  }
}

void TokenStream::narrow_to(i64 begin, i64 end) noexcept {
  end_ = begin_ + end;
  begin_ += begin;
}

void TokenStream::read(i64 position, std::span<i32> out, i64 vocab_size) const {
  position += begin_;
  DS_ASSERT(position >= begin_ && position + std::ssize(out) <= end_);
  auto file = std::upper_bound(files_.begin(), files_.end(), position,
                               [](i64 p, const auto& f) { return p < f->first_token; }) -
              files_.begin() - 1;
  while (!out.empty()) {
    const File& f = *files_[file++];
    const i64 begin = position - f.first_token;
    const i64 n = std::min<i64>(std::ssize(out), f.num_tokens() - begin);
    f.check_size();
    f.read(begin, out.first(n), vocab_size);
    out = out.subspan(n);
    position += n;
  }
}

void TokenStream::check(i64 vocab_size) const {
  for (const auto& f : files_) {
    const i64 begin = std::max<i64>(begin_ - f->first_token, 0), end = std::min(end_ - f->first_token, f->num_tokens());
    if (begin < end) f->check(begin, end, vocab_size);
  }
}

std::vector<FileFingerprint> TokenStream::fingerprints() const {
  std::vector<FileFingerprint> result;
  for (const auto& file : files_) result.push_back(file->fingerprint());
  return result;
}

Dataset open_dataset(const DataConfig& config, const Objective& objective, int num_threads) {
  DS_CHECK(!config.train.empty(), Errc::Config, "data.train names no file");
  Dataset data{TokenStream(config.train, config.format, config.tokenizer, num_threads), std::nullopt};
  const i64 total = data.train.num_tokens();
  if (!config.validation.empty()) {
    data.validation.emplace(config.validation, config.format, config.tokenizer, num_threads);
    check_holds_a_sample(*data.validation, config.seq_length, objective, "validation", config.validation.front(),
                         "give more text or a smaller data.seq_length");
  } else if (config.split > 0) {
    check_holds_a_sample(data.train, config.seq_length, objective, "whole", config.train.front(),
                         "give more text or a smaller data.seq_length");
    const i64 cut = total - static_cast<i64>(config.split * static_cast<double>(total));
    data.validation.emplace(data.train).narrow_to(cut, total);
    data.train.narrow_to(0, cut);
    check_holds_a_sample(*data.validation, config.seq_length, objective, "validation", config.train.front(),
                         "raise data.split, set it to 0 or name data.validation files");
  }
  check_holds_a_sample(data.train, config.seq_length, objective, "training", config.train.front(),
                       "give more text or a smaller data.seq_length");
  return data;
}

}  // namespace ds
