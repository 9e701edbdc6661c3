// SPDX-License-Identifier: Apache-2.0
// The formats of data files: foreign ones against files of their own writers (tests/golden/make_data.py), large files,
// the detection of formats, resuming, and hostile files.

#include "data/token_file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <random>

#include "base/json.h"
#include "config/data_format.h"
#include "data/objective.h"
#include "expect_error.h"
#include "formats/hdf5.h"
#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace token_files_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::TempDirectory;
using testing::test_data;
using testing::write_file;

std::string golden(const std::string& name) { return test_data("data/" + name); }

TokenStream open(const std::vector<std::string>& files, DataFormat format = DataFormat::Auto, i64 document_token = -1,
                 const std::string& tokenizer = "bytes", int num_threads = 1) {
  return TokenStream(
      files,
      {.format = format, .tokenizer = tokenizer, .num_threads = num_threads, .documents = {.token = document_token}});
}

constexpr i64 kAnyId = (i64{1} << 31) - 1;

std::vector<i32> read(const TokenStream& stream, i64 position, i64 n, i64 vocab_size = kAnyId) {
  std::vector<i32> out(static_cast<size_t>(n), -1);
  stream.read(position, out, vocab_size);
  return out;
}
std::vector<i32> read_all(const TokenStream& stream) { return read(stream, 0, stream.num_tokens()); }

// The tokens that make_data.py writes.
std::vector<i32> made(i64 count, i64 vocabulary) {
  std::vector<i32> ids;
  for (i64 i = 0; i < count; ++i) ids.push_back(static_cast<i32>((31 * i * i + 7 * i) % vocabulary));
  return ids;
}

template <class T>
std::string bytes_of(std::initializer_list<T> values) {
  return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T)};
}
template <class T>
std::string patched(std::string bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

// A file of `bytes` bytes with these at its beginning and its end, and a hole between.
void write_sparse(const std::string& path, const std::string& begin, i64 bytes, const std::string& end) {
  write_file(path, begin);
  fs::resize_file(path, static_cast<std::uintmax_t>(bytes));
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(bytes - std::ssize(end));
  file << end;
}

TEST(DataFormat, IsTakenFromNamesAndWhatLiesBeside) {
  const TempDirectory dir;
  for (const char* name : {"a.bin", "m.bin", "m.idx", "plain"}) write_file(dir / name, "xx");
  const auto format = [&](const std::string& name) { return static_cast<int>(data_format_of(dir / name)); };
  EXPECT_EQ(format("a.bin"), static_cast<int>(DataFormat::Bin));
  EXPECT_EQ(format("nowhere.bin"), static_cast<int>(DataFormat::Bin));
  for (const char* name : {"m.bin", "m.idx", "m"}) EXPECT_EQ(format(name), static_cast<int>(DataFormat::Megatron));
  for (const char* name : {"x.h5", "x.hdf5", "x.h5:/a/b", "x.hdf5:/a.bin"})
    EXPECT_EQ(format(name), static_cast<int>(DataFormat::Hdf5)) << name;
  EXPECT_EQ(format("x.jsonl"), static_cast<int>(DataFormat::Jsonl));
  for (const char* name : {"plain", "a", "x.txt", "x.h5.txt", "bin"})
    EXPECT_EQ(format(name), static_cast<int>(DataFormat::Text)) << name;
  write_file(dir / "m", "a text beside an indexed dataset");
  EXPECT_EQ(format("m"), static_cast<int>(DataFormat::Text));
}

TEST(DataFormat, TokenFilesOfAllKindsAreOneStream) {
  const TempDirectory dir;
  write_file(dir / "nano.bin", bytes_of<u16>({1, 2, 3}));
  const TokenStream stream =
      open({golden("gpt2.bin"), dir / "nano.bin", golden("megatron-int32"), golden("one.h5"), golden("llama3.bin"),
            golden("several.h5:/group/rows"), golden("megatron-uint8.bin"), golden("several.h5:/compact")});
  std::vector<i32> want;
  for (const auto& part : {made(300, 50257), std::vector<i32>{1, 2, 3}, made(17, 100), made(300, 50257),
                           made(300, 128256), made(60, 100), made(17, 100), made(60, 100)})
    want.insert(want.end(), part.begin(), part.end());
  EXPECT_EQ(read_all(stream), want);
  for (const i64 n : {1, 7, 350}) {
    for (i64 begin = 0; begin + n <= stream.num_tokens(); begin += n)
      ASSERT_EQ(read(stream, begin, n), std::vector<i32>(want.begin() + begin, want.begin() + begin + n)) << begin;
  }
  EXPECT_EQ(stream.tokenizer(), "");
  stream.check(kAnyId);
  const std::vector<FileFingerprint> fingerprints = stream.fingerprints();
  std::vector<std::string> names;
  for (const FileFingerprint& f : fingerprints) names.push_back(fs::path(f.name).filename());
  EXPECT_THAT(names, ElementsAre("gpt2.bin", "nano.bin", "megatron-int32.bin", "megatron-int32.idx", "one.h5",
                                 "llama3.bin", "several.h5", "megatron-uint8.bin", "megatron-uint8.idx", "several.h5"));
}

TEST(DataFormat, TokensAndTextAreNotMixed) {
  const TempDirectory dir;
  write_file(dir / "a.txt", "some text");
  for (const std::string& tokens : {golden("gpt2.bin"), golden("megatron-int8.idx"), golden("one.h5")}) {
    for (const std::string& text : {dir / "a.txt", golden("texts.jsonl")})
      expect_error(Errc::Config, AllOf(HasSubstr(tokens), HasSubstr(text), HasSubstr("data.format")), [&] {
        open({tokens, text});
      });
  }
  EXPECT_EQ(open({golden("texts.jsonl"), dir / "a.txt"}).tokenizer(), "bytes");
}

// The bits of a loader that resumes at `consumed` are those of one that has not stopped.
TEST(DataFormat, EveryKindResumesExactly) {
  const TempDirectory dir;
  std::string nano;
  for (const i32 id : made(300, 50257)) nano += bytes_of<u16>({static_cast<u16>(id)});
  write_file(dir / "nano.bin", nano);
  write_file(dir / "a.txt", std::string(600, 'a') + std::string(20, 'b'));
  for (const std::string& name :
       {golden("gpt2.bin"), golden("llama3.bin"), golden("megatron-int64"), golden("megatron-int8.idx"),
        golden("one.h5"), golden("several.h5:/i8"), golden("several.h5:/compact"), golden("texts.jsonl"),
        dir / "nano.bin", dir / "a.txt"}) {
    const auto loader = [&](i64 micro, i64 ranks) {
      return BatchLoader(open({name}), {micro, ranks, 3}, 11, kAnyId, next_token());
    };
    const auto from = [&](i64 micro, i64 ranks, i64 consumed, i64 end) {
      const BatchLoader l = loader(micro, ranks);
      std::vector<i32> all;
      for (; consumed < end; consumed += micro * ranks) {
        for (i64 rank = 0; rank < ranks; ++rank) {
          std::vector<i32> inputs(static_cast<size_t>(3 * micro)), targets(inputs);
          l.load(consumed, 0, rank, inputs, targets);
          for (i64 row = 0; row < micro; ++row) {
            all.insert(all.end(), inputs.begin() + 3 * row, inputs.begin() + 3 * row + 3);
            all.insert(all.end(), targets.begin() + 3 * row, targets.begin() + 3 * row + 3);
          }
        }
      }
      return all;
    };
    std::vector<i32> parts = from(2, 2, 0, 60);
    const std::vector<i32> rest = from(4, 3, 60, 240);
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, from(1, 4, 0, 240)) << name;
    check_same_data(parse_data_identity(data_identity_json(loader(2, 2).identity())), loader(4, 3).identity());
  }
}

TEST(DataFormat, ResumingNoticesAnotherReadingOfTheSameFile) {
  const TempDirectory dir;
  const auto identity = [](const TokenStream& stream) {
    return BatchLoader(stream, {1, 1, 3}, 1, kAnyId, next_token()).identity();
  };
  const auto refused = [&](const TokenStream& a, const TokenStream& b, const char* why) {
    expect_error(Errc::Mismatch, HasSubstr(why), [&] { check_same_data(identity(a), identity(b)); });
  };
  refused(open({golden("gpt2.bin")}), open({golden("gpt2.bin")}, DataFormat::Bin),
          "is read as a plain file, but the run was started with llm.c");
  refused(open({golden("several.h5:/i8")}), open({golden("several.h5:/u8")}),
          "read as HDF5 /u8, but the run was started with HDF5 /i8");
  check_same_data(identity(open({golden("one.h5")})), identity(open({golden("one.h5:/tokens")})));
  refused(open({golden("texts.jsonl")}), open({golden("texts.jsonl")}, DataFormat::Auto, 300), "300 behind each, but");
  refused(open({golden("texts.jsonl")}), open({golden("texts.jsonl")}, DataFormat::Text),
          "a plain file, but the run was started with JSONL");
  refused(open({golden("megatron-uint16")}), open({golden("megatron-uint16.bin")}, DataFormat::Bin), "files");
  // Checkpoints of older builds do not state it.
  DataIdentity older = identity(open({golden("gpt2.bin")}));
  older.files[0].reading.clear();
  expect_error(Errc::Mismatch, HasSubstr("or is read in another way"),
               [&] { check_same_data(older, identity(open({golden("gpt2.bin")}, DataFormat::Bin))); });
  EXPECT_EQ(parse_data_identity(data_identity_json(identity(open({golden("gpt2.bin")})))).files[0].reading, "llm.c");
  // The index counts.
  for (const char* suffix : {".bin", ".idx"})
    fs::copy_file(golden(std::string("megatron-int32") + suffix), dir / (std::string("m") + suffix));
  const DataIdentity saved = identity(open({dir / "m"}));
  check_same_data(saved, identity(open({golden("megatron-int32")})));
  write_file(dir / "m.idx", patched<i64>(testing::read_file(dir / "m.idx"), 34 + 5 * 12 + 8, 1));
  expect_error(Errc::Mismatch, AllOf(HasSubstr("m.idx"), HasSubstr("other content")),
               [&] { check_same_data(saved, identity(open({dir / "m"}))); });
}

// ---- llm.c ----

TEST(LlmcFile, TokensAreThoseOfItsOwnWriter) {
  EXPECT_EQ(read_all(open({golden("gpt2.bin")})), made(300, 50257));
  EXPECT_EQ(read_all(open({golden("llama3.bin")})), made(300, 128256));
  EXPECT_EQ(read_all(open({golden("llama3.bin")}, DataFormat::Llmc)), made(300, 128256));
  EXPECT_EQ(open({golden("gpt2.bin")}, DataFormat::Bin).num_tokens(), 812);
}

TEST(LlmcFile, BadTokensAreNamedWithTheirPlace) {
  expect_error(Errc::Mismatch,
               AllOf(HasSubstr("llama3.bin"), HasSubstr("token 101118 at position 57 (byte 1252)"),
                     HasSubstr("vocabulary of 100000")),
               [] { open({golden("llama3.bin")}).check(100000); });
}

TEST(LlmcFile, HeadersThatContradictThemselvesAreRefused) {
  const TempDirectory dir;
  const std::string good = testing::read_file(golden("gpt2.bin"));
  const auto refused = [&](const std::string& bytes, const char* why, DataFormat format = DataFormat::Auto,
                           Errc code = Errc::Corrupt) {
    write_file(dir / "x.bin", bytes);
    expect_error(code, AllOf(HasSubstr("x.bin"), HasSubstr(why)), [&] { open({dir / "x.bin"}, format); });
  };
  refused(good.substr(0, 4), "has 4 bytes, and its header alone has 1024");
  refused(good.substr(0, 1023), "has 1023 bytes");
  refused(good.substr(0, 1024), "300 tokens of its header make 1624 bytes, and it has 1024");
  refused(good.substr(0, 1623), "and it has 1623");
  refused(good + "xx", "and it has 1626");
  refused(patched<u32>(good, 4, 7), "its version is 7, where it is 1");
  refused(patched<u32>(good, 8, 0xFFFFFFFF), "4294967295 tokens of its header make 8589935614 bytes");
  refused(patched<u32>(good, 8, 0), "0 tokens of its header");
  refused(patched<u32>(good, 8, 0).substr(0, 1024), "has no tokens", DataFormat::Auto, Errc::Config);
  refused(patched<u32>(good, 0, 20240801), "its version is 1, where it is 7");
  refused(patched<u32>(good, 0, 20240522), "examples", DataFormat::Auto, Errc::Unavailable);
  refused(patched<u32>(good, 0, 1), "magic number, 20240520", DataFormat::Llmc);
  refused("x", "magic number", DataFormat::Llmc);
}

// ---- Megatron-LM ----

TEST(MegatronFile, TokensAreThoseOfItsOwnWriter) {
  for (const char* type : {"uint8", "int8", "int16", "int32", "int64", "uint16"}) {
    const std::string prefix = golden(std::string("megatron-") + type);
    for (const char* suffix : {"", ".bin", ".idx"}) {
      EXPECT_EQ(read_all(open({prefix + suffix})), made(17, 100)) << prefix << suffix;
      EXPECT_EQ(read_all(open({prefix + suffix}, DataFormat::Megatron)), made(17, 100)) << prefix << suffix;
    }
    open({prefix}).check(100);
    expect_error(Errc::Mismatch, AllOf(HasSubstr(prefix + ".bin"), HasSubstr("token 80 at position 15")),
                 [&] { open({prefix}).check(80); });
  }
}

class MegatronIndex : public ::testing::Test {
 protected:
  MegatronIndex() { write(good_); }
  void write(const std::string& idx) const {
    write_file(dir_ / "m.bin", bin_);
    write_file(dir_ / "m.idx", idx);
  }
  void refused(const std::string& idx, const char* why, Errc code = Errc::Corrupt) const {
    write(idx);
    expect_error(code, AllOf(HasSubstr("m.idx"), HasSubstr(why)), [&] { open({dir_ / "m"}); });
  }
  TempDirectory dir_;
  const std::string good_ = testing::read_file(golden("megatron-int32.idx"));
  const std::string bin_ = testing::read_file(golden("megatron-int32.bin"));
  // The offsets of the parts of the index.
  static constexpr size_t kVersion = 9, kType = 17, kSequences = 18, kDocuments = 26, kLengths = 34,
                          kPlaces = kLengths + 4 * 5, kEnds = kPlaces + 8 * 5;
};

TEST_F(MegatronIndex, WhatDoesNotAddUpIsRefused) {
  for (size_t n = 1; n < good_.size(); ++n) {
    write(good_.substr(0, n));
    expect_error(Errc::Corrupt, HasSubstr("m.idx"), [&] { open({dir_ / "m"}); });
  }
  refused("XMIDIDX" + good_.substr(7), "does not begin as an index of Megatron-LM");
  refused(std::string("TNTIDX\0\0", 8) + good_.substr(8), "older kind", Errc::Unavailable);
  refused(patched<u64>(good_, kVersion, 2), "its version is 2");
  refused(patched<u8>(good_, kType, 0), "no type of tokens has the code 0");
  refused(patched<u8>(good_, kType, 9), "has the code 9");
  refused(patched<u8>(good_, kType, 6), "are fp64", Errc::Unavailable);
  refused(patched<u8>(good_, kType, 7), "are fp32", Errc::Unavailable);
  refused(patched<u8>(good_, kType, 8), "begins at byte 20");
  for (const u64 n : {u64{6}, u64{9}, u64{1} << 61, ~u64{0}, u64{0x5555555555555556}}) {
    refused(patched<u64>(good_, kSequences, n), "fit into its 134 bytes");
    refused(patched<u64>(good_, kDocuments, n == 6 ? 7 : n), "fit into its 134 bytes");
  }
  refused(patched<u64>(good_, kSequences, 4), "12 bytes are left behind its 4 sequences");
  refused(good_ + "x", "1 bytes are left");
  refused(good_ + std::string(5, '\0'), "several kinds", Errc::Unavailable);
  refused(patched<i32>(good_, kLengths + 4, -2), "sequence 1 has -2 tokens");
  refused(patched<i32>(good_, kLengths, 0x7FFFFFFF), "sequence 0 ends at byte 8589934588");
  refused(patched<i32>(good_, kLengths + 16, 2), "sequence 4 ends at byte 72 of the .bin, which has 68");
  refused(patched<i32>(good_, kLengths + 16, 0), "its sequences are 64 bytes");
  refused(patched<i64>(good_, kPlaces + 8, 24), "sequence 1 begins at byte 24");
  refused(patched<i64>(good_, kPlaces + 8, -1), "sequence 1 begins at byte -1");
  refused(patched<i64>(good_, kPlaces + 32, i64{1} << 62), "sequence 4 begins at byte 4611686018427387904");
  refused(patched<i64>(good_, kEnds, 1), "entry 0 of the document index is 1");
  refused(patched<i64>(good_, kEnds + 8, -1), "entry 1 of the document index is -1");
  refused(patched<i64>(good_, kEnds + 8, 6), "entry 1 of the document index is 6");
  refused(patched<i64>(good_, kEnds + 24, 2), "entry 3 of the document index is 2");
  refused(patched<i64>(good_, kEnds + 32, 4), "its documents end with sequence 4 of 5");
  refused(patched<u64>(good_.substr(0, kEnds), kDocuments, 0), "its documents end with sequence 0 of 5");
}

TEST_F(MegatronIndex, TheTokensMustBeThere) {
  write_file(dir_ / "m.bin", bin_.substr(0, 64));
  expect_error(Errc::Corrupt, HasSubstr("sequence 4 ends at byte 68 of the .bin, which has 64"),
               [&] { open({dir_ / "m"}); });
  write_file(dir_ / "m.bin", bin_ + "more");
  expect_error(Errc::Corrupt, HasSubstr("its sequences are 68 bytes"), [&] { open({dir_ / "m"}); });
  fs::remove(dir_ / "m.bin");
  expect_error(Errc::Config, AllOf(HasSubstr("cannot open"), HasSubstr("m.bin")), [&] { open({dir_ / "m.idx"}); });
  expect_error(Errc::Config, HasSubstr("alone.bin.idx.bin"),
               [&] { open({dir_ / "alone.bin.idx.bin"}, DataFormat::Megatron); });
}

TEST_F(MegatronIndex, NegativeTokensAreNamedWithTheirPlace) {
  write_file(dir_ / "m.bin", patched<i32>(bin_, 4 * 9, -5));
  const TokenStream stream = open({dir_ / "m"});
  const auto what = AllOf(HasSubstr("m.bin"), HasSubstr("token -5 at position 9 (byte 36) is negative"));
  expect_error(Errc::Mismatch, what, [&] { stream.check(kAnyId); });
  expect_error(Errc::Mismatch, what, [&] { read(stream, 7, 5); });
  EXPECT_EQ(read(stream, 10, 7).size(), 7u);
  // Ids that become small when they are cut to 32 bits.
  for (const char* suffix : {".bin", ".idx"})
    fs::copy_file(golden(std::string("megatron-int64") + suffix), dir_ / (std::string("w") + suffix));
  write_file(dir_ / "w.bin", patched<i64>(testing::read_file(dir_ / "w.bin"), 8 * 3, (i64{1} << 32) + 1));
  expect_error(Errc::Mismatch, HasSubstr("token 4294967297 at position 3 (byte 24)"),
               [&] { read(open({dir_ / "w"}), 0, 17); });
  expect_error(Errc::Mismatch, HasSubstr("token 4294967297 at position 3 (byte 24)"),
               [&] { open({dir_ / "w"}).check(100); });
}

// ---- more than 2^31 tokens ----

TEST(LargeTokenFile, IsReadAtItsEnd) {
  constexpr i64 kMany = (i64{1} << 31) + 2000;
  const TempDirectory dir;
  const auto check = [&](const std::string& name) {
    const TokenStream stream = open({name});
    EXPECT_EQ(stream.num_tokens(), kMany) << name;
    EXPECT_THAT(read(stream, kMany - 4, 4), ElementsAre(0, 7, 8, 9)) << name;
    const auto next = next_token();
    std::vector<i32> inputs(999), targets(999);
    const i64 last = next->num_samples(stream.num_tokens(), 999) - 1;
    EXPECT_GT(last * 999, i64{1} << 31);
    next->make_sample(stream, last, {1, 2, 3}, kAnyId, inputs, targets);
    fs::remove(name);
  };
  write_sparse(dir / "nano.bin", "", kMany * 2, bytes_of<u16>({7, 8, 9}));
  check(dir / "nano.bin");
  write_sparse(dir / "llama.bin", bytes_of<u32>({20240801, 7, static_cast<u32>(kMany)}), 1024 + kMany * 4,
               bytes_of<u32>({7, 8, 9}));
  check(dir / "llama.bin");
  // A sequence has at most 2^31 - 1 tokens.
  constexpr i32 kFirst = 0x7FFFFFFF;
  write_file(dir / "m.idx", std::string("MMIDIDX\0\0", 9) + bytes_of<u64>({1}) + bytes_of<u8>({8}) +
                                bytes_of<u64>({2, 2}) + bytes_of<i32>({kFirst, static_cast<i32>(kMany - kFirst)}) +
                                bytes_of<i64>({0, i64{kFirst} * 2}) + bytes_of<i64>({0, 2}));
  write_sparse(dir / "m.bin", "", kMany * 2, bytes_of<u16>({7, 8, 9}));
  check(dir / "m.bin");
  const std::vector<i64> offsets = create_hdf5(dir / "x.h5", {{{"tokens", DType::U16, {kMany}}}}, {});
  {
    std::fstream file(dir / "x.h5", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(offsets[0] + kMany * 2 - 6);
    file << bytes_of<u16>({7, 8, 9});
  }
  check(dir / "x.h5");
}

// ---- HDF5 ----

TEST(Hdf5File, IntegersOfAllSizesAreRead) {
  EXPECT_EQ(read_all(open({golden("one.h5")})), made(300, 50257));
  EXPECT_EQ(read_all(open({golden("one.h5:/tokens")})), made(300, 50257));
  for (const char* name : {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "compact", "group/rows"})
    EXPECT_EQ(read_all(open({golden("several.h5:/") + name})), made(60, 100)) << name;
  EXPECT_EQ(open({golden("several.h5:/negative")}, DataFormat::Hdf5).num_tokens(), 3);
}

TEST(Hdf5File, BadTokensAreNamedWithTheirPlace) {
  expect_error(
      Errc::Mismatch,
      AllOf(HasSubstr("several.h5:/negative"), HasSubstr("token -3 at position 2 (byte "), HasSubstr("is negative")),
      [] { open({golden("several.h5:/negative")}).check(kAnyId); });
  expect_error(Errc::Mismatch, HasSubstr("token 9223372036854775813 at position 1"),
               [] { read_all(open({golden("several.h5:/huge")})); });
  expect_error(Errc::Mismatch, HasSubstr("token 9223372036854775813 at position 1"),
               [] { open({golden("several.h5:/huge")}).check(kAnyId); });
  expect_error(Errc::Mismatch, HasSubstr("several.h5:/compact': token 98 at position 37 (byte 74)"),
               [] { open({golden("several.h5:/compact")}).check(98); });
}

TEST(Hdf5File, WhatIsNotReadIsRefusedByName) {
  const TempDirectory dir;
  const auto refused = [](const std::string& name, Errc code, const ::testing::Matcher<const std::string&>& why) {
    expect_error(code, why, [&] { open({name}, DataFormat::Hdf5); });
  };
  refused(golden("several.h5"), Errc::Config,
          AllOf(HasSubstr("several datasets"), HasSubstr("several.h5:/NAME"), HasSubstr("/group/rows"),
                HasSubstr("/floats"), HasSubstr("/big")));
  refused(golden("several.h5:/group"), Errc::Config, AllOf(HasSubstr("no dataset /group"), HasSubstr("/group/rows")));
  refused(golden("several.h5:/nowhere"), Errc::Config, HasSubstr("no dataset /nowhere"));
  refused(golden("several.h5:/floats"), Errc::Unavailable, HasSubstr("/floats' is of fp32"));
  refused(golden("several.h5:/flags"), Errc::Unavailable, HasSubstr("/flags"));
  refused(golden("several.h5:/big"), Errc::Unavailable, AllOf(HasSubstr("/big"), HasSubstr("big-endian")));
  refused(golden("several.h5:/empty"), Errc::Config, HasSubstr("/empty' has no tokens"));
  refused(golden("chunked.h5"), Errc::Unavailable, AllOf(HasSubstr("/tokens"), HasSubstr("h5repack")));
  refused(golden("gpt2.bin"), Errc::Corrupt, HasSubstr("gpt2.bin"));
  refused(dir / "nowhere.h5:/tokens", Errc::Config, AllOf(HasSubstr("cannot open"), HasSubstr("nowhere.h5'")));
  const std::string good = testing::read_file(golden("one.h5"));
  for (const size_t n : {size_t{1}, size_t{100}, size_t{512}, good.size() - 1}) {
    write_file(dir / "x.h5", good.substr(0, n));
    refused(dir / "x.h5", Errc::Corrupt, HasSubstr("x.h5"));
  }
}

// ---- JSONL ----

std::string text_of(const std::vector<i32>& ids) { return {ids.begin(), ids.end()}; }

TEST(JsonlFile, TextsOfTheLinesAreOneStream) {
  const std::string zurich = "Z\u00fcrich \U0001F642\n";
  const std::string last("A/\\\"\b\f\n\r\t\0", 10);
  EXPECT_EQ(text_of(read_all(open({golden("texts.jsonl")}))), "The first text." + zurich + zurich + last);
  // With a token after each text, which needs no place in the tokenizer; two end with the newline already.
  for (const i64 end : {10, 256, 70000}) {
    std::vector<i32> want;
    for (const std::string& text : {std::string("The first text."), zurich, zurich, std::string(), last}) {
      for (const char c : text) want.push_back(static_cast<u8>(c));
      if (end != '\n' || !text.ends_with('\n')) want.push_back(static_cast<i32>(end));
    }
    const TokenStream stream = open({golden("texts.jsonl")}, DataFormat::Auto, end);
    EXPECT_EQ(read_all(stream), want) << end;
    if (end > 10)
      expect_error(Errc::Mismatch, HasSubstr(fmt::format("its token 15 has the id {} by data.tokenizer", end)),
                   [&] { stream.check(256); });
  }
}

TEST(JsonlFile, TheTokenizersEndOfTextComesBehindEachText) {
  const auto tokenizer = open_tokenizer(test_data("tokenizers/gpt2-files"));
  const std::optional<i32> end = tokenizer->special(SpecialToken::Eos);
  ASSERT_TRUE(end);
  const TempDirectory dir;
  write_file(dir / "a.jsonl", "{\"text\": \"one text\"}\n{\"text\": \"and another\"}\n");
  for (const i64 token : {i64{-1}, i64{5}}) {
    std::vector<i32> want;
    for (const char* text : {"one text", "and another"}) {
      tokenizer->encode(text, want);
      want.push_back(token < 0 ? *end : static_cast<i32>(token));
    }
    const TokenStream stream = open({dir / "a.jsonl"}, DataFormat::Auto, token, test_data("tokenizers/gpt2-files"));
    EXPECT_EQ(read_all(stream), want);
    EXPECT_EQ(stream.tokenizer(), tokenizer->identity());
  }
}

// The targets of the whole stream, with '.' for tokens that are not predicted.
std::string targets_of(const TokenStream& stream) {
  std::vector<i32> ids(static_cast<size_t>(stream.num_tokens()));
  stream.read_targets(0, ids, kAnyId);
  std::ranges::replace(ids, kIgnoredTarget, '.');
  return text_of(ids);
}

TEST(JsonlFile, OfPromptsTheCompletionsAreTargets) {
  const TempDirectory dir;
  write_file(dir / "a.jsonl", R"({"prompt": "2+2=", "completion": "4", "id": 1})"
                              "\n\n"
                              R"({"completion": "yes", "prompt": ""})"
                              "\n"
                              R"({"prompt": "more", "completion": ""})");
  const TokenStream plain = open({dir / "a.jsonl"});
  EXPECT_TRUE(plain.has_marks());
  EXPECT_EQ(text_of(read_all(plain)), "2+2=4yesmore");
  EXPECT_EQ(targets_of(plain), "....4yes....");
  plain.check(128);
  const TokenStream ended = open({dir / "a.jsonl"}, DataFormat::Auto, '|');
  EXPECT_EQ(text_of(read_all(ended)), "2+2=4|yes|more|");
  EXPECT_EQ(targets_of(ended), "....4|yes|....|");
}

TEST(JsonlFile, OfMessagesWhatTheAssistantSaysIsTheTarget) {
  const TempDirectory dir;
  write_file(
      dir / "a.jsonl",
      R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "id": [{}]},)"
      R"( {"content": "Hello!", "role": "assistant"}, {"role": "user", "content": ""},)"
      R"( {"role": "assistant", "content": "Bye"}], "n": {"messages": 1}})"
      "\n"
      R"({"messages": [{"role": "assistant", "content": "ok"}]})");
  const std::string first =
      "<|im_start|>system\nBe "
      "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
      "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nBye<|im_end|>\n";
  const std::string second = "<|im_start|>assistant\nok<|im_end|>\n";
  const TokenStream stream = open({dir / "a.jsonl"});
  EXPECT_EQ(text_of(read_all(stream)), first + second);
  std::string want(first.size() + second.size(), '.');
  for (const std::string part : {"Hello!<|im_end|>", "Bye<|im_end|>", "ok<|im_end|>"})
    want.replace((first + second).find(part), part.size(), part);
  EXPECT_EQ(targets_of(stream), want);
  const TokenStream ended = open({dir / "a.jsonl"}, DataFormat::Auto, 300);
  EXPECT_EQ(ended.num_tokens(), stream.num_tokens() + 2);
  EXPECT_EQ(read(ended, std::ssize(first), 1).front(), 300);
  std::vector<i32> target(1);
  ended.read_targets(std::ssize(first), target, 301);
  EXPECT_EQ(target.front(), kIgnoredTarget);
  expect_error(Errc::Mismatch, HasSubstr("has the id 300 by data.tokenizer"), [&] { ended.check(300); });
}

TokenStream open_chat(const std::string& file, const ChatTemplateConfig& chat) {
  return TokenStream(std::span(&file, 1), {.chat_template = chat});
}

// Llama 2's form, and one with a begin of its own. The assistant's messages are trained on together with the text that
// ends them, but for blanks.
TEST(JsonlFile, OfMessagesATemplateMakesTheForm) {
  const TempDirectory dir;
  write_file(dir / "a.jsonl",
             R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]})"
             "\n");
  const ChatTemplateConfig llama{
      .begin = "", .system = "", .user = "<s>[INST] {content} [/INST]", .assistant = " {content} </s>", .tool = ""};
  const TokenStream stream = open_chat(dir / "a.jsonl", llama);
  EXPECT_EQ(text_of(read_all(stream)), "<s>[INST] Hi [/INST] Yes? </s>");
  EXPECT_EQ(targets_of(stream), ".....................Yes? </s>");
  const ChatTemplateConfig zephyr{.begin = "BEGIN\n",
                                  .system = "<|system|>\n{content}</s>\n",
                                  .user = "<|user|>\n{content}</s>\n",
                                  .assistant = "<|assistant|>\n{content}</s>\n",
                                  .tool = ""};
  const TokenStream other = open_chat(dir / "a.jsonl", zephyr);
  EXPECT_EQ(text_of(read_all(other)), "BEGIN\n<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n");
  EXPECT_EQ(targets_of(other), std::string(36, '.') + "Yes?</s>" + ".");
  // ChatML, spelt out, is ChatML.
  const ChatTemplateConfig chatml{.begin = "",
                                  .system = "",
                                  .user = "<|im_start|>user\n{content}<|im_end|>\n",
                                  .assistant = "<|im_start|>assistant\n{content}<|im_end|>\n",
                                  .tool = ""};
  const TokenStream spelt = open_chat(dir / "a.jsonl", chatml), usual = open({dir / "a.jsonl"});
  EXPECT_EQ(read_all(spelt), read_all(usual));
  EXPECT_EQ(targets_of(spelt), targets_of(usual));
  // A run keeps the template that it began with.
  EXPECT_NE(stream.fingerprints().front().hash, other.fingerprints().front().hash);
  EXPECT_EQ(stream.fingerprints().front().hash, open_chat(dir / "a.jsonl", llama).fingerprints().front().hash);

  write_file(dir / "b.jsonl",
             "\n"
             R"({"messages": [{"role": "system", "content": "a"}]})"
             "\n");
  expect_error(Errc::Corrupt, AllOf(HasSubstr("b.jsonl:2: message 1: "), HasSubstr("no form of the role \"system\"")),
               [&] { open_chat(dir / "b.jsonl", llama); });
  write_file(dir / "c.jsonl", R"({"text": "a"})"
                              "\n");
  expect_error(Errc::Config, HasSubstr("data.chat_template: no data file has messages"),
               [&] { open_chat(dir / "c.jsonl", llama); });
}

// Numbers that JSON cannot represent, in members that nobody reads; in a member that is read, such a number is not a
// string.
TEST(JsonlFile, NumbersThatJsonDoesNotHaveAreNobodysConcern) {
  const TempDirectory dir;
  write_file(dir / "a.jsonl",
             R"({"score": NaN, "text": "a NaN 1e999 \" NaN", "p": [-Infinity, {"q": Infinity}, 1e999, -1E+400, 2.5]})"
             "\n"
             R"({"n": 123456789, "text": "b", "m": 1e-400})"
             "\n");
  EXPECT_EQ(text_of(read_all(open({dir / "a.jsonl"}))), "a NaN 1e999 \" NaNb");
  for (const char* const line : {R"({"text": NaN})", R"({"text": -Infinity})", R"({"text": 1e999})"}) {
    write_file(dir / "b.jsonl", line);
    expect_error(Errc::Corrupt, HasSubstr("b.jsonl:1: its member \"text\" is a number, where a string belongs"),
                 [&] { open({dir / "b.jsonl"}); });
  }
  for (const char* const line :
       {R"({"text": "a", "n": nan})", R"({"text": "a", "n": NaNs})", R"({"text": "a", "n": +1})",
        R"({"text": "a", "n": 1e999e})", R"(NaN)", R"({"n": 1e999, "text": "a)"}) {
    write_file(dir / "b.jsonl", line);
    expect_error(Errc::Corrupt, HasSubstr("b.jsonl:1"), [&] { open({dir / "b.jsonl"}); });
  }
}

TEST(JsonlFile, HasSeveralNames) {
  const TempDirectory dir;
  for (const char* const name : {"a.jsonl", "a.ndjson", "a.json"}) {
    write_file(dir / name, R"({"text": "abc"})");
    EXPECT_EQ(text_of(read_all(open({dir / name}))), "abc") << name;
  }
  write_file(dir / "list.json", "[{\"text\": \"abc\"}]");
  expect_error(Errc::Corrupt, HasSubstr("list.json:1: is an array, where each line is an object"),
               [&] { open({dir / "list.json"}); });
}

// The tokens of a tokenizer that knows the marks of ChatML; the sample is shifted by one, as always.
// Roles of another program, or none that answers: a run would learn nothing, and its loss be 0.
TEST(JsonlFile, DataOfWhichNothingIsLearntAreRefused) {
  const TempDirectory dir;
  write_file(dir / "a.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "judge", "content": "b"}]})"
                              "\n");
  expect_error(Errc::Config,
               AllOf(HasSubstr("a.jsonl"), HasSubstr("no message of the role \"assistant\" has a weight")),
               [&] { open({dir / "a.jsonl"}); });
  write_file(dir / "b.jsonl", R"({"prompt": "a", "completion": ""})"
                              "\n");
  expect_error(Errc::Config, HasSubstr("all completions are empty"), [&] { open({dir / "b.jsonl"}); });
}

TEST(TextFile, TablesOfOtherProgramsAreNoText) {
  const TempDirectory dir;
  write_file(dir / "a.parquet", "PAR1 and more");
  expect_error(Errc::Unavailable, AllOf(HasSubstr("a.parquet"), HasSubstr("is Parquet")),
               [&] { open({dir / "a.parquet"}); });
}

TEST(Hdf5File, MayHaveAnyName) {
  const TempDirectory dir;
  std::filesystem::copy(golden("several.h5"), dir / "tokens");
  EXPECT_EQ(open({dir / "tokens:/i8"}, DataFormat::Hdf5).num_tokens(), open({golden("several.h5:/i8")}).num_tokens());
}

TEST(JsonlFile, SamplesHaveTheTargetsOfTheirTokens) {
  const TempDirectory dir;
  write_file(dir / "a.jsonl",
             R"({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})");
  const auto tokenizer = open_tokenizer(test_data("tokenizers/qwen2"));
  const std::vector<std::pair<std::string, bool>> parts = {
      {"<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", false}, {"So.<|im_end|>", true}, {"\n", false}};
  std::vector<i32> ids, targets;
  for (const auto& [text, is_target] : parts) {
    tokenizer->encode(text, ids);
    for (size_t i = targets.size(); i < ids.size(); ++i) targets.push_back(is_target ? ids[i] : kIgnoredTarget);
  }
  const TokenStream stream = open({dir / "a.jsonl"}, DataFormat::Auto, -1, test_data("tokenizers/qwen2"));
  EXPECT_EQ(read_all(stream), ids);
  const i64 T = stream.num_tokens() - 1;
  const BatchLoader loader(stream, {1, 1, T}, 1, kAnyId, next_token());
  std::vector<i32> sample_inputs(static_cast<size_t>(T)), sample_targets(sample_inputs);
  loader.load_sequential(0, 0, sample_inputs, sample_targets);
  EXPECT_EQ(sample_inputs, std::vector<i32>(ids.begin(), ids.end() - 1));
  EXPECT_EQ(sample_targets, std::vector<i32>(targets.begin() + 1, targets.end()));
  std::vector<i32> end;
  tokenizer->encode("<|im_end|>", end);
  ASSERT_EQ(end.size(), 1u);
  EXPECT_EQ(std::ranges::count(sample_targets, end[0]), 1);
  EXPECT_EQ(std::ranges::count(sample_inputs, end[0]), 2);
}

TEST(JsonlFile, MaskingDoesNotTakePromptsAndMessages) {
  const TempDirectory dir;
  DataConfig config;
  config.train = {dir / "a.jsonl"};
  config.seq_length = 4;
  config.split = 0;
  write_file(config.train[0], R"({"prompt": "a question", "completion": "an answer"})");
  EXPECT_EQ(open_dataset(config, *next_token()).train.num_tokens(), 19);
  const auto masks = masked_tokens({.probability = 0.15, .mask_token = 1, .cls_token = 2, .sep_token = 3});
  expect_error(Errc::Unavailable, AllOf(HasSubstr("a.jsonl"), HasSubstr("predict the next token")),
               [&] { open_dataset(config, *masks); });
}

TEST(JsonlFile, AnyNumberOfThreadsGivesTheSameTokens) {
  const TempDirectory dir;
  std::ofstream file(dir / "a.jsonl", std::ios::binary);
  std::string want;
  u32 random = 1;
  while (want.size() < (13u << 20)) {
    random = random * 1664525 + 1013904223;
    const std::string text(1 + (random >> 8) % 200'000, static_cast<char>('a' + (random >> 28)));
    file << "{\"text\":\"" << text << "\"}\n";
    want += text + '|';
  }
  file.close();
  for (const int threads : {1, 3, 8}) {
    const TokenStream stream = open({dir / "a.jsonl"}, DataFormat::Auto, '|', "bytes", threads);
    ASSERT_EQ(stream.num_tokens(), std::ssize(want)) << threads;
    EXPECT_TRUE(text_of(read_all(stream)) == want) << threads;
  }
}

TEST(JsonlFile, BadLinesAreNamed) {
  const TempDirectory dir;
  const std::string good = "{\"text\":\"good\"}\n";
  const auto refused = [&](const std::string& line, const std::string& why) {
    write_file(dir / "x.jsonl", good + "\n" + line + "\n" + good);
    expect_error(Errc::Corrupt, AllOf(HasSubstr("x.jsonl:3"), HasSubstr(why)), [&] { open({dir / "x.jsonl"}); });
  };
  refused("{}", "no member \"text\"");
  refused("{\"Text\":\"x\"}", "no member \"text\"");
  refused("{\"a\":{\"text\":\"x\"}}", "no member \"text\"");
  refused("{\"text\":1}", "\"text\" is a number");
  refused("{\"text\":null}", "\"text\" is null");
  refused("{\"text\":[\"a\"]}", "\"text\" is an array");
  refused("{\"text\":{\"text\":\"a\"}}", "\"text\" is an object");
  refused("{\"text\":\"a\",\"text\":\"b\"}", "the key \"text\" is there twice");
  refused("[\"text\"]", "is an array, where each line is an object");
  refused("\"text\"", "is a string");
  refused("7", "is a number");
  refused("null", "is null");
  refused("{\"text\":\"a\"} {\"text\":\"b\"}", "x.jsonl:3:14: ");
  refused("{\"text\":\"a\"", "x.jsonl:3:12: ");
  refused("{'text':'a'}", "double quotes");
  refused("text", "'text' is not JSON");
  refused("{\"text\":\"a\xff\"}", "UTF-8");
  refused("{\"text\":\"\xed\xa0\x80\"}", "UTF-8");
  refused("{\"text\":\"\\ud800\"}", "surrogate");
  refused("{\"a\xc3\":1,\"text\":\"a\"}", "UTF-8");
  refused("{\"text\":\"a\",}", "a comma before '}'");
  refused("{\"text\":\"a\tb\"}", "control character");
  refused("{\"text\":\"a\",\"n\":" + std::string(200, '[') + std::string(200, ']') + "}", "deeper than 100 levels");
  refused("{\"text\":\"a\",\"n\":" + std::string(1 << 20, '['), "deeper than 100 levels");
  refused(R"({"prompt":"a"})", "no member \"completion\"");
  refused(R"({"completion":"a"})", "no member \"prompt\"");
  refused(R"({"prompt":["a"],"completion":"a"})", "\"prompt\" is an array");
  refused(R"({"prompt":"a","prompt":"b","completion":"a"})", "the key \"prompt\" is there twice");
  refused(R"({"prompt":"a","completion":"a"})", "a prompt and its completion, and the first line a text");
  refused(R"({"messages":"a"})", "\"messages\" is a string, where an array belongs");
  refused(R"({"messages":{}})", "\"messages\" is an object");
  refused(R"({"messages":[]})", "\"messages\" is empty");
  refused(R"({"messages":[],"messages":[]})", "the key \"messages\" is there twice");
  refused(R"({"messages":[1]})", "message 1: is a number, where an object belongs");
  refused(R"({"messages":[[{"role":"user","content":"a"}]]})", "message 1: is an array");
  refused(R"({"messages":[{"role":"user","content":"a"},{"role":"user"}]})", "message 2: the object has no member");
  refused(R"({"messages":[{"role":"user","content":null}]})", "message 1: its member \"content\" is null");
  refused(R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})", "\"content\" is an array");
  refused(R"({"messages":[{"role":"user","role":"user","content":"a"}]})", "the key \"role\" is there twice");
  refused(R"({"messages":[{"role":"","content":"a"}]})", "no name of a role");
  refused(R"({"messages":[{"role":"a\nb","content":"a"}]})", "no name of a role");
  refused(R"({"messages":[{"role":"user","content":"a"}]})", "has messages, and the first line a text");
  write_file(dir / "x.jsonl", "\n \n");
  expect_error(Errc::Config, HasSubstr("no tokens"), [&] { open({dir / "x.jsonl"}); });
  write_file(dir / "x.jsonl", "{\"text\":\"\"}");
  expect_error(Errc::Config, HasSubstr("no tokens"), [&] { open({dir / "x.jsonl"}); });
  expect_error(Errc::Corrupt, AllOf(HasSubstr("one.h5:1: "), HasSubstr("an HDF5 file")),
               [&] { open({golden("one.h5")}, DataFormat::Jsonl); });
}

TEST(JsonlFile, LinesHaveABoundedLength) {
  const TempDirectory dir;
  const std::string start = "{\"text\":\"";
  constexpr i64 kMost = i64{64} << 20;
  write_file(dir / "x.jsonl", "\n" + start + std::string(kMost - start.size() - 2, 'x') + "\"}");
  EXPECT_EQ(open({dir / "x.jsonl"}).num_tokens(), kMost - std::ssize(start) - 2);
  write_file(dir / "x.jsonl", "\n" + start + std::string(kMost - start.size() - 1, 'x') + "\"}");
  expect_error(Errc::Corrupt, HasSubstr("x.jsonl:2: longer than 64 MiB"), [&] { open({dir / "x.jsonl"}); });
  write_sparse(dir / "x.jsonl", "\n" + start + std::string(5000, 'x'), i64{1} << 30, "\"}\n");
  expect_error(Errc::Corrupt, HasSubstr("x.jsonl:2: longer than 64 MiB"), [&] { open({dir / "x.jsonl"}); });
}

// simdjson reads a line or, if it cannot, as with a NaN, nlohmann's parser: both give the same tokens and refuse the
// same lines, also of mutated ones.
TEST(TokenFiles, BothParsersReadALineAlike) {
  const TempDirectory dir;
  std::vector<std::string> lines = {
      R"({"text": "a \"b\" \\ \/ \b\f\n\r\t \u00e9 \ud83d\ude00 é"})",
      R"({"text": "\ud83d"})",
      R"({"text": "\u0000"})",
      R"({"text": "a", "text": "b"})",
      R"({"a": {"text": 1, "b": [[], {}, [null, true, false]]}, "text": "c"})",
      R"({"text": "a", "n": [0, -0, 1.5e3, 18446744073709551615, -9223372036854775808, 123456789012345678901234567890]})",
      R"({"prompt": "a", "completion": "b"})",
      R"({"prompt": "a", "completion": 7})",
      R"({"prompt": "a"})",
      R"({"text": null})",
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "x": {}}]})",
      R"({"messages": [{"role": "user", "content": []}]})",
      R"({"messages": {}})",
      R"({"messages": [1]})",
      "{}",
      R"({"text": "a"} )",
      R"({"text": "a"} x)",
      R"({"text": "a",})",
      "{\"text\": \"a\tb\"}",
      "{\"text\": \"\xff\"}",
      R"({"text": "a", "n": 01})"};
  std::string deep = R"({"text": "a", "d": )";
  for (int i = 0; i < 101; ++i) deep += '[';
  lines.push_back(deep + std::string(101, ']') + "}");
  std::mt19937 random(11);
  const size_t fixed = lines.size();
  constexpr std::string_view kBytes = "{}[]\",:\\ntu0e-.\xc3\xa9 ";
  for (int i = 0; i < 3000; ++i) {
    std::string line = lines[random() % fixed];
    for (size_t n = 1 + random() % 3; n > 0 && line.size() > 1; --n) {
      const size_t at = 1 + random() % (line.size() - 1);
      const char byte = kBytes[random() % kBytes.size()];
      switch (random() % 3) {
        case 0: line[at] = byte; break;
        case 1: line.insert(line.begin() + static_cast<i64>(at), byte); break;
        default: line.erase(line.begin() + static_cast<i64>(at)); break;
      }
    }
    lines.push_back(line);
  }
  int read_well = 0, refused = 0;
  const auto outcome = [&](const std::string& line) -> std::optional<std::vector<i32>> {
    write_file(dir / "a.jsonl", line + "\n");
    try {
      const TokenStream stream = open({dir / "a.jsonl"});
      std::vector<i32> tokens = read_all(stream), targets(tokens.size());
      stream.read_targets(0, targets, kAnyId);
      tokens.insert(tokens.end(), targets.begin(), targets.end());
      return tokens;
    } catch (const Error&) {
      return std::nullopt;
    }
  };
  for (const std::string& line : lines) {
    if (!line.starts_with('{')) continue;
    const bool empty = line.find_first_not_of(" \t\r", 1) == line.find('}');
    const auto plain = outcome(line),
               other = outcome(fmt::format("{{\"~\": NaN{}{}", empty ? "" : ",", line.substr(1)));
    EXPECT_EQ(plain, other) << line;
    ++(plain ? read_well : refused);
  }
  EXPECT_GT(read_well, 100);
  EXPECT_GT(refused, 300);
}

// datasets reads, transformers encodes, trl's collator masks: tests/golden/make_masks.py.
TEST(TokenFiles, WhatIsLearntOfRecordsIsWhatOthersLearn) {
  const Json expected = Json::parse(testing::read_file(golden("masks.json")));
  for (const char* kind : {"text", "prompt", "messages"}) {
    const TokenStream stream = open({golden(fmt::format("masks-{}.jsonl", kind))}, DataFormat::Auto,
                                    expected.at("document_token").get<i64>(), test_data("tokenizers/qwen2"));
    EXPECT_EQ(read_all(stream), expected.at(kind).at(0).get<std::vector<i32>>()) << kind;
    std::vector<i32> targets(static_cast<size_t>(stream.num_tokens()));
    stream.read_targets(0, targets, kAnyId);
    EXPECT_EQ(targets, expected.at(kind).at(1).get<std::vector<i32>>()) << kind;
  }
}

}  // namespace token_files_test
}  // namespace ds
