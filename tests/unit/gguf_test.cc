// SPDX-License-Identifier: Apache-2.0
// GGUF files as containers: values of every type, models in several files, and files that contradict themselves.

#include "base/gguf.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "expect_error.h"
#include "gguf_file.h"
#include "temp_directory.h"

namespace ds {
namespace gguf_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::expect_error;
using testing::GgufFile;
using ::testing::HasSubstr;
using testing::TempDirectory;
using testing::write_file;

std::string zeros(size_t bytes) { return std::string(bytes, '\0'); }

struct GgufContainer : ::testing::Test {
  const TempDirectory dir;
  const std::string path = dir / "x.gguf";

  void refused(const std::string& bytes, const std::string& text, Errc code = Errc::Corrupt) const {
    write_file(path, bytes);
    expect_error(code, AllOf(HasSubstr(path), HasSubstr(text)), [&] { Gguf file(path); });
  }
  Gguf opened(const GgufFile& file) const {
    write_file(path, file.bytes());
    return Gguf(path);
  }
};

TEST_F(GgufContainer, ReadsValuesOfEveryType) {
  const auto n = []<class T>(T x) { return GgufFile::number(x); };
  for (const u32 version : {2u, 3u}) {
    GgufFile file;
    file.version = version;
    file.value("u8", 0, n(u8{200})).value("i8", 1, "\xfe").value("u16", 2, n(u16{60000}));
    file.value("i16", 3, "\xfe\xff").value("u32", 4, n(u32{4000000000})).value("i32", 5, n(i32{-5}));
    file.value("f32", 6, n(0.5f)).value("yes", 7, "\1").value("text", 8, GgufFile::string("für"));
    file.value("u64", 10, n(u64{1} << 40)).value("i64", 11, n(i64{-1} << 40)).value("f64", 12, n(0.25));
    file.texts("words", {"a", "", "b c"}).integers("list", {3, -4}).value("huge", 10, n(~u64{0}));
    const Gguf g = opened(file);
    EXPECT_EQ(g.integer("u8"), 200);
    EXPECT_EQ(g.integer("i8"), -2);
    EXPECT_EQ(g.integer("u16"), 60000);
    EXPECT_EQ(g.integer("i16"), -2);
    EXPECT_EQ(g.integer("u32"), 4000000000);
    EXPECT_EQ(g.integer("i32"), -5);
    EXPECT_EQ(g.integer("u64"), i64{1} << 40);
    EXPECT_EQ(g.integer("i64"), i64{-1} << 40);
    EXPECT_EQ(g.number("f32"), 0.5);
    EXPECT_EQ(g.number("f64"), 0.25);
    EXPECT_EQ(g.number("i8"), -2.0);
    EXPECT_EQ(g.flag("yes"), true);
    EXPECT_EQ(g.text("text"), "für");
    EXPECT_THAT(g.texts("words"), ElementsAre("a", "", "b c"));
    EXPECT_THAT(g.integers("list"), ElementsAre(3, -4));
    EXPECT_THAT(g.numbers("list"), ElementsAre(3.0, -4.0));
    EXPECT_FALSE(g.integer("none") || g.number("none") || g.flag("none") || g.text("none"));
    EXPECT_TRUE(g.texts("none").empty() && g.integers("none").empty());
    for (const char* key : {"f32", "text", "huge", "list"})
      expect_error(Errc::Corrupt, HasSubstr(fmt::format("'{}' must be a whole number", key)), [&] { g.integer(key); });
    expect_error(Errc::Corrupt, HasSubstr("'u8' must be a string"), [&] { g.text("u8"); });
    expect_error(Errc::Corrupt, HasSubstr("'u8' must be true or false"), [&] { g.flag("u8"); });
    expect_error(Errc::Corrupt, HasSubstr("'words' must be a list of whole numbers"), [&] { g.integers("words"); });
    expect_error(Errc::Corrupt, HasSubstr("'list' must be a list of strings"), [&] { g.texts("list"); });
  }
}

TEST_F(GgufContainer, ListsTensorsWithTheContiguousDimLast) {
  const Gguf g = opened(GgufFile()
                            .u("general.alignment", 32)
                            .tensor("a", {5, 3}, 0, zeros(60))
                            .tensor("b", {256, 2, 2}, 12, zeros(4 * 144))
                            .tensor("c", {7}, 99, zeros(3)));
  ASSERT_EQ(g.tensors().size(), 3u);
  EXPECT_THAT(g.find("a")->shape, ElementsAre(3, 5));
  EXPECT_THAT(g.find("b")->shape, ElementsAre(2, 2, 256));
  EXPECT_EQ(g.find("b")->type_name(), "Q4_K");
  EXPECT_EQ(g.find("c")->type_name(), "type 99");
  EXPECT_EQ(g.find("b")->offset - g.find("a")->offset, 64);
  EXPECT_EQ(g.find("d"), nullptr);
}

TEST_F(GgufContainer, RefusesOtherFilesAndVersions) {
  refused("", "too few for a GGUF file");
  refused("PK\3\4" + zeros(100), "is a zip archive");
  GgufFile file;
  file.version = 1;
  refused(file.bytes(), "version 1 of GGUF is not supported", Errc::Unavailable);
  file.version = 3u << 24;
  refused(file.bytes(), "big-endian", Errc::Unavailable);
}

TEST_F(GgufContainer, RefusesEveryTruncatedHeader) {
  const std::string whole =
      GgufFile().text("a", "text").texts("b", {"x", "y"}).integers("c", {1, 2}).tensor("t", {4}, 0, zeros(16)).bytes();
  for (size_t length = 0; length < whole.size(); ++length) {
    write_file(path, whole.substr(0, length));
    EXPECT_THROW(Gguf file(path), Error) << length;
  }
  write_file(path, whole);
  EXPECT_EQ(Gguf(path).tensors().size(), 1u);
}

TEST_F(GgufContainer, RefusesCountsAndLengthsBeyondTheFile) {
  constexpr u64 kMany = u64{1} << 60;
  const auto n = [](u64 x) { return GgufFile::number(x); };
  GgufFile values, tensors;
  values.num_values = kMany;
  refused(values.bytes(), "values, which do not fit");
  tensors.num_tensors = kMany;
  refused(tensors.bytes(), "tensors, which do not fit");
  refused(GgufFile().value("k", 8, n(kMany) + "abc").bytes(), "ends within k");
  refused(GgufFile().value("k", 8, n(~u64{0}) + "abc").bytes(), "ends within k");
  refused(GgufFile().value("k", 9, GgufFile::number<u32>(8) + n(kMany)).bytes(), "do not fit into the file's");
  refused(GgufFile().value("k", 9, GgufFile::number<u32>(10) + n(kMany)).bytes(), "ends within k");
  refused(GgufFile().value("k", 9, GgufFile::number<u32>(10) + n(u64{1} << 62)).bytes(), "do not fit into the file's");
  refused(GgufFile().tensor("t", {4}, 0, zeros(16), kMany).bytes(), "begins at data byte");
  refused(GgufFile().tensor("t", {4}, 0, zeros(16), 32).bytes(), "ends after the file's");
  refused(GgufFile().tensor("t", {5}, 0, zeros(16)).bytes(), "ends after the file's");
  refused(GgufFile().tensor("t", {u64{1} << 62, 4, 4}, 0, zeros(16)).bytes(), "the product of its shape overflows");
  refused(GgufFile().tensor("t", {u64{1} << 62}, 0, zeros(16)).bytes(), "the product of its shape overflows");
  refused(GgufFile().tensor("t", {u64{1} << 63}, 0, zeros(16)).bytes(), "a dim of 9223372036854775808");
  refused(GgufFile().tensor("t", {1, 1, 1, 1, 1}, 0, zeros(16)).bytes(), "5 dims");
  refused(GgufFile().tensor("t", {100}, 12, zeros(144)).bytes(), "rows of 100 elements are not whole blocks of 256");
}

TEST_F(GgufContainer, RefusesWhatContradictsItself) {
  refused(GgufFile().u("k", 1).u("k", 2).bytes(), "'k' appears twice");
  refused(GgufFile().tensor("t", {4}, 0, zeros(16)).tensor("t", {4}, 0, zeros(16)).bytes(), "'t' appears twice");
  refused(GgufFile().tensor("t", {16}, 0, zeros(64)).tensor("u", {4}, 0, zeros(16), 32).bytes(), "'t' and 'u' overlap");
  refused(GgufFile().tensor("t", {4}, 0, zeros(32), 16).bytes(), "no multiple of the alignment 32");
  refused(GgufFile().u("general.alignment", 0).bytes(), "'general.alignment' is 0, not a power of two");
  refused(GgufFile().u("general.alignment", 48).bytes(), "'general.alignment' is 48, not a power of two");
  refused(GgufFile().text("general.alignment", "32").bytes(), "'general.alignment' is not a number");
  refused(GgufFile().value("k", 9, GgufFile::number<u32>(9) + GgufFile::number<u64>(1)).bytes(), "a list of lists");
  refused(GgufFile().value("k", 13, "").bytes(), "there is no type 13 of values");
  refused(GgufFile().u("", 1).bytes(), "printable UTF-8");
  refused(GgufFile().u("k\xff", 1).bytes(), "printable UTF-8");
  refused(GgufFile().u(std::string(5000, 'k'), 1).bytes(), "printable UTF-8");
  refused(GgufFile().tensor("t\n", {4}, 0, zeros(16)).bytes(), "printable UTF-8");
}

TEST_F(GgufContainer, RefusesTextThatIsNotUtf8WhereItIsRead) {
  const Gguf g = opened(GgufFile().text("k", "\xc3(").texts("l", {"a", "\xed\xa0\x80"}));
  expect_error(Errc::Corrupt, HasSubstr("'k' must be UTF-8"), [&] { g.text("k"); });
  expect_error(Errc::Corrupt, HasSubstr("'l[1]' must be UTF-8"), [&] { g.texts("l"); });
}

TEST_F(GgufContainer, ReadsAModelInSeveralFiles) {
  const auto part = [](u32 number, u32 count, const std::string& tensor) {
    GgufFile file;
    file.value("split.no", 2, GgufFile::number(static_cast<u16>(number)));
    file.value("split.count", 2, GgufFile::number(static_cast<u16>(count)));
    file.value("split.tensors.count", 5, GgufFile::number(i32{3}));
    if (number == 0) file.text("general.name", "first");
    return file.floats(tensor, {1}, {static_cast<float>(number)});
  };
  const auto name = [&](int n) { return dir / fmt::format("m-0000{}-of-00003.gguf", n); };
  for (const u32 i : {0u, 1u, 2u})
    write_file(name(static_cast<int>(i) + 1), part(i, 3, std::string(1, static_cast<char>('a' + i))).bytes());
  {
    const Gguf g(name(1));
    EXPECT_THAT(g.files(), ElementsAre(name(1), name(2), name(3)));
    EXPECT_EQ(g.text("general.name"), "first");
    EXPECT_EQ(g.find("c")->file, 2u);
  }
  expect_error(Errc::Unavailable, HasSubstr("part 2 of 3 of a model: name the first"), [&] { Gguf g(name(2)); });
  write_file(name(2), part(1, 4, "b").bytes());
  expect_error(Errc::Corrupt, HasSubstr("does not state that it is part 2 of 3"), [&] { Gguf g(name(1)); });
  write_file(name(2), part(1, 3, "a").bytes());
  expect_error(Errc::Corrupt, HasSubstr("'a' appears twice"), [&] { Gguf g(name(1)); });
  write_file(name(2), part(1, 3, "b").floats("d", {1}, {1}).bytes());
  expect_error(Errc::Corrupt, HasSubstr("states 3 tensors, and its 3 files have 4"), [&] { Gguf g(name(1)); });
  std::filesystem::remove(name(3));
  expect_error(Errc::Corrupt, HasSubstr("m-00003-of-00003.gguf is missing"), [&] {
    write_file(name(2), part(1, 3, "b").bytes());
    Gguf g(name(1));
  });
  refused(part(0, 3, "a").bytes(), "whose name must end with -00001-of-00003.gguf");
}

TEST_F(GgufContainer, IsKnownByItsNameOrItsFirstBytes) {
  write_file(path, "");
  EXPECT_TRUE(is_gguf(path));
  write_file(dir / "blob", GgufFile().bytes());
  EXPECT_TRUE(is_gguf(dir / "blob"));
  write_file(dir / "other", "GGML and more");
  EXPECT_FALSE(is_gguf(dir / "other"));
  EXPECT_FALSE(is_gguf(dir.path()));
  EXPECT_FALSE(is_gguf(dir / "none.gguf"));
}

}  // namespace gguf_test
}  // namespace ds
