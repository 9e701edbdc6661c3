// SPDX-License-Identifier: Apache-2.0
// Data files by their content: compressed ones are read, and a file that is not what it would be read as is refused.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "data/token_file.h"
#include "data/tokenizer.h"
#include "expect_error.h"
#include "formats/compressed.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace data_kind_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

constexpr i64 kAnyId = (i64{1} << 31) - 1;

TokenStream open(const std::string& file, const StreamOptions& options = {}) {
  return TokenStream(std::span(&file, 1), options);
}
std::vector<i32> read_all(const TokenStream& stream) {
  std::vector<i32> out(static_cast<size_t>(stream.num_tokens()));
  stream.read(0, out, kAnyId);
  return out;
}
std::string text_of(const TokenStream& stream) {
  std::string text;
  for (const i32 id : read_all(stream)) text += static_cast<char>(id);
  return text;
}
std::vector<std::string> texts_of(const TokenStream& stream, LogLevel level) {
  std::vector<std::string> texts;
  for (const Remark& remark : stream.remarks())
    if (remark.level == level) texts.push_back(remark.text);
  return texts;
}
std::vector<std::string> warnings_of(const TokenStream& stream) { return texts_of(stream, LogLevel::Warning); }
std::vector<std::string> notes_of(const TokenStream& stream) { return texts_of(stream, LogLevel::Info); }
// '+' for each token that is to be predicted, '-' for the others.
std::string targets_of(const TokenStream& stream) {
  std::vector<i32> out(static_cast<size_t>(stream.num_tokens()));
  stream.read_targets(0, out, kAnyId);
  std::string marks;
  for (const i32 id : out) marks += id == kIgnoredTarget ? '-' : '+';
  return marks;
}

std::string gzip(std::string_view text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
std::string zstd(std::string_view text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // as its command does
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}
// Metadata that a decompressor passes over, as pzstd writes it.
std::string skippable_frame() { return std::string("\x50\x2a\x4d\x18\4\0\0\0abcd", 12); }

std::string long_text() {
  std::string text;
  for (int i = 0; text.size() < (size_t{3} << 20); ++i)
    text += fmt::format("{} is followed by {}.\n", i, i * 7919 % 104729);
  return text;
}

template <class T>
std::string bytes_of(const std::vector<i64>& values) {
  std::string bytes;
  for (const i64 value : values) {
    const T id = static_cast<T>(value);
    bytes.append(reinterpret_cast<const char*>(&id), sizeof id);
  }
  return bytes;
}
std::vector<i64> ids(i64 count, i64 vocabulary) {
  std::vector<i64> all;
  for (i64 i = 0; i < count; ++i) all.push_back((31 * i * i + 977 * i + 5) % vocabulary);
  return all;
}

// ---- compressed ----

TEST(CompressedText, IsReadAsTheTextThatWasCompressed) {
  const TempDirectory dir;
  const std::string text = long_text(), half = text.substr(0, text.size() / 2), rest = text.substr(text.size() / 2);
  const std::pair<const char*, std::string> files[] = {
      {"a.txt.gz", gzip(text)},
      {"members.txt.gz", gzip(half) + gzip("") + gzip(rest)},
      {"padded.gz", gzip(text) + std::string(1000, '\0')},
      {"a.txt.zst", zstd(text)},
      {"frames.zst", skippable_frame() + zstd(half) + skippable_frame() + zstd(rest)},
      {"no-suffix", zstd(text)},
      {"wrong-suffix.gz", zstd(text)},
  };
  for (const auto& [name, bytes] : files) {
    write_file(dir / name, bytes);
    const TokenStream stream = open(dir / name);
    EXPECT_TRUE(text_of(stream) == text) << name;
    const std::vector<FileFingerprint> prints = stream.fingerprints();
    ASSERT_EQ(prints.size(), 1u);
    EXPECT_EQ(prints[0].bytes, std::ssize(bytes)) << name;
    EXPECT_THAT(notes_of(stream), ElementsAre(AllOf(HasSubstr(name), HasSubstr("decompressed by"))));
  }
}

TEST(CompressedText, OfJsonlAndByATokenizerToo) {
  const TempDirectory dir;
  std::string lines;
  for (int i = 0; i < 300; ++i) lines += fmt::format("{{\"text\": \"line {} of many\"}}\n", i);
  write_file(dir / "a.jsonl", lines);
  write_file(dir / "a.jsonl.gz", gzip(lines));
  write_file(dir / "a.json.zst", zstd(lines));
  write_file(dir / "a.ndjson.zstd", zstd(lines));
  const StreamOptions gpt2{.tokenizer = test_data("tokenizers/gpt2"), .num_threads = 3};
  const std::vector<i32> want = read_all(open(dir / "a.jsonl", gpt2));
  for (const char* name : {"a.jsonl.gz", "a.json.zst", "a.ndjson.zstd"})
    EXPECT_EQ(read_all(open(dir / name, gpt2)), want);
  write_file(dir / "a.txt", long_text());
  write_file(dir / "a.txt.gz", gzip(long_text()));
  EXPECT_EQ(read_all(open(dir / "a.txt.gz", gpt2)), read_all(open(dir / "a.txt", gpt2)));
}

TEST(CompressedText, CutOffOrDamagedIsRefused) {
  const TempDirectory dir;
  const std::string text = long_text();
  for (const std::string& whole : {gzip(text), zstd(text)}) {
    for (const size_t size : {size_t{12}, size_t{30}, whole.size() / 2, whole.size() - 1}) {
      write_file(dir / "cut.gz", whole.substr(0, size));
      expect_error(Errc::Corrupt,
                   AllOf(HasSubstr("cut.gz', compressed by "), HasSubstr("ends inside a compressed stream")),
                   [&] { open(dir / "cut.gz"); });
    }
    std::string damaged = whole;
    damaged[whole.size() / 2] = static_cast<char>(damaged[whole.size() / 2] ^ 0x55);
    write_file(dir / "damaged.gz", damaged);
    expect_error(Errc::Corrupt, HasSubstr("damaged"), [&] { open(dir / "damaged.gz"); });
    write_file(dir / "more.gz", whole + "more");
    expect_error(Errc::Corrupt, HasSubstr("other bytes follow"), [&] { open(dir / "more.gz"); });
  }
}

TEST(CompressedText, OfTokensAndArchivesIsRefused) {
  const TempDirectory dir;
  write_file(dir / "a.bin.gz", gzip(bytes_of<u16>(ids(400, 50257))));
  expect_error(Errc::Mismatch, AllOf(HasSubstr("a.bin.gz"), HasSubstr("gzip"), HasSubstr("decompress it")),
               [&] { open(dir / "a.bin.gz"); });
  std::string tar(1024, '\0');
  std::memcpy(tar.data(), "text.txt", 8);
  std::memcpy(tar.data() + 257,
              "ustar\0"
              "00",
              8);
  write_file(dir / "a.tar.gz", gzip(tar));
  expect_error(Errc::Mismatch, HasSubstr("a tar archive"), [&] { open(dir / "a.tar.gz"); });
  write_file(dir / "twice.txt.gz", gzip(gzip("text")));
  expect_error(Errc::Mismatch, HasSubstr("compressed by gzip, not text"), [&] { open(dir / "twice.txt.gz"); });
}

// ---- not text ----

TEST(TextKind, OtherKindsAreNamedWhateverTheirSuffix) {
  const TempDirectory dir;
  const std::pair<std::string, const char*> kinds[] = {
      {std::string("\x93NUMPY\1\0", 8) + "v\0{'descr': '<u2'", "a NumPy file"},
      {std::string("\3\0\0\0\x14\0\0\0\x3c\0\0\0\x64\0\0\0\x8c\0\0\0 and samples", 32), "MDS"},
      {std::string("\x80\4\x95\3\0\0\0\0\0\0\0K\1.", 14), "a pickle"},
      {"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "a PDF document"},
      {std::string("\xff\xfeh\0e\0l\0l\0o\0", 12), "UTF-16"},
      {std::string("\xff\xfe\0\0h\0\0\0", 8), "UTF-32"},
      {std::string("PK\3\4\x14\0", 6), "a zip archive"},
      {std::string("\xfd"
                   "7zXZ\0",
                   6),
       "xz"},
      {"BZh91AY&SY1234", "bzip2"},
      {std::string("\x04\x22\x4d\x18\x64\x40", 6), "lz4"},
      {"PAR1\x15\x04", "a Parquet file"},
      {"version https://git-lfs.github.com/spec/v1\n", "Git LFS"},
      {std::string("ARROW1\0\0", 8), "an Arrow file"},
      {std::string("SQLite format 3\0", 16), "SQLite"},
      {"\x89PNG\r\n\x1a\n", "PNG"},
      {"\x89HDF\r\n\x1a\n", "HDF5"},
      {std::string("GGUF\3\0\0\0", 8), "GGUF"},
      {std::string("MMIDIDX\0\0", 9), "Megatron"},
  };
  for (const auto& [bytes, kind] : kinds) {
    write_file(dir / "a.txt", bytes + std::string(50, 'x'));
    expect_error(Errc::Mismatch, AllOf(HasSubstr("a.txt"), HasSubstr(kind), HasSubstr("not text")),
                 [&] { open(dir / "a.txt"); });
    // With data.format "text" it is read, with a warning.
    const TokenStream stream = open(dir / "a.txt", {.format = DataFormat::Text});
    EXPECT_EQ(stream.num_tokens(), std::ssize(bytes) + 50);
    EXPECT_THAT(warnings_of(stream), ElementsAre(AllOf(HasSubstr("a.txt"), HasSubstr(kind))));
  }
}

TEST(TextKind, TextIsUtf8WithoutNul) {
  const TempDirectory dir;
  const std::string text = long_text();
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    write_file(dir / "a.txt", bytes);
    for (const std::string& tokenizer : {std::string("bytes"), test_data("tokenizers/gpt2")})
      expect_error(Errc::Mismatch, AllOf(HasSubstr("a.txt"), HasSubstr(why), HasSubstr("data.format")),
                   [&] { open(dir / "a.txt", {.tokenizer = tokenizer}); });
    EXPECT_TRUE(text_of(open(dir / "a.txt", {.format = DataFormat::Text})) == bytes);
    EXPECT_THAT(warnings_of(open(dir / "a.txt", {.format = DataFormat::Text})), IsEmpty());
  };
  refused("na\xefve\n", "line 1: byte 2 is not UTF-8");
  refused("one\ntwo\n\xa0three", "line 3: byte 8 is not UTF-8");
  refused(text + text + "\xed\xa0\x80", fmt::format("byte {} is not UTF-8", 2 * text.size()));
  refused(text + text + "\xe2\x82", fmt::format("byte {} is not UTF-8", 2 * text.size()));
  refused(std::string("h\0e\0l\0l\0o\0", 10), "line 1: byte 1 is NUL");
  refused(text + text + std::string(1, '\0') + text, fmt::format("byte {} is NUL", 2 * text.size()));
}

TEST(TextKind, CharactersAreNotCutWhereTheyAreChecked) {
  const TempDirectory dir;
  // Every alignment of characters of two to four bytes to the pieces that are checked.
  for (const char* const c : {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    for (size_t shift = 0; shift < 4; ++shift) {
      std::string text(shift, 'a');
      while (text.size() < (size_t{9} << 20)) text += c;
      write_file(dir / "a.txt", text);
      EXPECT_EQ(open(dir / "a.txt").num_tokens(), std::ssize(text));
    }
  }
}

TEST(TextKind, PlainTextThatBeginsOddlyIsText) {
  const TempDirectory dir;
  for (const char* const text :
       {"BZh is how bzip2 begins", "GGUF is a format", "ORC shouted", "PAR1 begins Parquet", "PKZIP", "RIFF raff",
        "ustar", "{\"a\": 1}", "[1, 2]", "\xef\xbb\xbfwith a mark", "7zip", "MMIDIDX", "LITPKDS"}) {
    write_file(dir / "a.txt", text);
    EXPECT_EQ(text_of(open(dir / "a.txt")), text);
  }
}

TEST(TextKind, LinesOfJsonUnderAnotherNameAreNoText) {
  const TempDirectory dir;
  for (const char* const line :
       {R"({"text": "a"})", R"({"id": 1, "messages": []})", R"({"instruction": "a", "output": "b"})"}) {
    for (const char* const name : {"a.txt", "a.jl", "a", "a.JSONL"}) {
      write_file(dir / name, std::string("\n") + line + "\n" + line + "\n");
      expect_error(Errc::Mismatch, AllOf(HasSubstr(name), HasSubstr("set data.format to \"jsonl\"")),
                   [&] { open(dir / name); });
      EXPECT_GT(open(dir / name, {.format = DataFormat::Text}).num_tokens(), 0);
    }
  }
}

// ---- token ids without a header ----

TEST(BinKind, IdsHaveTheWidthThatIsGiven) {
  const TempDirectory dir;
  const std::vector<i64> want = ids(1000, 50257), large = ids(1000, 128256), small = ids(1000, 250);
  const auto read = [&](const std::string& bytes, TokenDtype type) {
    write_file(dir / "a.bin", bytes);
    const TokenStream stream = open(dir / "a.bin", {.token_dtype = type});
    EXPECT_THAT(warnings_of(stream), IsEmpty());
    std::vector<i64> got;
    for (const i32 id : read_all(stream)) got.push_back(id);
    return got;
  };
  EXPECT_EQ(read(bytes_of<u16>(want), TokenDtype::Auto), want);
  EXPECT_EQ(read(bytes_of<u16>(want), TokenDtype::U16), want);
  EXPECT_EQ(read(bytes_of<u32>(large), TokenDtype::U32), large);
  EXPECT_EQ(read(bytes_of<i32>(large), TokenDtype::I32), large);
  EXPECT_EQ(read(bytes_of<i64>(large), TokenDtype::I64), large);
  EXPECT_EQ(read(bytes_of<u64>(large), TokenDtype::U64), large);
  EXPECT_EQ(read(bytes_of<u8>(small), TokenDtype::U8), small);
  // Small vocabularies and few tokens are nothing odd.
  for (const i64 vocabulary : {2, 4, 65, 250, 300, 1000}) {
    const std::vector<i64> few = ids(500, vocabulary);
    EXPECT_EQ(read(bytes_of<u16>(few), TokenDtype::Auto), few) << vocabulary;
  }
  EXPECT_EQ(read(bytes_of<u16>({7, 0, 8, 0}), TokenDtype::Auto), (std::vector<i64>{7, 0, 8, 0}));
}

TEST(BinKind, IdsThatDoNotLookLikeUint16AreRefused) {
  const TempDirectory dir;
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    write_file(dir / "a.bin", bytes);
    expect_error(Errc::Mismatch, AllOf(HasSubstr("a.bin"), HasSubstr(why)), [&] { open(dir / "a.bin"); });
    // With uint16 given, the file is read, with a warning.
    const TokenStream stream = open(dir / "a.bin", {.token_dtype = TokenDtype::U16});
    EXPECT_THAT(warnings_of(stream),
                ElementsAre(AllOf(HasSubstr("a.bin"), HasSubstr(why), HasSubstr("data.token_dtype"))));
  };
  refused(bytes_of<u32>(ids(500, 50257)), "ids of 4 or more bytes");
  refused(bytes_of<u32>(ids(500, 128256)), "ids of 4 or more bytes");
  refused(bytes_of<i64>(ids(500, 32000)), "ids of 4 or more bytes");
  std::vector<i64> bytes = ids(800, 96);
  bytes[3] = 0;  // which text does not contain
  refused(bytes_of<u8>(bytes), "ids of 1 byte");
  refused(long_text().substr(0, 4000), "looks like text");
  refused(long_text().substr(0, 1 << 20), "looks like text");
  std::string french, csv;
  while (french.size() < 70000) french += "L\xe2\x80\x99\xc3\xa9t\xc3\xa9 \xc3\xa0 la plage. ";
  while (csv.size() < 6000) csv += "1,2,3,";
  refused(french, "looks like text");
  refused(csv, "looks like text");
  std::vector<i64> swapped = ids(500, 120);
  for (i64& id : swapped) id <<= 8;
  refused(bytes_of<u16>(swapped), "big-endian");
  refused(std::string("LITPKDS\1\0\0\0\0\0\0\0\4", 16) + bytes_of<u32>(ids(100, 32000)), "LitGPT");
  refused(std::string("\x93NUMPY\1\0", 8) + std::string(120, ' ') + bytes_of<u16>(ids(100, 50257)), "a NumPy file");
  refused(std::string("PK\3\4", 4) + std::string(200, '\3'), "a zip archive");
  refused(bytes_of<u32>({3, 20, 60, 100, 140}) + std::string(120, '\5'), "MDS");
}

TEST(BinKind, AVocabularyThatUint16CannotHoldNeedsTheWidth) {
  const TempDirectory dir;
  write_file(dir / "a.bin", bytes_of<u16>(ids(400, 50257)));
  open(dir / "a.bin").check_width(65536);
  open(dir / "a.bin", {.token_dtype = TokenDtype::U16}).check_width(152064);
  open(test_data("data/llama3.bin")).check_width(152064);
  expect_error(Errc::Mismatch, AllOf(HasSubstr("a.bin"), HasSubstr("152064"), HasSubstr("data.token_dtype")),
               [&] { open(dir / "a.bin").check_width(152064); });
}

TEST(BinKind, CompressedIdsAreRefusedWhateverTheWidth) {
  const TempDirectory dir;
  write_file(dir / "a.bin.gz", gzip(bytes_of<u32>(ids(400, 50257))) + "more");
  for (const TokenDtype type : {TokenDtype::Auto, TokenDtype::U16, TokenDtype::U32})
    expect_error(Errc::Mismatch, AllOf(HasSubstr("gzip"), HasSubstr("decompress it")),
                 [&] { open(dir / "a.bin.gz", {.token_dtype = type}); });
}

TEST(BinKind, ABadIdSaysHowTheFileIsRead) {
  const TempDirectory dir;
  write_file(dir / "a.bin", bytes_of<u16>({1, 2, 50000, 3}));
  std::vector<i32> out(4);
  expect_error(
      Errc::Mismatch,
      AllOf(HasSubstr("token 50000 at position 2 (byte 4)"), HasSubstr("read as uint16 (set data.token_dtype)")),
      [&] { open(dir / "a.bin").read(0, out, 256); });
  write_file(dir / "b.bin", bytes_of<u16>(ids(400, 50257)));
  expect_error(Errc::Mismatch, HasSubstr("the file is read as uint32 (data.token_dtype)"),
               [&] { open(dir / "b.bin", {.token_dtype = TokenDtype::U32}).check(50257); });
  expect_error(Errc::Config, HasSubstr("data.token_dtype: no data file is a .bin"),
               [&] { open(test_data("data/gpt2.bin"), {.token_dtype = TokenDtype::U32}); });
}

// ---- chat templates ----

class Chat : public ::testing::Test {
 protected:
  Chat() {
    write_file(dir_ / "m.jsonl",
               R"({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})");
  }
  // A copy of a tokenizer of the fixtures, with this template beside it.
  std::string tokenizer(const std::string& name, const std::string& file, const std::string& content) {
    const std::string to = dir_ / "tokenizer";
    fs::remove_all(to);
    fs::copy(test_data("tokenizers/" + name), to);
    if (!file.empty()) write_file(to + "/" + file, content);
    return to;
  }
  std::vector<std::string> caveats(const std::string& tokenizer, const ChatTemplateConfig& chat = {}) {
    return warnings_of(open(dir_ / "m.jsonl", {.tokenizer = tokenizer, .chat_template = chat}));
  }
  const TempDirectory dir_;
};

TEST_F(Chat, AnotherFormThanTheTokenizersIsRefused) {
  const std::string jinja = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}";
  const std::string quoted = nlohmann::json(jinja).dump();
  const std::pair<const char*, std::string> places[] = {
      {"tokenizer_config.json", "{\"chat_template\": " + quoted + "}"},
      {"tokenizer_config.json",
       "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"<|im_start|>\"}, "
       "{\"name\": \"default\", \"template\": " +
           quoted + "}]}"},
      {"tokenizer_config.json", "{\"chat_template\": {\"default\": " + quoted + ", \"a\": \"<|im_start|>\"}}"},
      {"chat_template.jinja", jinja},
  };
  for (const auto& [file, content] : places) {
    for (const char* name : {"gpt2", "qwen2"}) {
      const std::string path = tokenizer(name, file, content);
      expect_error(Errc::Unavailable, AllOf(HasSubstr(path), HasSubstr("data.chat_template")), [&] { caveats(path); });
      EXPECT_THAT(caveats(path, {.user = "[INST] {content} [/INST]", .assistant = " {content} </s>"}), IsEmpty());
    }
  }
}

TEST_F(Chat, OnlyTheTemplateThatAutoTokenizerFindsCounts) {
  const std::string chatml =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
      "'\\n'}}{% endfor %}";
  const auto config = [](const nlohmann::json& value) { return nlohmann::json{{"chat_template", value}}.dump(); };
  // That of a processor.
  std::string path = tokenizer("qwen2", "tokenizer_config.json", config(chatml));
  write_file(path + "/chat_template.json", config("[INST] {{ messages }}"));
  EXPECT_THAT(caveats(path), IsEmpty());
  path = tokenizer("qwen2", "tokenizer_config.json", config("[INST] {{ messages }}"));
  write_file(path + "/chat_template.json", config(chatml));
  expect_error(Errc::Unavailable, HasSubstr("another form"), [&] { caveats(path); });
  write_file(path + "/chat_template.jinja", chatml);
  EXPECT_THAT(caveats(path), IsEmpty());

  EXPECT_THAT(caveats(tokenizer("qwen2", "tokenizer_config.json", config(nullptr))), IsEmpty());
  const nlohmann::json several = {{{"name", "a"}, {"template", chatml}}, {{"name", "b"}, {"template", chatml}}};
  for (const nlohmann::json& none : {several, nlohmann::json::array({several[0]}), nlohmann::json{{"a", chatml}}})
    expect_error(Errc::Unavailable,
                 AllOf(HasSubstr("tokenizer_config.json: chat_template"), HasSubstr("data.chat_template")),
                 [&] { caveats(tokenizer("qwen2", "tokenizer_config.json", config(none))); });
  for (const nlohmann::json& wrong : {nlohmann::json(5), nlohmann::json{{"default", 5}}})
    expect_error(Errc::Corrupt, HasSubstr("tokenizer_config.json: chat_template"),
                 [&] { caveats(tokenizer("qwen2", "tokenizer_config.json", config(wrong))); });
}

TEST_F(Chat, ChatmlIsWarnedOfWhereTheTokenizerHasOtherIdeas) {
  const std::string begin = "{% for message in messages %}", end = "{% endfor %}";
  const std::string generation = "{% if add_generation_prompt %}\n    {{ '<|im_start|>assistant\\n' }}\n{% endif %}";
  EXPECT_THAT(caveats("bytes"), IsEmpty());
  EXPECT_THAT(caveats(tokenizer("qwen2", "", "")), IsEmpty());
  EXPECT_THAT(caveats(tokenizer("qwen2", "chat_template.jinja", " \n")), IsEmpty());
  EXPECT_THAT(caveats(tokenizer("gpt2", "", "")),
              ElementsAre(AllOf(HasSubstr("m.jsonl"), HasSubstr("cut into pieces"))));
  const std::string plain[] = {
      "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}",
      "{{- \"<|im_start|>\" + message.role + \"\\n\" + message.content + \"<|im_end|>\\n\" -}}",
      "\n{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"};
  for (const std::string& body : plain) {
    for (const std::string& jinja :
         {begin + body + end, begin + body + end + generation, "{# a remark #}" + begin + body + end})
      EXPECT_THAT(caveats(tokenizer("qwen2", "chat_template.jinja", jinja)), IsEmpty()) << jinja;
  }
  const std::string other[] = {
      "{{ '<|im_start|>system\\nYou are Qwen.<|im_end|>' }}" + begin + plain[0] + end,
      "{{ bos_token }}" + begin + plain[0] + end,
      begin + "{{'<|im_start|>' + message['role'] + message['content'] + '<|im_end|>'}}" + end,
      begin + plain[0] + "\n" + end,
      begin + "{{'<|im_start|>' + message['role'] + ' \\n' + message['content'] + '<|im_end|>\\n'}}" + end,
      begin + "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}" + end,
      begin + "{{'<|im_start|>' + message['role'] | upper + '\\n' + message['content'] + '<|im_end|>\\n'}}" + end,
      begin + "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n'}}" + end,
      begin + "  {{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}" + end,
      begin + "{{'<|im_start|>bot\\n' + message['content'] + '<|im_end|>\\n'}}" + end,
      begin + "{{'<|im_start|>' + message['role'] + '\\n<think>' + message['content'] + '<|im_end|>'}}" + end};
  for (const std::string& jinja : other)
    EXPECT_THAT(caveats(tokenizer("qwen2", "chat_template.jinja", jinja)),
                ElementsAre(HasSubstr("is another one and is not interpreted")))
        << jinja;
  const std::string foreign[] = {
      begin + "{{'<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>'}}" + end,
      begin + "{# not <|im_start|> #}[INST]{{ message['content'] }}" + end};
  for (const std::string& jinja : foreign)
    expect_error(Errc::Unavailable, HasSubstr("another form"),
                 [&] { caveats(tokenizer("qwen2", "chat_template.jinja", jinja)); });
}

// ---- members that change what is trained on ----

class Members : public ::testing::Test {
 protected:
  TokenStream lines(const std::string& text) {
    write_file(dir_ / "m.jsonl", text);
    return open(dir_ / "m.jsonl", {.chat_template = {.user = "U{content}", .assistant = "A{content}."}});
  }
  // A conversation whose answers have these members.
  static std::string conversation(const std::string& first, const std::string& second) {
    return R"({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2")" + first +
           R"(}, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4")" + second + "}]}\n";
  }
  void refused(const std::string& text, const ::testing::Matcher<const std::string&>& why) {
    expect_error(Errc::Unavailable, AllOf(HasSubstr("m.jsonl:1: "), why), [&] { lines(text); });
  }
  const TempDirectory dir_;
};

TEST_F(Members, WeightsOfMessagesAreHonoured) {
  const std::string both = "---++---++", second = "--------++", first = "---++-----";  // U1A2.U3A4.
  EXPECT_EQ(targets_of(lines(conversation("", ""))), both);
  for (const char* zero : {R"(, "weight": 0)", R"(, "weight": 0.0)", R"(, "loss_weight": 0)", R"(, "train": false)",
                           R"(, "training": false)", R"(, "trainable": 0)", R"(, "loss": false)", R"(, "masked": true)",
                           R"(, "mask": 1)"}) {
    const TokenStream stream = lines(conversation(zero, ""));
    EXPECT_EQ(targets_of(stream), second) << zero;
    EXPECT_EQ(text_of(stream), "U1A2.U3A4.") << zero;
    EXPECT_THAT(notes_of(stream), ElementsAre(HasSubstr("m.jsonl': 1 messages of weight 0 are not trained on")));
    EXPECT_EQ(targets_of(lines(conversation("", zero))), first) << zero;
    EXPECT_THAT(warnings_of(stream), IsEmpty());
  }
  for (const char* both_ways :
       {R"(, "weight": 0, "train": true)", R"(, "mask": 1, "weight": 1)", R"(, "train": true, "weight": 0)"})
    refused(conversation(both_ways, ""), HasSubstr("contradicts"));
  for (const char* one : {R"(, "weight": 1)", R"(, "weight": null)", R"(, "train": true)", R"(, "masked": false)"})
    EXPECT_EQ(targets_of(lines(conversation(one, one))), both) << one;
  expect_error(Errc::Config, HasSubstr("nothing in it is trained on"),
               [&] { lines(conversation(R"(, "weight": 0)", R"(, "weight": 0)")); });
}

TEST_F(Members, WeightsOfRecordsAreHonoured) {
  const std::string zero = R"({"prompt": "p", "completion": "c", "weight": 0})"
                           "\n",
                    one = R"({"prompt": "p", "completion": "c", "weight": 1})"
                          "\n";
  write_file(dir_ / "p.jsonl", zero + one);
  EXPECT_EQ(targets_of(open(dir_ / "p.jsonl")), "---+");
  std::string whole = conversation("", "");
  whole.insert(1, R"("weight": 0, )");
  EXPECT_EQ(targets_of(lines(conversation("", "") + whole)), "---++---++----------");
  refused(R"({"text": "a", "weight": 0})", HasSubstr("leave the record out"));
}

TEST_F(Members, OtherWeightsAreRefused) {
  for (const char* odd : {R"(, "weight": 0.5)", R"(, "weight": 2)", R"(, "weight": -1)", R"(, "weight": NaN)",
                          R"(, "weight": "0")", R"(, "weight": [0])", R"(, "train": {})"})
    refused(conversation(odd, ""), AllOf(HasSubstr("message 2: "), HasSubstr("its member")));
  refused(R"({"text": "a", "weight": 0.25})", HasSubstr("weights 0 and 1"));
  expect_error(Errc::Corrupt, HasSubstr("answers of the model have the role \"assistant\""), [&] {
    lines(R"({"messages": [{"role": "gpt", "content": "1"}, {"role": "assistant", "content": "2"}]})");
  });
  expect_error(Errc::Corrupt, HasSubstr("weight asks for training on the role \"user\""), [&] {
    lines(R"({"messages": [{"role": "user", "content": "1", "weight": 1}, {"role": "assistant", "content": "2"}]})");
  });
}

TEST_F(Members, WhatIsNotSupportedIsRefusedUnlessItIsEmpty) {
  for (const char* name : {"tool_calls", "name", "function_call", "reasoning_content", "tool_call_id", "images",
                           "toolCalls", "loss_mask", "lossWeight", "is_masked", "do_train", "ignore", "documents"}) {
    for (const char* value : {R"("x")", R"([{"id": 1}])", R"({"a": null})", "[[]]", "1", "true"})
      refused(conversation(fmt::format(R"(, "{}": {})", name, value), ""),
              AllOf(HasSubstr("message 2: "), HasSubstr(name), HasSubstr("jq -c 'del(.messages[].")));
    for (const char* nothing : {"null", R"("")", "[]", "{}", "false"})
      EXPECT_EQ(targets_of(lines(conversation(fmt::format(R"(, "{}": {})", name, nothing), ""))), "---++---++")
          << name << nothing;
  }
  for (const char* name : {"tools", "system", "images", "history", "system_message", "loss_mask"}) {
    std::string record = conversation("", "");
    record.insert(1, fmt::format(R"("{}": ["x"], )", name));
    refused(record, AllOf(HasSubstr(name), HasSubstr(fmt::format("del(.{})", name))));
    refused(fmt::format(R"({{"prompt": "p", "{}": "x", "completion": "c"}})", name), HasSubstr(name));
    write_file(dir_ / "t.jsonl", fmt::format(R"({{"text": "a", "{}": "x"}})", name));
    EXPECT_EQ(text_of(open(dir_ / "t.jsonl")), "a");
  }
}

TEST_F(Members, OthersArePassedOverAndNamedOnce) {
  const std::string odd =
      conversation(R"(, "id": 7, "finish_reason": "stop", "constraints": [1], "model_name": "m", "turn": 3)", "");
  EXPECT_THAT(warnings_of(lines(odd + odd)),
              ElementsAre(AllOf(HasSubstr("m.jsonl:1: "),
                                HasSubstr(R"("constraints", "finish_reason", "id", "model_name", "turn")"))));
}

// ---- other programs' names ----

TEST(ForeignRecords, AMessageEndsWithTheCommandThatConverts) {
  const TempDirectory dir;
  const std::pair<const char*, const char*> records[] = {
      {R"([{"text": "a"}, {"text": "b"}])", "jq -c '.[]'"},
      {"[\n  {\"text\": \"a\"}\n]", "jq -c '.[]'"},
      {"{\n  \"text\": \"a\"\n}", "jq -c '.'"},
      {R"({"content": "a"})", "jq -c '{text: .content}'"},
      {R"({"instruction": "a", "input": "", "output": "b"})",
       R"x(jq -c '{prompt: (([.instruction, .input // .context // ""] | map(select(. != "")) | join("\n\n")) + "\n\n"), completion: .output}')x"},
      {R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])", "jq -c '{messages: .}'"},
      {R"({"prompt": "a", "response": "b"})", "jq -c '{prompt: .prompt, completion: .response}'"},
      {R"({"question": "a", "answer": "b"})", "jq -c '{prompt: .question, completion: .answer}'"},
      {R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})",
       R"x(jq -c '{messages: [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), content: .value}]}')x"},
      {R"({"messages": [{"from": "human", "value": "a"}]})", "{messages: [.messages[] | {role: "},
      {R"({"conversation": [{"role": "user", "content": "a"}]})", "jq -c '{messages: .conversation}'"},
      {R"({"data": [{"text": "a"}]})", "jq -c '.data[]'"},
  };
  for (const auto& [text, command] : records) {
    write_file(dir / "a.json", text);
    expect_error(Errc::Corrupt,
                 AllOf(HasSubstr("a.json:1: "), HasSubstr(command), ::testing::EndsWith(" > a-new.jsonl")),
                 [&] { open(dir / "a.json"); });
  }
}

TEST(ForeignRecords, TheCommandIsForTheShellAndLosesNothing) {
  const TempDirectory dir;
  const std::string record = R"({"question": "a", "answer": "b"})";
  write_file(dir / "it's here.jsonl", record);
  expect_error(Errc::Corrupt, AllOf(HasSubstr("it'\\''s here.jsonl' > 'it'\\''s here-new.jsonl'")),
               [&] { open(dir / "it's here.jsonl"); });
  write_file(dir / "a.jsonl.gz", gzip(record));
  expect_error(
      Errc::Corrupt,
      AllOf(HasSubstr(": gzip -dc "), HasSubstr("a.jsonl.gz | jq -c '"), ::testing::EndsWith("' > a-new.jsonl")),
      [&] { open(dir / "a.jsonl.gz"); });
  // A weight, a message of the system or a history would be lost.
  for (const char* const more :
       {R"("system": "s")", R"("weight": 0)", R"("history": [["a", "b"]])", R"("tools": "x")"}) {
    write_file(dir / "b.jsonl", std::string(R"({"question": "a", "answer": "b", )") + more + "}");
    expect_error(Errc::Corrupt, ::testing::Not(HasSubstr("jq")), [&] { open(dir / "b.jsonl"); });
  }
  write_file(dir / "c.jsonl", R"({"conversations": [{"from": "gpt", "value": "a", "weight": 0}]})");
  expect_error(Errc::Corrupt, ::testing::Not(HasSubstr("jq")), [&] { open(dir / "c.jsonl"); });
}

// ---- identity ----

TEST(DataIdentity, ATokenizersLibraryMayBeAnotherWhereTheTokensAreTheSame) {
  DataIdentity saved{.files = {{"a.txt", 10, 1, 77}},
                     .tokenizer = "SentencePiece of 9 ids, tokenizer.model xxh3 00, by sentencepiece 0.1.97"};
  DataIdentity now = saved;
  now.tokenizer = "SentencePiece of 9 ids, tokenizer.model xxh3 00, by sentencepiece 0.2.1";
  check_same_data(saved, now);
  now.files[0].ids = 78;
  expect_error(Errc::Mismatch, AllOf(HasSubstr("a.txt"), HasSubstr("0.2.1"), HasSubstr("0.1.97")),
               [&] { check_same_data(saved, now); });
  expect_error(Errc::Mismatch, HasSubstr("becomes other tokens"), [&] {
    check_same_data(saved, {.files = {{"a.txt", 10, 1, 78}}, .tokenizer = saved.tokenizer});
  });
  // Older checkpoints know neither.
  saved.files[0].ids = 0;
  saved.tokenizer = "SentencePiece of 9 ids, tokenizer.model xxh3 00";
  check_same_data(saved, now);
  now.tokenizer = "SentencePiece of 9 ids, tokenizer.model xxh3 01, by sentencepiece 0.2.1";
  expect_error(Errc::Mismatch, HasSubstr("data.tokenizer is"), [&] { check_same_data(saved, now); });
}

TEST(DataIdentity, HasTheTokensOfTextsAndTheVersionOfTheLibrary) {
  const TempDirectory dir;
  write_file(dir / "a.txt", "some text");
  const std::string sp = test_data("tokenizers/llama2-sp");
  EXPECT_THAT(open_tokenizer(sp)->identity(), HasSubstr(", by sentencepiece 0."));
  const u64 first = open(dir / "a.txt", {.tokenizer = sp}).fingerprints()[0].ids;
  EXPECT_NE(first, 0u);
  EXPECT_EQ(open(dir / "a.txt", {.tokenizer = sp, .num_threads = 2}).fingerprints()[0].ids, first);
  EXPECT_NE(open(dir / "a.txt", {.tokenizer = test_data("tokenizers/gpt2")}).fingerprints()[0].ids, first);
  EXPECT_EQ(open(dir / "a.txt").fingerprints()[0].ids, 0u);
  DataIdentity identity;
  identity.files = open(dir / "a.txt", {.tokenizer = sp}).fingerprints();
  EXPECT_EQ(parse_data_identity(data_identity_json(identity)).files[0].ids, first);
}

}  // namespace data_kind_test
}  // namespace ds
