// SPDX-License-Identifier: Apache-2.0
#pragma once
// One data file, opened: a view of its tokens and what they stand in. A format is a function that makes one; all that
// follows (reading, checking, naming a bad token) knows the view alone.

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/data.h"
#include "data/temporary_file.h"
#include "data/token_ids.h"
#include "formats/compressed.h"

namespace ds {

// A file, mapped to be read: it costs address space, not memory.
class MappedFile {
 public:
  // Throws Errc::Config (cannot be opened, not a file, empty), Errc::Io.
  explicit MappedFile(const std::string& path);
  // Maps the present content of `file`; messages name it `path`.
  MappedFile(const TemporaryFile& file, const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  const u8* data() const noexcept { return data_; }
  i64 bytes() const noexcept { return bytes_; }
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_), static_cast<size_t>(bytes_)}; }
  // The T that begins at byte `offset`, wherever that is. Requires: it ends inside the file.
  template <class T>
  T at(i64 offset) const noexcept {
    T value;
    std::memcpy(&value, data_ + offset, sizeof value);
    return value;
  }

  // Touching a mapped page past the end of a file kills the process, so a file that was cut off is found first: throws
  // Errc::Corrupt.
  void check_size() const;
  // Asks the system to read the pages of bytes [data, data + bytes) of any mapping, and does not wait for them.
  static void will_need(const u8* data, i64 bytes) noexcept;
  FileFingerprint fingerprint() const;

 private:
  void map();  // closes fd_ before it throws

  std::string path_;
  int fd_ = -1;
  const u8* data_ = nullptr;
  i64 bytes_ = 0;
};

// Ids one after the other, little-endian: integers of 8 to 64 bits.
struct TokenView {
  const u8* data = nullptr;  // need not be aligned
  DType type = DType::U8;
  i64 count = 0;
  bool has_marks = false;  // U32 whose highest bit says that the token is no target (TokenIds::kNoTarget)
};

struct TokenFile {
  std::string name;  // for messages
  TokenView view;
  // What the view depends on, all of it fingerprinted. Reading asks whether the first is still whole.
  std::vector<std::unique_ptr<const MappedFile>> mapped;
  std::unique_ptr<const MappedFile> decompressed;  // the text of a compressed file, while it is read
  std::string reading;            // what it depends on besides, in words: part of the first file's fingerprint
  std::string copied;             // the ids, where the file has them in a form that cannot be viewed
  std::unique_ptr<TokenIds> ids;  // or where a tokenizer has made them
  bool has_messages = false;      // conversations, which have a template
  i64 first_token = 0;            // position in the stream
  std::string read_as;            // what messages of bad tokens add: "; the file is read as uint16"
  bool width_is_assumed = false;  // ids are read as uint16, and nobody has said so
  std::vector<Remark> remarks;

  const MappedFile& map(const std::string& path) { return *mapped.emplace_back(new MappedFile(path)); }
  void warn(std::string text) { remarks.push_back({LogLevel::Warning, std::move(text)}); }
  void note(std::string text) { remarks.push_back({LogLevel::Info, std::move(text)}); }
  // A file of text, decompressed if it is compressed by gzip or zstd. Throws Errc::Corrupt where that fails.
  const MappedFile& map_text(const std::string& path);
  Compression compression() const noexcept { return compression_of(mapped.front()->text()); }
  // The view is what the tokenizer has made of the file. Throws Errc::Config where that is nothing.
  void view_ids();

  // out = tokens [begin, begin + out.size()). Throws as TokenStream::read.
  void read(i64 begin, std::span<i32> out, i64 vocab_size) const;
  // The same, with kIgnoredTarget for tokens that are no target. Throws as TokenStream::read.
  void read_targets(i64 begin, std::span<i32> out, i64 vocab_size) const;
  // They are read soon.
  void will_need(i64 begin, i64 count) const noexcept;
  // Tokens [begin, end) are in the vocabulary: throws as read().
  void check(i64 begin, i64 end, i64 vocab_size) const;
  std::vector<FileFingerprint> fingerprints() const;

 private:
  [[noreturn]] void refuse(i64 position, i64 vocab_size) const;
};

// How text becomes tokens.
struct TextEncoding {
  const Tokenizer* tokenizer;  // null: a token per byte
  std::string tokenizer_path = "bytes";
  int num_threads = 1;
  i64 document_token = -1;  // data.document_token; -1: not set
  ChatTemplateConfig chat_template{};
  bool takes_any_bytes = false;  // data.format is "text": binary data is text, too
};

// Each throws as the constructor of TokenStream does.
std::unique_ptr<TokenFile> open_text_file(const std::string& path, const TextEncoding&);
std::unique_ptr<TokenFile> open_jsonl_file(const std::string& path, const TextEncoding&);
// Apache Arrow's files and streams, and Parquet: tables whose columns are what the members of JSONL are.
// Errc::Unavailable where the build has no Arrow.
std::unique_ptr<TokenFile> open_arrow_file(const std::string& path, DataFormat format, const TextEncoding&);
// Ids without a header, as nanoGPT and numpy's tofile() write them. Throws Errc::Mismatch where the type is Auto and
// the bytes do not look like uint16.
std::unique_ptr<TokenFile> open_bin_file(const std::string& path, TokenDtype type);
// Karpathy, "llm.c", dev/data: 256 int32 (magic number, version, number of tokens, zeros) and the tokens, uint16 of
// GPT-2 or uint32 of Llama 3. The count is read as unsigned, so that it reaches 2^32 - 1.
std::unique_ptr<TokenFile> open_llmc_file(const std::string& path);
// Whether the file begins as llm.c's do: no file of GPT-2's or a smaller vocabulary in uint16 does so by chance.
bool is_llmc_file(const std::string& path);
// Megatron-LM's indexed dataset: PREFIX, PREFIX.bin or PREFIX.idx. The tokens are those of the .bin in its order; the
// index says what they are, is held to cover the .bin without holes, and is not needed any more then.
std::unique_ptr<TokenFile> open_megatron_file(const std::string& name);
// A dataset of integers, FILE or FILE:/path/to/dataset, in row-major order.
std::unique_ptr<TokenFile> open_hdf5_file(const std::string& name);

}  // namespace ds
