// SPDX-License-Identifier: Apache-2.0
#pragma once
// An open data file: a view of its tokens, and the memory behind it. A format is a function that opens one; reading,
// checking and reporting a bad token use only the view.

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/data.h"
#include "data/documents.h"
#include "data/temporary_file.h"
#include "data/token_ids.h"
#include "formats/compressed.h"

namespace ds {

// A file mapped for reading, which takes address space and no memory.
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
  // The T at byte `offset`, aligned or not. Requires: it ends inside the file.
  template <class T>
  T at(i64 offset) const noexcept {
    T value;
    std::memcpy(&value, data_ + offset, sizeof value);
    return value;
  }

  // Throws Errc::Corrupt if the file has been cut off since: touching a mapped page past its end would kill the
  // process.
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

// Consecutive ids, little-endian integers of 8 to 64 bits.
struct TokenView {
  const u8* data = nullptr;  // need not be aligned
  DType type = DType::U8;
  i64 count = 0;
  bool has_marks = false;  // U32 whose highest bit marks a token that is not predicted (TokenIds::kNoTarget)
};

// The end of TokenFile::reading where data.document_token was added to documents.
inline constexpr std::string_view kTokensAdded = " added to documents";

struct TokenFile {
  std::string name;  // for messages
  TokenView view;
  // The files that the view depends on, all in the fingerprint. Reading checks that the first one is still whole.
  std::vector<std::unique_ptr<const MappedFile>> mapped;
  std::unique_ptr<const MappedFile> decompressed;  // the text of a compressed file, while it is read
  std::string reading;            // how the file is read, in words: part of the first file's fingerprint
  std::string copied;             // the ids, if the file holds them in a form that cannot be viewed
  std::unique_ptr<TokenIds> ids;  // the ids, if a tokenizer made them
  bool has_messages = false;      // the file contains conversations, which are formatted by a template
  Borders borders;                // between its documents, as far as its format knows them
  bool knows_borders = false;     // the format does, be it that there are none
  std::string borders_of{};       // what knows them, for messages: "its index"; empty: nothing, or the lines of a text
  bool has_document_tokens = false;            // each document has data.document_token, since it was added
  std::unique_ptr<const MappedFile> extended;  // the ids with tokens added
  i64 first_token = 0;                         // position in the stream
  std::string read_as;                         // what messages of bad tokens add: "; the file is read as uint16"
  bool width_is_assumed = false;               // ids are read as uint16 although the type was not given
  std::vector<Remark> remarks;

  const MappedFile& map(const std::string& path) { return *mapped.emplace_back(new MappedFile(path)); }
  void warn(std::string text) { remarks.push_back({LogLevel::Warning, std::move(text)}); }
  void note(std::string text) { remarks.push_back({LogLevel::Info, std::move(text)}); }
  // Maps a file of text, decompressing gzip and zstd. Throws Errc::Corrupt if that fails.
  const MappedFile& map_text(const std::string& path);
  Compression compression() const noexcept { return compression_of(mapped.front()->text()); }
  // Makes `ids` the view. Throws Errc::Config if there are none.
  void view_ids();

  // out = tokens [begin, begin + out.size()). Throws as TokenStream::read.
  void read(i64 begin, std::span<i32> out, i64 vocab_size) const;
  // The same, with kIgnoredTarget for tokens that are no target. Throws as TokenStream::read.
  void read_targets(i64 begin, std::span<i32> out, i64 vocab_size) const;
  // The first border after `from` and at most at `to`, or Borders::kNone: of `borders`, or marked by the token. Both
  // lie in the file, the ends included; its end is a border only if the token marks it. Does not check that the file is
  // whole.
  i64 find_border(i64 from, i64 to, const DocumentRule& rule) const noexcept;
  // The same of the token alone: where it stands first in [from, to), or kNone.
  i64 find_token(i64 from, i64 to, i64 token) const noexcept;
  i64 token_at(i64 position) const noexcept;
  i64 num_documents() const noexcept { return borders.count() + 1; }
  // Adds the token to the documents that lack it, at their end or beginning: the view is then of a copy. Throws
  // Errc::Config if the type of the ids cannot hold it, and Errc::Io.
  void add_document_tokens(const DocumentRule& rule);
  // As TokenStream::will_need.
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
  DocumentRule documents{};
  ChatTemplateConfig chat_template{};
  bool takes_any_bytes = false;  // data.format is "text": binary data is text, too
};

// Each throws as the constructor of TokenStream does.
std::unique_ptr<TokenFile> open_text_file(const std::string& path, const TextEncoding&);
std::unique_ptr<TokenFile> open_jsonl_file(const std::string& path, const TextEncoding&);
// Apache Arrow's files and streams, and Parquet: tables whose columns correspond to the members of JSONL.
// Errc::Unavailable if the build lacks Arrow.
std::unique_ptr<TokenFile> open_arrow_file(const std::string& path, DataFormat format, const TextEncoding&);
// Ids without a header, as nanoGPT and numpy's tofile() write them. Throws Errc::Mismatch if the type is Auto and the
// bytes do not look like uint16.
std::unique_ptr<TokenFile> open_bin_file(const std::string& path, TokenDtype type);
// Karpathy, "llm.c", dev/data: 256 int32 (magic number, version, number of tokens, zeros) and the tokens, uint16 of
// GPT-2 or uint32 of Llama 3. The count is read as unsigned, so that it reaches 2^32 - 1.
std::unique_ptr<TokenFile> open_llmc_file(const std::string& path);
// Whether the file begins as llm.c's do: no file of GPT-2's or a smaller vocabulary in uint16 does so by chance.
bool is_llmc_file(const std::string& path);
// Megatron-LM's indexed dataset: PREFIX, PREFIX.bin or PREFIX.idx. The tokens are those of the .bin in its order. The
// index states their type and documents, must cover the .bin without holes, and is not needed afterwards.
std::unique_ptr<TokenFile> open_megatron_file(const std::string& name, bool finds_borders = true);
// A dataset of integers, FILE or FILE:/path/to/dataset, in row-major order. Rows of more than one token are documents.
std::unique_ptr<TokenFile> open_hdf5_file(const std::string& name);

}  // namespace ds
