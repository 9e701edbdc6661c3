// SPDX-License-Identifier: Apache-2.0
// HDF5 files as this library writes them, seen by itself, by h5dump and by h5py; and the files that it refuses.

#include "formats/hdf5.h"
#include "model/slice.h"

#include <chrono>
#include <cstring>
#include <ctime>
#include <limits>
#include <thread>

#include "temp_directory.h"

namespace ds {
namespace hdf5_test {

using testing::read_file;
using testing::TempDirectory;
using testing::write_file;

bool have_h5py() {
  static const bool have = std::system("/usr/bin/python3 -c 'import h5py' 2>/dev/null") == 0;
  return have;
}

// Runs a Python program with `dir` as the working directory and returns what it prints.
std::string python(const TempDirectory& dir, const std::string& program) {
  write_file(dir / "program.py", "import h5py, numpy as np\n" + program);
  EXPECT_EQ(std::system(("cd " + dir.path() + " && /usr/bin/python3 program.py > out.txt 2>&1").c_str()), 0)
      << read_file(dir / "out.txt");
  return read_file(dir / "out.txt");
}

std::string shell(const TempDirectory& dir, const std::string& command) {
  EXPECT_EQ(std::system(("cd " + dir.path() + " && { " + command + "; } > out.txt 2>&1").c_str()), 0)
      << read_file(dir / "out.txt");
  return read_file(dir / "out.txt");
}

const std::vector<TensorInfo> kAllTypes = {
    {"h.0.weight", DType::BF16, {3, 5}}, {"fp32", DType::F32, {7}},     {"half", DType::F16, {1, 1, 3}},
    {"fp64", DType::F64, {2}},           {"int32", DType::I32, {5}},    {"int64", DType::I64, {1}},
    {"group/uint16", DType::U16, {9}},   {"group/u8", DType::U8, {3}},  {"scalar", DType::F32, {}},
    {"empty", DType::F32, {4, 0}},       {"large", DType::F32, {20000}}};

TEST(Hdf5, AllTypesAndShapesRoundTrip) {
  const TempDirectory dir;
  const std::string path = dir / "model.h5";
  std::map<std::string, std::string> data;
  const auto sink = create_sink(path, FileFormat::Hdf5, kAllTypes, {{"format", "pt"}, {"empty", ""}});
  for (const TensorInfo& t : kAllTypes) {
    std::string& bytes = data[t.name];
    for (i64 i = 0; i < t.bytes(); ++i) bytes += static_cast<char>(i * 37 + static_cast<i64>(data.size()));
    sink->write(t.name, 0, t.numel(), bytes.data());
  }
  sink->finish();
  const auto source = open_source(path);
  ASSERT_EQ(source->list().size(), kAllTypes.size());
  for (const TensorInfo& t : kAllTypes) {
    EXPECT_EQ(source->at(t.name), t);
    std::string got(static_cast<size_t>(t.bytes()), '?');
    source->read(t.name, 0, t.numel(), got.data());
    EXPECT_EQ(got, data[t.name]) << t.name;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(Hdf5, NamesThatItCannotHoldAreKnown) {
  std::string deep = "x";
  for (int i = 0; i < 30; ++i) deep = "g/" + deep;
  EXPECT_TRUE(is_hdf5_name(deep));
  EXPECT_FALSE(is_hdf5_name("g/" + deep));
  for (const char* name : {"", "a//b", "/a", "a/", "a/../b", ".", "a\nb"}) EXPECT_FALSE(is_hdf5_name(name)) << name;
  const TempDirectory dir;
  create_sink(dir / "x.h5", FileFormat::Hdf5, {{deep, DType::U8, {0}}})->finish();
  EXPECT_EQ(open_source(dir / "x.h5")->list().at(0).name, deep);
}

// Nothing of the clock is in them: neither in the root, nor in groups, datasets or views.
TEST(Hdf5, TheSameContentsAreTheSameBytes) {
  const TempDirectory dir;
  const auto write = [&](const std::string& name) {
    create_hdf5(dir / ("x" + name),
                {{{"group/inner/x", DType::F32, {3}}, {{"begin", {}, {7}}}}, {{"y", DType::U8, {5}}}},
                {{"format", "pt"}});
    create_hdf5_views(dir / ("v" + name), {{{"group/view", DType::F32, {3}}, {{0, 3, "x", "group/inner/x"}}}},
                      {{"links/alias", "group/view"}});
  };
  write("1");
  const auto second = [] { return std::time(nullptr); };
  for (const auto start = second(); second() == start;) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  write("2");
  for (const char* kind : {"x", "v"})
    EXPECT_EQ(read_file(dir / (std::string(kind) + "1")), read_file(dir / (std::string(kind) + "2")));
}

void write_half_values(const std::string& path) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float values[] = {1.0f, -2.5f, kInf, -kInf, 0.15625f, 0x1p-14f, 0x1p-24f, 0.0f};
  const auto sink = create_sink(path, FileFormat::Hdf5, {{"b", DType::BF16, {2, 4}}, {"h", DType::F16, {2, 4}}});
  std::vector<u16> bits(8);
  convert_elements(DType::BF16, bits.data(), DType::F32, values, 8);
  sink->write("b", 0, 8, bits.data());
  convert_elements(DType::F16, bits.data(), DType::F32, values, 8);
  sink->write("h", 0, 8, bits.data());
  sink->finish();
}

TEST(Hdf5, H5dumpShowsSixteenBitFloats) {
  if (std::system("command -v h5dump > /dev/null") != 0) GTEST_SKIP() << "h5dump is not installed";
  const TempDirectory dir;
  write_half_values(dir / "x.h5");
  for (const std::string name : {"b", "h"}) {
    const std::string dump = shell(dir, "h5dump -d /" + name + " x.h5");
    EXPECT_NE(dump.find("16-bit little-endian floating-point"), std::string::npos) << dump;
    EXPECT_NE(dump.find("1, -2.5, inf, -inf"), std::string::npos) << dump;
    EXPECT_NE(dump.find("0.15625, 6.10352e-05, 5.96046e-08, 0"), std::string::npos) << dump;
  }
}

TEST(Hdf5, H5pyReadsSixteenBitFloats) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  write_half_values(dir / "x.h5");
  const std::string out = python(dir, R"(
f = h5py.File('x.h5')
want = np.array([[1, -2.5, np.inf, -np.inf], [0.15625, 2**-14, 2**-24, 0]])
print(*[np.array_equal(f[n][...].astype(float), want) for n in 'bh'])
)");
  EXPECT_EQ(out, "True True\n");
}

TEST(Hdf5, ReadsWhatH5pyWrites) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  python(dir, R"(
with h5py.File('x.h5', 'w') as f:
    f['a/b/c'] = np.arange(6, dtype='<f4').reshape(2, 3)
    f['half'] = np.array([1.5], dtype='<f2')
    f['big'] = np.arange(3, dtype='>f4')
    f['text'] = 'words'
    f['soft'] = h5py.SoftLink('/a/b/c')
)");
  const auto source = open_source(dir / "x.h5");
  ASSERT_EQ(source->list().size(), 2u);
  EXPECT_EQ(source->at("half"), (TensorInfo{"half", DType::F16, {1}}));
  float x[4];
  source->read("a/b/c", 2, 4, x);
  EXPECT_EQ(x[3], 5.0f);
  EXPECT_ERROR(source->at("big"), Errc::Unavailable, "big-endian");
  EXPECT_ERROR(source->at("text"), Errc::Unavailable, "string");
}

std::vector<std::string> names(const TensorSource& source) {
  std::vector<std::string> out;
  for (const TensorInfo& t : source.list()) out.push_back(t.name);
  return out;
}

// Small and large tensors come from different places of a file, so that these alone would not show the order.
TEST(Hdf5, TensorsKeepTheirOrder) {
  const TempDirectory dir;
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 120; ++i)
    tensors.push_back({fmt::format("layer.{}.w", (i * 37) % 120),
                       DType::F32,
                       {i % 3 == 0   ? 30000
                        : i % 3 == 1 ? 7
                                     : 0}});
  const auto sink = create_sink(dir / "x.h5", FileFormat::Hdf5, tensors);
  const std::vector<float> data(30000);
  for (const size_t i : sink->order()) sink->write(tensors[i].name, 0, tensors[i].numel(), data.data());
  sink->finish();
  EXPECT_EQ(open_source(dir / "x.h5")->list(), tensors);
}

TEST(Hdf5, WithoutAnOrderOfCreationPlacesTellTheOrder) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  python(dir, R"(
order = ['z', 'b/y', 'a', 'c/d/x', 'b/a']
with h5py.File('places.h5', 'w') as f:
    for n in order: f[n] = np.zeros(5000)
with h5py.File('tracked.h5', 'w', track_order=True) as f:
    for n in ['z', 'a', 'y', 'b']: f[n] = np.zeros(3)
)");
  EXPECT_EQ(names(*open_source(dir / "places.h5")), (std::vector<std::string>{"z", "b/y", "a", "c/d/x", "b/a"}));
  EXPECT_EQ(names(*open_source(dir / "tracked.h5")), (std::vector<std::string>{"z", "a", "y", "b"}));
}

TEST(Hdf5, CompactDatasetsAreRead) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  python(dir, R"(
with h5py.File('x.h5', 'w', libver='latest', userblock_size=512) as f:
    for name, shape, dtype in [(b'c', (3, 5), 'f4'), (b's', (), 'i8'), (b'most', (8000,), 'f8')]:
        p = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        p.set_layout(h5py.h5d.COMPACT)
        d = h5py.h5d.create(f.id, name, h5py.h5t.py_create(np.dtype('<' + dtype)), h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR), p)
        d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.asarray(np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) + 7))
    f['plain'] = np.arange(4, dtype='f4')
)");
  const auto source = open_source(dir / "x.h5");
  float x[4];
  source->read("c", 7, 3, x);
  EXPECT_EQ(x[0], 14.0f);
  EXPECT_EQ(x[2], 16.0f);
  i64 scalar = 0;
  source->read("s", 0, 1, &scalar);
  EXPECT_EQ(scalar, 7);
  double last = 0;
  source->read("most", 7999, 1, &last);
  EXPECT_EQ(last, 8006);
  source->read("plain", 0, 4, x);  // after a user block
  EXPECT_EQ(x[3], 3.0f);
}

TEST(Hdf5, MetadataRoundTripsAtAnySize) {
  const TempDirectory dir;
  std::map<std::string, std::string> metadata = {{"format", "pt"}, {"empty", ""}, {"text", "\xc3\xa9\n\"{}"}};
  metadata["64 KiB"] = std::string(65536, 'a');
  metadata["3 MiB"] = std::string(3 << 20, 'b') + "end";
  for (int i = 0; i < 300; ++i) metadata["tie." + std::to_string(i)] = "lm_head.weight";
  create_sink(dir / "x.h5", FileFormat::Hdf5, {}, metadata)->finish();
  EXPECT_EQ(open_source(dir / "x.h5")->metadata(), metadata);
}

TEST(Hdf5, TextAttributesAreMetadata) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  python(dir, R"(
with h5py.File('x.h5', 'w') as f:
    f.attrs['variable'] = 'schön'
    f.attrs['fixed'] = np.bytes_(b'ab')
    f.attrs['padded'] = np.array(b'ab', dtype=h5py.string_dtype('ascii', 7))
    f.attrs['one'] = np.array(['x'], dtype=h5py.string_dtype())
    f.attrs['number'] = 3
    f.attrs['two'] = ['x', 'y']
    f.attrs['latin1'] = np.bytes_(b'\xe9')
    f['x'] = np.zeros(3, 'f4')
    f['x'].attrs['not the root'] = 'z'
with h5py.File('large.h5', 'w', libver='latest') as f:
    for i in range(5): f.attrs[str(i)] = np.array(b'a' * (4 << 20))
)");
  const std::map<std::string, std::string> want = {
      {"variable", "sch\xc3\xb6n"}, {"fixed", "ab"}, {"padded", "ab"}, {"one", "x"}};
  EXPECT_EQ(open_source(dir / "x.h5")->metadata(), want);
  EXPECT_ERROR(open_source(dir / "large.h5"), Errc::Corrupt, "attributes of the root exceed 16 MiB");
}

TEST(Hdf5, OffsetsOfOtherThanEightBytesAreRefused) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  python(dir, R"(
p = h5py.h5p.create(h5py.h5p.FILE_CREATE)
p.set_sizes(4, 4)
h5py.h5f.create(b'x.h5', fcpl=p)
)");
  EXPECT_ERROR(open_source(dir / "x.h5"), Errc::Unavailable, "offsets and lengths have 4 and 4 bytes");
}

TEST(Hdf5, RefusesWhatItDoesNotRead) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  const auto refused = [&](const std::string& statements, Errc code, const char* reason) {
    python(dir, "f = h5py.File('x.h5', 'w')\n" + statements + "\nf.close()\n");
    EXPECT_ERROR(open_source(dir / "x.h5"), code, reason);
  };
  refused("f.create_dataset('c', data=np.zeros(9), chunks=(3,))", Errc::Unavailable, "h5repack");
  refused("f.create_dataset('z', data=np.zeros(9), compression='gzip')", Errc::Unavailable, "/z is not stored contig");
  refused("f['e'] = h5py.ExternalLink('y.h5', '/a')", Errc::Unavailable, "/e links to another file");
  refused("f.create_dataset('x', (4,), 'f4', external=[('raw.bin', 0, 16)])", Errc::Unavailable,
          "not stored contiguous");
  refused("f.create_dataset('n', (4,), 'f4')", Errc::Unavailable, "never written");
  refused(
      "l = h5py.VirtualLayout((4,), 'f4'); l[:] = h5py.VirtualSource('y.h5', 'a', (4,))\n"
      "f.create_virtual_dataset('v', l)",
      Errc::Unavailable, "/v is a view");
  refused("f['a/b'] = 1.0; f['a/c'] = f['a']", Errc::Corrupt, "second hard link");  // a loop
}

TEST(Hdf5, BrokenFilesAreRefused) {
  const TempDirectory dir;
  const std::string path = dir / "x.h5";
  write_half_values(path);
  const std::string good = read_file(path);
  for (size_t cut : {size_t{0}, size_t{1}, size_t{10}, size_t{60}, good.size() / 2, good.size() - 1}) {
    write_file(path, good.substr(0, cut));
    EXPECT_ERROR(open_source(path), Errc::Corrupt, "x.h5");
  }
  write_file(path, std::string(4096, 'x'));
  EXPECT_ERROR(open_source(path), Errc::Corrupt, "not an HDF5 file");
  write_file(path, good.substr(0, 24) + std::string(4096, 'x'));
  EXPECT_ERROR(open_source(path), Errc::Corrupt, "HDF5 cannot open the file");
  EXPECT_ERROR(open_source(dir / "absent.h5"), Errc::Io, "No such file");
  EXPECT_ERROR(create_sink(dir / "no/such.h5", FileFormat::Hdf5, {}), Errc::Io, "cannot create");
}

// Every flip of a metadata bit is either found by the format's own checksums or harmless to what is read.
TEST(Hdf5, FlippedMetadataIsFoundOrHarmless) {
  const TempDirectory dir;
  const std::string path = dir / "x.h5";
  write_half_values(path);
  const std::string good = read_file(path);
  int found = 0, harmless = 0;
  for (size_t i = 0; i < good.size(); i += 3) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << (i % 8)));
    write_file(path, bad);
    try {
      const auto source = open_source(path);
      ASSERT_EQ(source->list().size(), 2u);
      EXPECT_EQ(source->at("b").shape, (std::vector<i64>{2, 4}));
      ++harmless;
    } catch (const Error& e) {
      ++found;
    }
  }
  EXPECT_GT(found, 50);
  EXPECT_GT(harmless, 10);  // the data itself, gaps
}

TEST(Hdf5, ViewsCoverAnyRangeOfAnyShape) {
  if (!have_h5py()) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  struct Cut {
    std::vector<i64> shape;
    std::vector<model::ParamSlice> slices = {{}};
  };
  const Cut cuts[] = {{{17}},
                      {{3, 7}},
                      {{2, 3, 5}},
                      {{2, 1, 3, 4}},
                      {{5, 1}},
                      {{1, 9}},
                      {{17}, {{0, {{0, 5}, {9, 12}}}, {0, {{5, 9}, {12, 17}}}}},
                      {{4, 30}, {{1, {{0, 4}, {12, 16}, {24, 26}}}, {1, {{4, 12}, {16, 24}, {26, 30}}}}},
                      {{9, 12}, {{1, {{0, 3}}}, {1, {{3, 10}}}, {1, {{10, 12}}}}},
                      {{3, 4, 5}, {{2, {{0, 1}, {3, 5}}}, {2, {{1, 3}}}}},
                      {{3, 4, 5}, {{1, {{0, 1}, {3, 4}}}, {1, {{1, 3}}}}},
                      {{2, 3, 4, 5}, {{3, {{1, 2}, {4, 5}}}, {3, {{0, 1}, {2, 4}}}}},
                      {{2, 3, 4, 5}, {{2, {{0, 3}}}, {2, {{3, 4}}}}},
                      {{6, 2, 3}, {{0, {{0, 1}, {2, 3}, {4, 5}}}, {0, {{1, 2}, {3, 4}, {5, 6}}}}}};
  std::vector<Hdf5View> views;
  std::vector<Hdf5Dataset> datasets;
  std::vector<float> values;
  for (const i64 longest : {7, 40, 1000}) {  // pieces of 1, 3, 5, 7, 2, ... or of many rows, or of all
    for (const Cut& cut : cuts) {
      const std::string name = fmt::format("v{}", views.size());
      views.push_back({{name, DType::F32, cut.shape}, {}});
      for (const model::ParamSlice& slice : cut.slices) {
        const model::SliceMap map(slice, cut.shape);
        const i64 n = map.numel();
        for (i64 begin = 0, step = longest == 1000 ? n : 1; begin < n; begin += step, step = step % longest + 2) {
          const i64 count = std::min(step, n - begin), first = map.global_of(begin);
          const std::string dataset = fmt::format("p/{}@{}", name, first);
          views.back().parts.push_back({begin, count, "shard.h5", dataset, slice.dim, slice.ranges});
          datasets.push_back({{dataset, DType::F32, {count}}, {{"begin", {}, {first}}}});
          for (i64 i = 0; i < count; ++i) values.push_back(static_cast<float>(map.global_of(begin + i)));
        }
      }
    }
  }
  const std::vector<i64> offsets = create_hdf5(dir / "shard.h5", datasets, {});
  const File file = File::open_write(dir / "shard.h5");
  const float* v = values.data();
  for (size_t i = 0; i < datasets.size(); ++i) {
    file.write_at(offsets[i], v, datasets[i].info.bytes());
    v += datasets[i].info.numel();
  }
  create_hdf5_views(dir / "view.h5", views, {{"alias", "v1"}});
  const std::string out = python(dir, R"(
f = h5py.File('view.h5')
bad = []
for name in f:
    want = np.arange(f[name].size).reshape(f[name].shape)
    if not np.array_equal(f[name][...], want) or not np.array_equal(f[name][1:], want[1:]): bad.append((name, f[name].shape))
print(len(f), bad, np.array_equal(f['alias'], f['v1']), f['v0'].is_virtual)
)");
  EXPECT_EQ(out, "43 [] True True\n");
}

// The size of the view does not depend on the number of rows of a slice.
TEST(Hdf5, TheViewOfAHugeSliceIsSmall) {
  const TempDirectory dir;
  std::vector<Hdf5View::Part> pieces;
  const i64 rows = 1 << 20, numel = rows * 3 * 256;
  for (i64 rank = 0; rank < 4; ++rank) {
    const auto part = [&](i64 first) { return std::pair(first + 256 * rank, first + 256 * (rank + 1)); };
    const std::vector<std::pair<i64, i64>> ranges = {part(0), part(1024), part(2048)};
    for (const auto& [begin, end] : {std::pair<i64, i64>{0, 1000}, {1000, numel / 2 + 7}, {numel / 2 + 7, numel}})
      pieces.push_back({begin, end - begin, "shard.h5", fmt::format("p@{}.{}", rank, begin), 1, ranges});
  }
  create_hdf5_views(dir / "view.h5", {{{"v", DType::BF16, {rows, 3072}}, pieces}}, {});
  EXPECT_LT(std::filesystem::file_size(dir / "view.h5"), 20000u);
}

}  // namespace hdf5_test
}  // namespace ds
