// SPDX-License-Identifier: Apache-2.0
// The zip container: archives of torch.save are read; every archive that two readers could understand in different ways
// is refused.

#include "formats/zip.h"

#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace zip_test {

using testing::le;
using testing::make_zip;
using testing::read_file;
using testing::TempDirectory;
using testing::write_file;
using testing::ZipEnd;
using testing::ZipPart;

std::vector<ZipEntry> read(const std::string& bytes) {
  const TempDirectory dir;
  write_file(dir / "x.zip", bytes);
  const File file = File::open_read(dir / "x.zip");
  std::vector<ZipEntry> entries = read_zip(file);
  for (const ZipEntry& e : entries) check_crc32(file, e);
  return entries;
}

std::string field(u16 id, const std::string& data) { return le(id) + le(static_cast<u16>(data.size())) + data; }

TEST(Zip, EntriesAreRangesOfTheFile) {
  const std::string bytes = make_zip({{.name = "a/b", .data = "hello"}, {.name = "c", .data = ""}});
  const auto entries = read(bytes);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].name, "a/b");
  EXPECT_EQ(bytes.substr(static_cast<size_t>(entries[0].offset), 5), "hello");
  EXPECT_EQ(entries[1].bytes, 0);
  EXPECT_TRUE(read(make_zip({})).empty());
}

TEST(Zip, ReadsTheWayTorchSaveWrites) {
  // Sizes after the data, data aligned by an extra field, Zip64 end records.
  const std::string bytes = make_zip(
      {{.name = "x/data.pkl", .data = "hello", .flags = 0x800, .extra = field(0x4246, "ZZZZZ"), .descriptor = true},
       {.name = "x/data/0", .data = "abcd", .flags = 0x800, .descriptor = true}},
      {.zip64 = true});
  const auto entries = read(bytes);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(bytes.substr(static_cast<size_t>(entries[1].offset), 4), "abcd");
  // Sizes in a Zip64 field
  const std::string sizes = field(1, le<u64>(2) + le<u64>(2));
  EXPECT_EQ(
      read(make_zip(
               {{.name = "a", .data = "hi", .extra = sizes, .local_bytes = 0xffffffff, .central_bytes = 0xffffffff}}))
          .front()
          .bytes,
      2);
}

TEST(Zip, LocalHeadersOfLargeFilesAsTorchWritesThem) {
  const std::string sizes = le<u64>(2) + le<u64>(2), place = le<u64>(0);
  const auto archive = [](const std::string& numbers, bool descriptor = true) {
    return make_zip({{.name = "a", .data = "hi", .descriptor = descriptor, .local_extra = field(1, numbers)}});
  };
  for (const std::string& numbers : {sizes, place, sizes + place}) {
    EXPECT_EQ(read(archive(numbers)).front().bytes, 2);
    EXPECT_ERROR(read(archive(numbers, false)), Errc::Corrupt, "Zip64 field is too long");
  }
  for (const std::string& numbers : {place + sizes, le<u64>(2), le<u64>(2) + le<u64>(3), sizes + sizes})
    EXPECT_ERROR(read(archive(numbers)), Errc::Corrupt, "Zip64 field is too long");
}

TEST(Zip, CoversEveryFileThatDeepSpeedWrote) {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(testing::test_data("deepspeed"))) {
    if (entry.path().extension() != ".pt") continue;
    const File file = File::open_read(entry.path().string());
    for (const ZipEntry& e : read_zip(file)) check_crc32(file, e);
    ++files;
  }
  EXPECT_GT(files, 40);
}

struct Refusal {
  const char* name;
  std::string bytes;
  Errc code;
  const char* reason;
};
void PrintTo(const Refusal& r, std::ostream* out) { *out << r.name; }

const std::string kGood = make_zip({{.name = "a", .data = "hello"}, {.name = "b", .data = "world"}});

std::string patched(std::string bytes, size_t at, const std::string& with) {
  return bytes.replace(at, with.size(), with);
}
std::string one(ZipPart part) { return make_zip({std::move(part)}); }
std::string named(const std::string& name) { return one({.name = name, .data = "x"}); }
// Two directory entries for one local header.
std::string overlapping() {
  std::string s = make_zip({{.name = "a", .data = "hello"}, {.name = "a", .data = "hello"}});
  const size_t second = s.rfind("PK\1\2");
  s = patched(s, second + 42, le<u32>(0));
  return s;
}

const Refusal kRefusals[] = {
    {"Empty", "", Errc::Corrupt, "too few"},
    {"NoZip", std::string(100, 'x'), Errc::Corrupt, "does not end as a zip archive"},
    {"Truncated", kGood.substr(0, kGood.size() - 1), Errc::Corrupt, "does not end as a zip archive"},
    {"Appended", kGood + "x", Errc::Corrupt, "does not end as a zip archive"},
    {"Comment", make_zip({{.name = "a", .data = "x"}}, {.comment = "hi"}), Errc::Corrupt, "does not end"},
    {"AnnouncedComment", patched(kGood, kGood.size() - 2, le<u16>(1)), Errc::Corrupt, "a comment"},
    {"CommentHoldsAnEnd", make_zip({{.name = "a", .data = "x"}}, {.comment = kGood.substr(kGood.size() - 22)}),
     Errc::Corrupt, "does not end where the end record begins"},
    {"Prepended", "x" + kGood, Errc::Corrupt, "does not end where the end record begins"},
    {"JunkBeforeTheFirst", make_zip({{.name = "a", .data = "x"}}, {.directory_offset = 0}), Errc::Corrupt,
     "does not end where the end record begins"},
    {"SeveralDisks", make_zip({{.name = "a", .data = "x"}}, {.disk = 1}), Errc::Unavailable, "several disks"},
    {"CountTooLarge", make_zip({{.name = "a", .data = "x"}}, {.count = 2}), Errc::Corrupt, "entries in a central"},
    {"CountTooSmall", make_zip({{.name = "a", .data = "x"}, {.name = "b", .data = "y"}}, {.count = 1}), Errc::Corrupt,
     "belong to no entry"},
    {"Compressed", one({.name = "a", .data = "x", .method = 8}), Errc::Unavailable, "compressed (method 8)"},
    {"Encrypted", one({.name = "a", .data = "x", .flags = 1}), Errc::Unavailable, "encrypted"},
    {"StrangeFlags", one({.name = "a", .data = "x", .flags = 0x40}), Errc::Unavailable, "flags 0x40"},
    {"Twice", make_zip({{.name = "a", .data = "x"}, {.name = "a", .data = "y"}}), Errc::Corrupt, "'a' appears twice"},
    {"Parent", named("a/../b"), Errc::Corrupt, "leads out"},
    {"ParentAtEnd", named("a/.."), Errc::Corrupt, "leads out"},
    {"Absolute", named("/etc/passwd"), Errc::Corrupt, "not a plain relative name"},
    {"Drive", named("C:x"), Errc::Corrupt, "not a plain relative name"},
    {"Backslash", named("a\\b"), Errc::Corrupt, "not a plain relative name"},
    {"Nul", named(std::string("a\0b", 3)), Errc::Corrupt, "control characters"},
    {"NoName", named(""), Errc::Corrupt, "without a name"},
    {"EntryComment", one({.name = "a", .data = "x", .comment = "hi"}), Errc::Corrupt, "has a comment"},
    {"OtherLocalName", one({.name = "a", .data = "x", .local_name = "b"}), Errc::Corrupt, "another name"},
    {"OtherLocalSize", one({.name = "a", .data = "x", .local_bytes = 0}), Errc::Corrupt, "contradicts"},
    {"OtherCentralSize", one({.name = "a", .data = "xy", .local_bytes = 1, .central_bytes = 1}), Errc::Corrupt,
     "belong to no entry"},
    {"LargerThanTheFile", one({.name = "a", .data = "x", .local_bytes = 1000, .central_bytes = 1000}), Errc::Corrupt,
     "1000 bytes"},
    {"LargerThanItsPlace",
     make_zip({{.name = "a", .data = "x", .local_bytes = 2, .central_bytes = 2}, {.name = "b", .data = "y"}}),
     Errc::Corrupt, "overlap"},
    {"WrongDescriptor", patched(one({.name = "a", .data = "x", .descriptor = true}), 30 + 1 + 1 + 4, le<u32>(0)),
     Errc::Corrupt, "data descriptor contradicts"},
    {"Overlapping", overlapping(), Errc::Corrupt, "appears twice"},
    {"NoLocalHeader", patched(kGood, 0, "PK\3\5"), Errc::Corrupt, "no local header at byte 0"},
    {"GapBetween",
     make_zip({{.name = "a", .data = "xy", .local_bytes = 1, .central_bytes = 1}, {.name = "b", .data = "z"}}),
     Errc::Corrupt, "bytes that belong to nothing"},
    {"ExtraCutOff", one({.name = "a", .data = "x", .extra = "abc"}), Errc::Corrupt, "extra field is cut off"},
    {"Zip64FieldTooLong", one({.name = "a", .data = "x", .extra = field(1, std::string(8, '\0'))}), Errc::Corrupt,
     "Zip64 field is too long"},
    {"Zip64FieldTooShort",
     one({.name = "a", .data = "x", .extra = field(1, "xx"), .local_bytes = 0xffffffff, .central_bytes = 0xffffffff}),
     Errc::Corrupt, "Zip64 field is too short"},
    {"Zip64FieldHuge",
     one({.name = "a",
          .data = "x",
          .extra = field(1, std::string(16, '\xff')),
          .local_bytes = 0xffffffff,
          .central_bytes = 0xffffffff}),
     Errc::Corrupt, "18446744073709551615 bytes"},
    {"TwoZip64Fields", one({.name = "a", .data = "x", .extra = field(1, "") + field(1, "")}), Errc::Corrupt,
     "two Zip64 fields"},
    {"ForgedZip64Count", make_zip({{.name = "a", .data = "x"}}, {.zip64 = true, .count64 = 2}), Errc::Corrupt,
     "contradict each other"},
    {"Zip64Missing", make_zip({{.name = "a", .data = "x"}}, {.count = 0xffff}), Errc::Corrupt,
     "Zip64 end record is missing"},
    {"WrongChecksum", one({.name = "a", .data = "x", .crc = 1}), Errc::Corrupt, "entry 'a' is damaged"},
};

class ZipRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(ZipRefusal, NamesItsReason) {
  EXPECT_ERROR(read(GetParam().bytes), GetParam().code, GetParam().reason);
  EXPECT_ERROR(read(GetParam().bytes), GetParam().code, "x.zip");
}

INSTANTIATE_TEST_SUITE_P(Malformed, ZipRefusal, ::testing::ValuesIn(kRefusals),
                         [](const auto& p) { return std::string(p.param.name); });

TEST(Zip, EveryTruncationIsRefused) {
  const std::string good = make_zip({{.name = "a", .data = "hello", .descriptor = true}}, {.zip64 = true});
  for (size_t n = 0; n < good.size(); ++n) EXPECT_THROW(read(good.substr(0, n)), Error) << n;
}

}  // namespace zip_test
}  // namespace ds
