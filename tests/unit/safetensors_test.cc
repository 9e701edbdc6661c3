// SPDX-License-Identifier: Apache-2.0
// The safetensors container: written files are read back exactly; every malformed header is refused with a reason.

#include "formats/safetensors.h"

#include <cstring>

#include "temp_directory.h"
#include "test_data.h"

namespace ds {
namespace safetensors_test {

using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

// A file from its header text and its data.
std::string container(const std::string& json, const std::string& data) {
  const u64 length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json + data;
}

std::string pattern(i64 bytes, int seed) {
  std::string s(static_cast<size_t>(bytes), '\0');
  for (size_t i = 0; i < s.size(); ++i) s[i] = static_cast<char>((i * 37 + static_cast<size_t>(seed) * 101) ^ (i >> 8));
  return s;
}

const std::vector<TensorInfo> kAllTypes = {
    {"u8", DType::U8, {3}},          {"bf16", DType::BF16, {3, 5}},   {"fp32", DType::F32, {7}},
    {"fp16", DType::F16, {1, 1, 3}}, {"fp64", DType::F64, {2}},       {"int32", DType::I32, {5}},
    {"int64", DType::I64, {1}},      {"uint16", DType::U16, {9}},     {"scalar", DType::F32, {}},
    {"empty", DType::F32, {4, 0}},   {"sp ace/\"é\"", DType::U8, {1}}};

TEST(Safetensors, AllTypesAndShapesRoundTrip) {
  const TempDirectory dir;
  const std::string path = dir / "model.safetensors";
  {
    const auto sink = create_sink(path, FileFormat::Safetensors, kAllTypes, {{"format", "pt"}});
    int seed = 0;
    for (const TensorInfo& t : kAllTypes) {
      const std::string bytes = pattern(t.bytes(), seed++);
      const i64 half = t.numel() / 2;
      sink->write(t.name, 0, half, bytes.data());
      sink->write(t.name, half, t.numel() - half, bytes.data() + half * dtype_bytes(t.dtype));
    }
    EXPECT_FALSE(std::filesystem::exists(path));  // whole or not at all
    sink->finish();
  }
  const auto source = open_source(path);
  EXPECT_EQ(source->metadata().at("format"), "pt");
  ASSERT_EQ(source->list().size(), kAllTypes.size());
  int seed = 0;
  for (const TensorInfo& t : kAllTypes) {
    EXPECT_EQ(source->at(t.name), t);
    std::string got(static_cast<size_t>(t.bytes()), '?');
    source->read(t.name, 0, t.numel(), got.data());
    EXPECT_EQ(got, pattern(t.bytes(), seed++)) << t.name;
  }
  float last = 0;
  source->read("fp32", 6, 1, &last);
  EXPECT_EQ(std::memcmp(&last, pattern(28, 2).data() + 24, 4), 0);
  u64 header = 0;
  std::memcpy(&header, read_file(path).data(), 8);
  EXPECT_EQ(header % 8, 0u);                                                         // data is aligned
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);  // no temporary file is left
}

TEST(Safetensors, WritesTheExpectedBytes) {
  const TempDirectory dir;
  const std::string path = dir / "x.safetensors";
  const auto sink =
      create_sink(path, FileFormat::Safetensors, {{"b", DType::U8, {2}}, {"a", DType::F32, {1}}}, {{"format", "pt"}});
  const float one = 1;
  sink->write("b", 0, 2, "hi");
  sink->write("a", 0, 1, &one);
  sink->finish();
  const std::string json = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(read_file(path), container(padded, std::string("\0\0\x80\x3f", 4) + "hi"));
}

// A model that Hugging Face's own library wrote, copied from source to sink, is the same file.
TEST(Safetensors, ACopyOfAForeignModelIsTheSameFile) {
  const TempDirectory dir;
  for (const std::string model : {"gpt2", "llama", "qwen3"}) {
    const auto source = open_source(testing::test_data(model));
    EXPECT_GT(source->list().size(), 20u);
    const auto sink =
        create_sink(dir / "copy.safetensors", FileFormat::Safetensors, source->list(), source->metadata());
    for (const TensorInfo& t : source->list()) {
      std::vector<char> bytes(static_cast<size_t>(t.bytes()));
      source->read(t.name, 0, t.numel(), bytes.data());
      sink->write(t.name, 0, t.numel(), bytes.data());
    }
    sink->finish();
    EXPECT_TRUE(read_file(dir / "copy.safetensors") == read_file(testing::test_data(model + "/model.safetensors")));
  }
}

TEST(Safetensors, AnUnfinishedFileLeavesNothing) {
  const TempDirectory dir;
  {
    const auto sink = create_sink(dir / "x.safetensors", FileFormat::Safetensors, {{"a", DType::U8, {2}}});
    sink->write("a", 0, 1, "x");
    EXPECT_ERROR(sink->finish(), Errc::Internal, "only 1 of 2 elements of 'a'");
    EXPECT_ERROR(sink->write("a", 0, 1, "x"), Errc::Internal, "");  // again, out of order
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

struct Refusal {
  const char* name;
  std::string json;
  i64 data_bytes;
  const char* reason;
};

std::string tensor(const std::string& fields) { return R"({"x":{)" + fields + "}}"; }
std::string u8(const std::string& shape, const std::string& range) {
  return tensor(R"("dtype":"U8","shape":)" + shape + R"(,"data_offsets":)" + range);
}
std::string two(const std::string& a, const std::string& b) {
  return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
         R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
}

class SafetensorsHeader : public ::testing::TestWithParam<Refusal> {};

TEST_P(SafetensorsHeader, IsRefusedWithItsReason) {
  const Refusal& r = GetParam();
  EXPECT_ERROR(parse_safetensors(r.json, r.data_bytes, "m.safetensors"), Errc::Corrupt, r.reason);
  EXPECT_ERROR(parse_safetensors(r.json, r.data_bytes, "m.safetensors"), Errc::Corrupt, "m.safetensors");
}

const Refusal kRefusals[] = {
    {"Empty", "", 0, "not a JSON object"},
    {"Array", "[]", 0, "not a JSON object"},
    {"ByteOrderMark", "\xEF\xBB\xBF{}", 0, "not a JSON object"},
    {"NotUtf8", "{\"\xff\xfe\":{}}", 0, "UTF-8"},
    {"CutOff", R"({"x":{"dtype":"U8")", 0, "header:1:"},
    {"TrailingText", R"({} x)", 0, "header:1:"},
    {"SecondDocument", R"({}{})", 0, "header:1:"},
    {"Comment", R"({/**/})", 0, "header:1:"},
    {"UnknownDtype", tensor(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"), 4, "unknown dtype 'F31'"},
    {"NoDtype", tensor(R"("shape":[1],"data_offsets":[0,4])"), 4, "no 'dtype'"},
    {"NoShape", tensor(R"("dtype":"U8","data_offsets":[0,4])"), 4, "no 'shape'"},
    {"NoOffsets", tensor(R"("dtype":"U8","shape":[1])"), 4, "no 'data_offsets'"},
    {"UnknownField", tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"y":"z")"), 1, "unknown field 'y'"},
    {"NegativeOffset", u8("[1]", "[-1,0]"), 0, "negative"},
    {"MinusZero", u8("[0]", "[-0,0]"), 0, "negative"},
    {"FractionalOffset", u8("[1]", "[0,1.0]"), 1, "'1.0' is not a whole number"},
    {"Exponent", u8("[1e3]", "[0,1000]"), 1000, "'1e3' is not a whole number"},
    {"HugeNumber", u8("[18446744073709551615]", "[0,1]"), 1, "too large"},
    {"NumberBeyond64Bits", u8("[18446744073709551616]", "[0,1]"), 1, "not a whole number"},
    {"OneOffset", u8("[1]", "[0]"), 1, "two numbers"},
    {"ThreeOffsets", u8("[1]", "[0,1,2]"), 1, "two numbers"},
    {"BackwardOffsets", u8("[1]", "[1,0]"), 1, "backwards"},
    {"StringInShape", u8(R"(["1"])", "[0,1]"), 1, "string"},
    {"NestedShape", u8("[[1]]", "[0,1]"), 1, "array"},
    {"ObjectInShape", u8("[{}]", "[0,1]"), 1, "object"},
    {"NullDtype", tensor(R"("dtype":null,"shape":[1],"data_offsets":[0,1])"), 1, "null"},
    {"TrueShape", u8("true", "[0,1]"), 1, "boolean"},
    {"NumberAsTensor", R"({"x":1})", 0, "number"},
    {"NumberInMetadata", R"({"__metadata__":{"a":1}})", 0, "number"},
    {"ArrayInMetadata", R"({"__metadata__":{"a":[]}})", 0, "array"},
    {"ObjectInMetadata", R"({"__metadata__":{"a":{}}})", 0, "object"},
    {"NotAtZero", u8("[1]", "[1,2]"), 2, "gap"},
    {"Gap", two("[0,4]", "[5,9]"), 9, "gap"},
    {"Overlap", two("[0,4]", "[3,7]"), 7, "overlap"},
    {"SameRangeTwice", two("[0,4]", "[0,4]"), 4, "overlap"},
    {"SizeIsNotShape", u8("[3]", "[0,4]"), 4, "4 bytes at data_offsets, 3 by dtype and shape"},
    {"ProductOverflows", u8("[2,9223372036854775807]", "[0,1]"), 1, "overflows"},
    {"ProductOverflowsFar", u8("[4294967296,4294967296,4294967296]", "[0,1]"), 1, "overflows"},
    {"EmptyShapeOverflows", u8("[4294967296,4294967296,0]", "[0,0]"), 0, "overflows"},
    {"HalfByte", tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2, "whole bytes"},
    {"SixBits", tensor(R"("dtype":"F6_E2M3","shape":[3],"data_offsets":[0,3])"), 3, "whole bytes"},
    {"DataMissing", u8("[4]", "[0,4]"), 3, "truncated"},
    {"DataLeftOver", u8("[4]", "[0,4]"), 5, "1 bytes after the last tensor"},
    {"OnlyData", "{}", 1, "1 bytes after the last tensor"},
    {"DuplicateName",
     R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2,
     "'x' appears twice"},
    {"DuplicateEscapedName",
     R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0078":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
     0, "'x' appears twice"},
    {"DuplicateField", tensor(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])"), 1, "'dtype' appears"},
    {"DuplicateShape", tensor(R"("dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1])"), 1, "'shape' appears"},
    {"DuplicateMetadata", R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ appears twice"},
    {"DuplicateMetadataKey", R"({"__metadata__":{"a":"1","a":"2"}})", 0, "'a' appears twice"},
    {"EmptyName", R"({"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "tensor name of 0 bytes"},
    {"LongName", "{\"" + std::string(1 << 20, 'n') + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0,
     "tensor name of 1048576 bytes"},
    {"NulInName", R"({"a\u0000b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "control characters"},
    {"DeepNesting", std::string(200000, '{'), 0, "header:1:"},
    {"DeepArrays", R"({"x":{"shape":)" + std::string(200000, '['), 0, "array where none belongs"},
};

INSTANTIATE_TEST_SUITE_P(Malformed, SafetensorsHeader, ::testing::ValuesIn(kRefusals),
                         [](const auto& p) { return std::string(p.param.name); });

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const auto table = parse_safetensors(
      " \n{\"z\":{\"shape\":[2],\"data_offsets\":[4,6],\"dtype\":\"F8_E8M0\"},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
      "\"e\":{\"dtype\":\"F8_E4M3FNUZ\",\"shape\":[0,1099511627776,1099511627776],\"data_offsets\":[6,6]}}\t ",
      6, "m");
  ASSERT_EQ(table.tensors.size(), 1u);
  EXPECT_EQ(table.tensors[0].name, "a");
  ASSERT_EQ(table.foreign.size(), 2u);
  EXPECT_EQ(table.foreign[0].type, "F8_E8M0");
}

TEST(Safetensors, ForeignTypesAreNamedWhenAskedFor) {
  const TempDirectory dir;
  write_file(dir / "x.safetensors",
             container(R"({"mask":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}})", "\1\1"));
  const auto source = open_source(dir / "x.safetensors");
  EXPECT_ERROR(source->at("mask"), Errc::Unavailable, "type F8_E8M0");
  EXPECT_ERROR(source->at("mask2"), Errc::Mismatch, "no tensor 'mask2'");
}

TEST(Safetensors, BrokenFilesAreRefused) {
  const TempDirectory dir;
  const std::string path = dir / "x.safetensors";
  const std::string good = container(u8("[4]", "[0,4]"), "abcd");
  const auto refused = [&](const std::string& bytes, const char* reason) {
    write_file(path, bytes);
    EXPECT_ERROR(open_source(path), Errc::Corrupt, reason);
  };
  write_file(path, good);
  EXPECT_NO_THROW(open_source(path));
  refused("", "too few");
  refused(good.substr(0, 7), "too few");
  refused(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + good.substr(8), "header length");
  refused(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + good.substr(8), "header length 100000001");
  refused(std::string("\x7f\0\0\0\0\0\0\0", 8) + good.substr(8), "truncated?");
  refused(good.substr(0, good.size() - 1), "truncated?");
  refused(good + "e", "1 bytes after the last tensor");
  refused(container(u8("[4]", "[0,4]") + std::string(1, '\0'), "abcd"), "NUL byte");
  EXPECT_ERROR(open_source(dir / "absent.safetensors"), Errc::Io, "No such file");
  write_file(dir / "model.onnx", good);
  EXPECT_ERROR(open_source(dir / "model.onnx"), Errc::Unavailable, "not a supported kind of file");
  EXPECT_ERROR(open_source(dir.path()), Errc::Io, "no model.safetensors");
}

TEST(Safetensors, HugeHeaderIsNeverWritten) {
  std::vector<TensorInfo> many;
  for (int i = 0; i < 25000; ++i) many.push_back({std::to_string(i) + std::string(4000, 'n'), DType::U8, {0}});
  std::vector<i64> offsets;
  EXPECT_ERROR(make_safetensors_header(many, {}, &offsets), Errc::Unavailable, "exceeds the limit of readers");
}

class ShardedSafetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    write_file(dir / "model-1.safetensors", container(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                                                      R"("extra":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                                                      "abX"));
    write_file(dir / "model-2.safetensors",
               container(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "cd"));
    index(R"({"metadata":{"total_size":4},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  }
  void index(const std::string& text) { write_file(dir / "model.safetensors.index.json", text); }
  void refused(const std::string& text, const char* reason) {
    index(text);
    EXPECT_ERROR(open_source(dir.path()), Errc::Corrupt, reason);
  }
  TempDirectory dir;
};

TEST_F(ShardedSafetensors, ReadsAcrossShards) {
  for (const std::string& path : {dir.path(), dir / "model.safetensors.index.json"}) {
    const auto source = open_source(path);
    ASSERT_EQ(source->list().size(), 2u);
    char c[3] = {};
    source->read("b", 1, 1, c);
    source->read("a", 0, 2, c + 1);
    EXPECT_EQ(std::string(c, 3), "dab");
  }
}

TEST_F(ShardedSafetensors, RefusesABadIndex) {
  refused("", ":1:1: no JSON: the text is empty");
  refused("{}", "not a safetensors index");
  refused(R"({"weight_map":[]})", "weight_map is not an object");
  refused(R"({"weight_map":{"a":1}})", "not a safetensors index");
  refused(R"({"weight_map":{"a":"../model-1.safetensors"}})", "only a plain");
  refused(R"({"weight_map":{"a":"/etc/model.safetensors"}})", "only a plain");
  refused(R"({"weight_map":{"a":"C:\\x.safetensors"}})", "only a plain");
  refused(R"({"weight_map":{"a":"pytorch_model.bin"}})", "only a plain");
  refused(R"({"weight_map":{"a":".safetensors"}})", "only a plain");
  refused(R"({"weight_map":{"a":"model-3.safetensors"}})", "shard model-3.safetensors is missing");
  refused(R"({"weight_map":{"b":"model-1.safetensors"}})", "lacks 1 of the 1 tensors");
  refused(std::string(100000, '['), "nested deeper than 5 levels");
}

}  // namespace safetensors_test
}  // namespace ds
