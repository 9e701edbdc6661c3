// SPDX-License-Identifier: Apache-2.0
// Files of torch.save: real ones read to the last bit (tests/golden/make_torch.py), and broken ones refused.

#include "formats/torch_file.h"

#include "temp_directory.h"
#include "test_data.h"
#include "zip_file.h"

namespace ds {
namespace torch_file_test {

using namespace std::string_literals;
using testing::dict;
using testing::pickle;
using testing::read_file;
using testing::storage;
using testing::TempDirectory;
using testing::tensor;
using testing::torch_file;
using testing::write_file;

std::string fixture(const std::string& name) { return testing::test_data("torch/" + name); }
std::string floats(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

class TorchFixture : public ::testing::TestWithParam<const char*> {};

TEST_P(TorchFixture, HoldsWhatTorchSaysItHolds) {
  const auto source = open_source(fixture(GetParam()) + ".pt"),
             expected = open_source(fixture(GetParam()) + ".safetensors");
  EXPECT_EQ(source->list().size(), expected->list().size());
  for (const TensorInfo& t : expected->list()) {
    ASSERT_EQ(source->at(t.name), t);
    std::vector<char> wanted(static_cast<size_t>(t.bytes())), got(wanted.size());
    expected->read(t.name, 0, t.numel(), wanted.data());
    for (const i64 step : {t.numel(), i64{1}, i64{7}}) {
      std::fill(got.begin(), got.end(), '?');
      for (i64 first = 0; first < t.numel(); first += step) {
        source->read(t.name, first, std::min(step, t.numel() - first), got.data() + first * dtype_bytes(t.dtype));
      }
      EXPECT_EQ(got, wanted) << t.name << " in steps of " << step;
    }
  }
  EXPECT_NO_THROW(TorchFile(fixture(GetParam()) + ".pt").verify());
}

INSTANTIATE_TEST_SUITE_P(Fixtures, TorchFixture, ::testing::Values("types", "views", "protocol4", "training"),
                         [](const auto& p) { return std::string(p.param); });

TEST(TorchFile, ElementTypesWithoutANameHereAreForeign) {
  const auto source = open_source(fixture("types.pt"));
  EXPECT_ERROR(source->at("complex"), Errc::Unavailable, "torch.ComplexFloatStorage");
}

TEST(TorchFile, WhatIsNoArchiveOfTensorsIsRefusedWithWhatToDo) {
  const TempDirectory dir;
  EXPECT_ERROR(open_source(fixture("old.pt")), Errc::Unavailable, "save it again");
  EXPECT_ERROR(open_source(fixture("program.pt")), Errc::Unavailable, "save the state_dict() of the module instead");
  write_file(dir / "x.bin", "neither");
  EXPECT_ERROR(open_source(dir / "x.bin"), Errc::Corrupt, "no zip archive");
  write_file(dir / "x.bin", "");
  EXPECT_ERROR(open_source(dir / "x.bin"), Errc::Corrupt, "no zip archive");
  EXPECT_ERROR(open_source(dir / "absent.pt"), Errc::Io, "No such file");
}

// {"w": tensor of 6 floats} and changes of it
class TorchArchive : public ::testing::Test {
 protected:
  static std::string good_pickle() {
    return pickle(dict({{"w", tensor(storage("FloatStorage", "0", 6), 0, {2, 3}, {3, 1})}}));
  }
  void write(const std::string& bytes, const std::string& name = "x.pt") { write_file(dir_ / name, bytes); }
  void refused(const std::string& bytes, Errc code, const char* part) {
    write(bytes);
    EXPECT_ERROR(open_source(dir_ / "x.pt"), code, part);
    EXPECT_ERROR(open_source(dir_ / "x.pt"), code, "x.pt");
  }
  void refused_pickle(const std::string& body, Errc code, const char* part) {
    refused(torch_file(pickle(body), {{"0", data_}}), code, part);
  }
  TempDirectory dir_;
  const std::string data_ = floats({0, 1, 2, 3, 4, 5});
};

TEST_F(TorchArchive, IsReadUnderAnyName) {
  for (const char* name : {"x.pt", "x.pth", "x.ckpt", "x.bin", "model", "x.model"}) {
    write(torch_file(good_pickle(), {{"0", data_}}), name);
    float last = 0;
    open_source(dir_ / name)->read("w", 5, 1, &last);
    EXPECT_EQ(last, 5);
  }
}

TEST_F(TorchArchive, ItsEntriesMustFitThePickle) {
  const std::string p = good_pickle();
  refused(torch_file(p, {}), Errc::Corrupt, "no entry for storage '0'");
  refused(torch_file(p, {{"0", data_.substr(4)}}), Errc::Corrupt,
          "has 6 elements of torch.FloatStorage, but its entry 20");
  refused(torch_file(p, {{"0", data_ + "1234"}}), Errc::Corrupt, "but its entry 28");
  refused(torch_file(p, {{"0", data_}}, {{.name = "other/data.pkl", .data = p}}), Errc::Corrupt, "two pickles");
  refused(torch_file(p, {{"0", data_}}, {{.name = "archive/data.pkl", .data = p}}), Errc::Corrupt, "appears twice");
  refused(torch_file(p, {{"0", data_}}, {{.name = "other/x", .data = ""}}), Errc::Corrupt, "lies outside 'archive/'");
  refused(torch_file(p, {{"0", data_}}, {{.name = "archive/byteorder", .data = "big"}}), Errc::Unavailable,
          "not little-endian");
  refused(torch_file(p, {{"0", data_}}, {{.name = "archive/code/x.py", .data = ""}}), Errc::Unavailable, "TorchScript");
  refused(testing::make_zip({{.name = "a", .data = "x"}}), Errc::Corrupt, "there is no data.pkl");
  EXPECT_NO_THROW(write(torch_file(p, {{"0", data_}}, {{.name = "archive/byteorder", .data = "little"}})));
  EXPECT_NO_THROW(open_source(dir_ / "x.pt"));
}

TEST_F(TorchArchive, TensorsStayInsideTheirStorage) {
  const auto one = [&](i64 offset, const std::vector<i64>& shape, const std::vector<i64>& stride, i64 elems = 6) {
    return dict({{"w", tensor(storage("FloatStorage", "0", elems), offset, shape, stride)}});
  };
  for (const auto& [body, part] : std::vector<std::pair<std::string, const char*>>{
           {one(0, {7}, {1}), "exceeds its storage of 6"},
           {one(1, {2, 3}, {3, 1}), "exceeds its storage"},
           {one(0, {2, 2}, {5, 1}), "exceeds its storage"},
           {one(0, {2}, {6}), "exceeds its storage"},
           {one(7, {0}, {1}), "element 7 of a storage of 6"},
           {one(-1, {1}, {1}), "element -1"},
           {one(0, {-1}, {1}), "not a list of sizes"},
           {one(0, {1}, {-1}), "not a list of sizes"},
           {one(0, {2}, {std::numeric_limits<i64>::max()}), "exceeds its storage"},
           {one(0, {3}, {std::numeric_limits<i64>::max()}), "exceeds its storage"},
           {one(0, {std::numeric_limits<i64>::max()}, {0}), "size overflows"},
           {one(0, {i64{1} << 32, i64{1} << 32}, {0, 0}), "size overflows"},
           {one(0, {2, 3}, {1}), "2 dims with 1 strides"},
           {one(0, std::vector<i64>(65, 1), std::vector<i64>(65, 1)), "65 dims"},
           {one(0, {1}, {1}, -6), "not a storage of torch"},
           {one(0, {1}, {1}, std::numeric_limits<i64>::max()), "a tensor of torch.FloatStorage"}}) {
    refused_pickle(body, Errc::Corrupt, part);
  }
  write(torch_file(pickle(one(5, {3, 2}, {0, 0})), {{"0", data_}}));  // one element, six times
  float six[6];
  open_source(dir_ / "x.pt")->read("w", 0, 6, six);
  EXPECT_EQ(std::vector<float>(six, six + 6), std::vector<float>(6, 5));
}

// Beyond 32 MiB a storage is read in windows, below it whole.
TEST_F(TorchArchive, StridesOverLargeStoragesAreFollowed) {
  constexpr i64 kRows = 3000, kCols = 3001;
  std::vector<float> values(static_cast<size_t>(kRows * kCols));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::string all = storage("FloatStorage", "0", kRows * kCols);
  write(torch_file(pickle(dict({{"t", tensor(all, 0, {kCols, kRows}, {1, kCols})},
                                {"far", tensor(all, 7, {3, 2}, {2000 * 1000, 5})}})),
                   {{"0", floats(values)}}));
  const auto source = open_source(dir_ / "x.pt");
  std::vector<float> got(2 * kRows);
  source->read("t", kRows - 5, 2 * kRows, got.data());  // the last of the first row, the second, some of the third
  for (i64 i = 0; i < 2 * kRows; ++i) {
    const i64 at = kRows - 5 + i;
    ASSERT_EQ(got[i], static_cast<float>(at % kRows * kCols + at / kRows)) << i;
  }
  source->read("far", 0, 6, got.data());
  EXPECT_EQ(std::vector<float>(got.begin(), got.begin() + 6),
            (std::vector<float>{7, 12, 2000007, 2000012, 4000007, 4000012}));
}

TEST_F(TorchArchive, AFileDoesNotUnfoldWithoutBound) {
  const std::string w = storage("FloatStorage", "0", 6);
  refused_pickle(dict({{"w", tensor(w, 0, {100, 1'000'000'000}, {0, 0})}}), Errc::Unavailable,
                 "with tensor 'w' of shape [100, 1000000000] it unfolds to more than 16 times");
  // Each alone would do.
  const std::string half = tensor(w, 0, {150'000'000}, {0});
  refused_pickle(dict({{"a", half}, {"b", half}}), Errc::Unavailable, "with tensor 'b'");
  write(torch_file(pickle(dict({{"a", half}})), {{"0", data_}}));
  EXPECT_EQ(open_source(dir_ / "x.pt")->at("a").numel(), 150'000'000);
}

TEST_F(TorchArchive, TheStateDictIsFoundByItsRule) {
  const std::string w = tensor(storage("FloatStorage", "0", 6), 0, {6}, {1});
  const auto names = [&](const std::string& body) {
    write(torch_file(pickle(body), {{"0", data_}}));
    std::vector<std::string> out;
    const auto source = open_source(dir_ / "x.pt");
    for (const TensorInfo& t : source->list()) out.push_back(t.name);
    return out;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(dict({{"a", w}, {"n", testing::number(1)}, {"b", dict({{"c", w}})}})), (Names{"a", "b.c"}));
  for (const char* key : {"state_dict", "model_state_dict", "model", "module"}) {
    EXPECT_EQ(names(dict({{key, dict({{"a", w}})}, {"optimizer", dict({{"x", w}})}})), Names{"a"});
  }
  EXPECT_EQ(names(dict({{"model", w}})), Names{"model"});  // a tensor of that name
  refused_pickle(dict({{"model", dict({{"a", w}})}, {"module", dict({{"a", w}})}}), Errc::Unavailable,
                 "both 'model' and 'module'");
  refused_pickle(dict({{"a", testing::number(1)}}), Errc::Unavailable, "there is no tensor");
  refused_pickle(w, Errc::Unavailable, "holds a tensor, not a dict");
  refused_pickle(dict({{"a", w}, {"a", w}}), Errc::Corrupt, "'a' appears twice");
  refused_pickle(dict({{"", w}}), Errc::Corrupt, "a tensor without a name");
  refused_pickle(dict({{"a\nb", w}}), Errc::Corrupt, "control characters");
  refused_pickle(dict({{std::string(5000, 'a'), w}}), Errc::Corrupt, "names of more than 4096 bytes");
  refused_pickle("}N" + w + "s", Errc::Corrupt, "whose key is a None");
  refused_pickle("}q\1" + testing::text("d") + "h\1s", Errc::Corrupt, "nested deeper than 32");  // holds itself
  // One dict, shared on every level: 2^30 ways, 30 values.
  std::string laughs = dict({{"w", w}});
  for (char k = 0; k < 30; ++k) {
    laughs = "}" + testing::text("a") + laughs + "q" + k + "s" + testing::text("b") + "h" + k + "s";
  }
  refused_pickle(laughs, Errc::Corrupt, "values in nested dicts");
}

TEST_F(TorchArchive, DamageIsFound) {
  std::string bytes = torch_file(good_pickle(), {{"0", data_}});
  bytes[bytes.find(data_) + 7] ^= 1;
  write(bytes);
  const TorchFile file(dir_ / "x.pt");  // the header is whole
  EXPECT_ERROR(file.verify(), Errc::Corrupt, "entry 'archive/data/0' is damaged");
  EXPECT_EQ(open_source(dir_ / "x.pt")->verify({}).size(), 1u);
  bytes = torch_file(good_pickle(), {{"0", data_}});
  bytes[bytes.find("_rebuild")] ^= 1;
  refused(bytes, Errc::Corrupt, "entry 'archive/data.pkl' is damaged");
}

TEST_F(TorchArchive, AFileThatChangesIsNotReadOn) {
  write(torch_file(good_pickle(), {{"0", data_}}));
  TorchFile file(dir_ / "x.pt");
  const PickleTensor& t = *file.root().find("w")->tensor;
  file.close();
  EXPECT_FALSE(file.is_open());
  float x = 0;
  file.read(t, 2, 1, &x);
  EXPECT_EQ(x, 2);
  file.close();
  write("shorter");
  EXPECT_ERROR(file.read(t, 2, 1, &x), Errc::Corrupt, "changed while it was read");
}

// --- directories as transformers writes them

class PytorchModel : public ::testing::Test {
 protected:
  void SetUp() override {
    shard("pytorch_model-00001-of-00002.bin", {"a", "extra"}, {1, 2});
    shard("pytorch_model-00002-of-00002.bin", {"b"}, {3, 4});
    index(R"({"weight_map":{"a":"pytorch_model-00001-of-00002.bin","b":"pytorch_model-00002-of-00002.bin"}})");
  }
  void shard(const std::string& name, const std::vector<std::string>& tensors, const std::vector<float>& values) {
    std::vector<std::pair<std::string, std::string>> items;
    for (const std::string& t : tensors) items.emplace_back(t, tensor(storage("FloatStorage", "7", 2), 0, {2}, {1}));
    write_file(dir_ / name, torch_file(pickle(dict(items)), {{"7", floats(values)}}));
  }
  void index(const std::string& text) { write_file(dir_ / "pytorch_model.bin.index.json", text); }
  TempDirectory dir_;
};

TEST_F(PytorchModel, IsReadAcrossItsShards) {
  for (const std::string& path : {dir_.path(), dir_ / "pytorch_model.bin.index.json"}) {
    const auto source = open_source(path);
    ASSERT_EQ(source->list().size(), 2u);
    float x[2];
    source->read("b", 1, 1, x);
    source->read("a", 0, 1, x + 1);
    EXPECT_EQ(x[0] * 10 + x[1], 41);
  }
}

TEST_F(PytorchModel, SafetensorsComeFirst) {
  std::filesystem::copy(testing::test_data("gpt2/model.safetensors"), dir_ / "model.safetensors");
  EXPECT_EQ(open_source(dir_.path())->find("a"), nullptr);
}

TEST_F(PytorchModel, ABadIndexIsRefused) {
  for (const char* name : {"../x.bin", "/x.bin", "C:\\\\x.bin", ".bin", "model.safetensors", "x/y.bin"}) {
    index(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name));
    EXPECT_ERROR(open_source(dir_.path()), Errc::Corrupt, "only a plain *.bin file");
  }
  index(R"({"weight_map":{"a":"pytorch_model-00003-of-00003.bin"}})");
  EXPECT_ERROR(open_source(dir_.path()), Errc::Corrupt, "shard pytorch_model-00003-of-00003.bin is missing");
  index(R"({"weight_map":{"c":"pytorch_model-00002-of-00002.bin"}})");
  EXPECT_ERROR(open_source(dir_.path()), Errc::Corrupt, "lacks 1 of the 1 tensors");
  index("{}");
  EXPECT_ERROR(open_source(dir_.path()), Errc::Corrupt, "not a bin index");
}

}  // namespace torch_file_test
}  // namespace ds
