// SPDX-License-Identifier: Apache-2.0
// Training states in which ranks have slices of parameters: saved at any tensor- and data-parallel ranks, loaded,
// merged and shown at any others. Faulty slices are reported.

#include <unistd.h>

#include <chrono>

#include "checkpoint/reader.h"
#include "checkpoint/shard.h"
#include "checkpoint_state.h"
#include "ds/checkpoint.h"
#include "slow_set.h"

namespace ds {
namespace checkpoint_slices_test {

namespace fs = std::filesystem;
using namespace testing;
using model::ParamSlice;

constexpr Ranks kRanks[] = {{1, 1}, {1, 3}, {2, 1}, {3, 1}, {2, 2}, {3, 2}, {4, 3}};

TEST(SlicedCheckpoint, AnyRanksToAnyOthers) {
  const TempDirectory dir;
  for (const Ranks save : kRanks) {
    for (const i64 seed : {0, 1}) {
      const std::string step =
          save_sliced(dir / fmt::format("{}x{}-{}", save.tp, save.dp, seed), 7, DType::BF16, save, seed);
      for (const Ranks load : kRanks) {
        SCOPED_TRACE(fmt::format("{} x {} to {} x {}", save.tp, save.dp, load.tp, load.dp));
        load_sliced(step, DType::BF16, load, 2 * seed);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(SlicedCheckpoint, LoadsInAnotherPrecision) {
  const TempDirectory dir;
  for (const DType saved : {DType::F32, DType::BF16, DType::F16}) {
    const std::string step = save_sliced(dir / std::string(dtype_name(saved)), 7, saved, {3, 2}, 1);
    for (const DType wanted : {DType::F32, DType::BF16, DType::F16}) load_sliced(step, wanted, {2, 2}, 2);
  }
}

TEST(SlicedCheckpoint, MergesToTheBytesOfWholeParameters) {
  const TempDirectory dir;
  const auto merged = [&](Ranks ranks, i64 seed) {
    const std::string name = fmt::format("{}x{}-{}", ranks.tp, ranks.dp, seed), out = dir / (name + ".safetensors");
    const MergeResult r = merge_checkpoint(save_sliced(dir / name, 3, DType::BF16, ranks, seed), out,
                                           {.optimizer = true, .verify = true});
    EXPECT_TRUE(r.verified);
    return read_file(out);
  };
  const std::string want = merged({1, 1}, 0);
  for (const Ranks ranks : kRanks) EXPECT_EQ(merged(ranks, 1), want) << ranks.tp << " x " << ranks.dp;
}

TEST(SlicedCheckpoint, TheViewShowsEveryParameterWhole) {
  if (std::system("/usr/bin/python3 -c 'import h5py' 2>/dev/null") != 0) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  write_file(dir / "view.py", R"(
import h5py, numpy as np, sys
shapes = {'wte.weight': (13, 6), 'h.0.ln.bias': (5,), 'h.0.c_attn.weight': (5, 27), 'h.0.c_attn.bias': (27,),
          'h.0.moe': (3, 8, 7), 'h.0.down.weight': (7, 11), 'lm_head.weight': (13, 6), 'scale': (1,),
          'ln_f.weight': (29,)}
f = h5py.File(sys.argv[1])
assert sorted(f) == sorted(shapes), list(f)
for p, (name, shape) in enumerate(shapes.items()):
    i = np.arange(np.prod(shape))
    want = ((i * 7 + (0 if p == 6 else p) * 31) % 255 - 127) / 16
    assert f[name].shape == shape and np.array_equal(f[name][...], want.reshape(shape).astype('f4')), name
    for at in np.ndindex(shape[:-1]):  # a part of what one mapping shows
        assert np.array_equal(f[name][at], want.reshape(shape)[at].astype('f4')), (name, at)
)");
  test::EveryNth tried(2);
  for (const Ranks ranks : kRanks) {
    for (const i64 seed : {0, 1, 4}) {
      if (!tried()) continue;
      const std::string step =
          save_sliced(dir / fmt::format("{}x{}-{}", ranks.tp, ranks.dp, seed), 1, DType::BF16, ranks, seed);
      ASSERT_EQ(std::system(fmt::format("cd / && /usr/bin/python3 {} {}/model.h5", dir / "view.py", step).c_str()), 0)
          << ranks.tp << " x " << ranks.dp << " cut by " << seed;
    }
  }
}

TEST(SlicedCheckpoint, RankFilesSayWhichSliceTheyHold) {
  if (std::system("command -v h5dump > /dev/null") != 0) GTEST_SKIP() << "h5dump is not installed";
  const TempDirectory dir;
  const std::string step = save_sliced(dir.path(), 1, DType::F32, {3, 1}, 0);
  const auto dump = [&](const std::string& dataset) {
    const std::string command = fmt::format("h5dump -A -d {} {}/rank-00001.h5 > {}", dataset, step, dir / "dump");
    EXPECT_EQ(std::system(command.c_str()), 0);
    return read_file(dir / "dump");
  };
  const std::string fused = dump("/exp_avg/h.0.c_attn.weight@3");  // columns 3 to 6, 12 to 15, 21 to 24
  EXPECT_NE(fused.find("DATASPACE  SIMPLE { ( 45 ) / ( 45 ) }"), std::string::npos) << fused;
  for (const char* text : {"ATTRIBUTE \"begin\"", "ATTRIBUTE \"slice_begin\"", "ATTRIBUTE \"slice_dim\"",
                           "ATTRIBUTE \"slice_ranges\"", "(0,0): 3, 6,", "(1,0): 12, 15,", "(2,0): 21, 24"}) {
    EXPECT_NE(fused.find(text), std::string::npos) << text << "\n" << fused;
  }
  save_sliced(dir.path(), 2, DType::F32, {1, 1}, 0);
  EXPECT_EQ(
      std::system(fmt::format("h5dump -A {}/step-00000002/rank-00000.h5 | grep -q slice", dir.path()).c_str()) != 0,
      true);
}

TEST(SlicedCheckpoint, TheManifestHasVersionTwoWhereThereAreSlices) {
  const TempDirectory dir;
  const auto manifest = [&](Ranks ranks) {
    return read_file(save_sliced(dir.path(), 1, DType::BF16, ranks, 0) + "/manifest.json");
  };
  const std::string whole = manifest({1, 2}), sliced = manifest({3, 1});
  EXPECT_NE(whole.find("\"version\": 1,"), std::string::npos);
  EXPECT_EQ(whole.find("slice"), std::string::npos);
  EXPECT_NE(sliced.find("\"version\": 2,"), std::string::npos);
  EXPECT_NE(
      sliced.find("{\"file\":1,\"parameter\":2,\"slice\":{\"dim\":1,\"ranges\":[[3,6],[12,15],[21,24]]},\"begin\":0,"
                  "\"count\":45,"),
      std::string::npos)
      << sliced;
}

TEST(SlicedCheckpoint, ShowSaysTheSlices) {
  const TempDirectory dir;
  save_sliced(dir.path(), 1, DType::BF16, {3, 2}, 0);
  const CheckpointSummary s = describe_checkpoint(dir.path());
  EXPECT_EQ(s.world_size, 6);
  const CheckpointSummary::Param& fused = s.params[2];
  ASSERT_EQ(fused.owners.size(), 6u);
  std::vector<std::string> owners;
  for (const auto& o : fused.owners)
    owners.push_back(fmt::format("{}:{}-{}{}", o.rank, o.begin, o.begin + o.count, o.slice));
  EXPECT_EQ(owners, (std::vector<std::string>{"0:0-23[:,0:3+9:12+18:21]", "3:23-45[:,0:3+9:12+18:21]",
                                              "1:0-23[:,3:6+12:15+21:24]", "4:23-45[:,3:6+12:15+21:24]",
                                              "2:0-23[:,6:9+15:18+24:27]", "5:23-45[:,6:9+15:18+24:27]"}));
  EXPECT_EQ(fused.owners[2].slice_dim, 1);
  EXPECT_EQ(fused.owners[2].slice_ranges, (std::vector<std::pair<i64, i64>>{{3, 6}, {12, 15}, {21, 24}}));
  EXPECT_EQ(s.params[1].owners[0].slice, "");
}

// ---- damage

TEST(SlicedCheckpoint, DamageIsFoundAndNamed) {
  const TempDirectory dir;
  const std::string step = save_sliced(dir.path(), 1, DType::BF16, {3, 1}, 0), file = step + "/rank-00001.h5";
  const std::string good = read_file(file);
  const Manifest m = CheckpointReader(step).manifest();
  for (const PieceRecord& p : m.files[1].pieces) {
    std::string bad = good;
    char& byte = bad.at(static_cast<size_t>(p.states[State::Param]->offset + (p.count - 1) * 2));
    byte = static_cast<char>(byte ^ 1);
    write_file(file, bad);
    const std::string name = fmt::format("/param/{}@{}", m.params[p.param].name, first_element(m, p));
    const std::vector<std::string> found = CheckpointReader(step).verify({});
    ASSERT_EQ(found.size(), 1u);
    EXPECT_NE(found[0].find(file + ": checksum mismatch in " + name), std::string::npos) << found[0];
    EXPECT_ERROR(load_sliced(step, DType::BF16, {2, 1}, 1), Errc::Corrupt, "checksum mismatch in " + name);
    EXPECT_ERROR(merge_checkpoint(step, dir / "m.safetensors", {}), Errc::Corrupt, "checksum mismatch in " + name);
  }
  write_file(file, good);
  load_sliced(step, DType::BF16, {2, 1}, 1);
}

// ---- slices that cannot be

void save_pieces(const std::string& dir, const std::vector<ParamEntry>& params, const std::vector<Range>& pieces) {
  run_threads(1, {}, [&](Communicator& comm) {
    std::vector<float> data(100);
    std::vector<StatePiece> own;
    for (const Range& p : pieces) own.push_back({p.param, p.begin, p.count, {{data.data()}}, &p.slice});
    save_checkpoint(dir, sample_meta(1, DType::F32), params, own, comm);
  });
}

TEST(SlicedCheckpoint, PiecesThatDoNotCoverAreRefused) {
  const TempDirectory dir;
  const std::vector<ParamEntry> params = {{"a", {4, 6}, ""}};
  const ParamSlice left{1, {{0, 3}}}, right{1, {{3, 6}}}, top{0, {{0, 2}}}, all{};
  const auto refused = [&](const std::vector<Range>& pieces, const char* reason) {
    EXPECT_ERROR(save_pieces(dir.path(), params, pieces), Errc::Internal, reason);
    EXPECT_TRUE(fs::is_empty(dir.path()));
  };
  refused({{0, 0, 12, left}}, "indices 3 to 6 of dim 1 of 'a' are held by no rank");
  refused({{0, 0, 12, right}}, "indices 0 to 3 of dim 1 of 'a' are held by no rank");
  refused({{0, 0, 12, left}, {0, 0, 11, right}}, "elements 11 to 12 of slice [:,3:6] of 'a' are held by no rank");
  refused({{0, 0, 12, left}, {0, 1, 11, right}}, "elements 0 to 1 of slice [:,3:6] of 'a' are held by no rank");
  refused({{0, 0, 7, left}, {0, 6, 6, left}, {0, 0, 12, right}},
          "elements 6 to 7 of slice [:,0:3] of 'a' are held twice");
  refused({{0, 0, 13, left}, {0, 0, 12, right}}, "holds elements 0 + 13 of 'a', which has 12");
  refused({{0, 0, 12, left}, {0, 12, 1, left}, {0, 0, 12, right}}, "piece 12 + 1 of a slice [:,0:3] of 'a'");
  refused({{0, 0, 12, left}, {0, 0, 8, {1, {{2, 4}}}}, {0, 0, 8, {1, {{4, 6}}}}},
          "indices 2 to 3 of dim 1 of 'a' are held twice");
  refused({{0, 1, 23, all}, {0, 0, 12, left}}, "elements 0 to 1 of 'a' are held by no rank");
  refused({{0, 0, 24, all}, {0, 0, 12, right}}, "'a' is held whole and in slices of dim 1");
  refused({{0, 0, 12, top}, {0, 0, 12, right}}, "'a' is held in slices of dim 0 and in slices of dim 1");
  refused({{0, 0, 12, left}, {0, 0, 12, left}, {0, 0, 12, right}}, "element 0 of 'a' is held twice");
  refused({{0, 0, 12, {1, {{0, 7}}}}}, "range 0:7 of dim 1 of 6 indices");
  refused({{0, 0, 12, {2, {{0, 3}}}}}, "dim 2 of 2");
  save_pieces(dir.path(), params, {{0, 0, 12, left}, {0, 0, 12, right}});
}

TEST(SlicedCheckpoint, TwoSlicesOfAParameterInOneFile) {
  const TempDirectory dir;
  save_pieces(dir.path(), {{"a", {4, 6}, ""}}, {{0, 0, 4, {1, {{0, 1}}}}, {0, 0, 20, {1, {{1, 6}}}}});
  const std::string step = find_checkpoint(dir.path());
  EXPECT_TRUE(CheckpointReader(step).verify({}).empty());
  const Manifest m = CheckpointReader(step).manifest();
  EXPECT_EQ(dataset_name(m, State::Param, m.files[0].pieces[1]), "param/a@1");
}

TEST(SlicedManifest, ForgedSlicesAreRefused) {
  const TempDirectory dir;
  const std::string good = read_file(save_sliced(dir.path(), 1, DType::BF16, {3, 1}, 0) + "/manifest.json");
  const std::string body = good.substr(0, good.rfind(",\n\"checksum\""));
  const auto refused = [&](const std::string& from, const std::string& to, const std::string& part,
                           Errc code = Errc::Corrupt) {
    std::string text = body;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    const u64 sum = checksum(text.data(), static_cast<i64>(text.size()));
    EXPECT_ERROR(parse_manifest(fmt::format("{},\n\"checksum\": \"{:016x}\"\n}}\n", text, sum), "m"), code, part);
  };
  const std::string slice = "\"slice\":{\"dim\":1,\"ranges\":[[3,6],[12,15],[21,24]]}";
  refused("\"version\": 2", "\"version\": 1", "format version 1, but its contents are of version 2");
  refused("\"version\": 2", "\"version\": 5", "format version 5", Errc::Unavailable);
  refused(slice + ",", "", "elements 45 to 135 of 'h.0.c_attn.weight' are held by no rank");
  const auto ranges = [&](const std::string& text, const std::string& part) {
    refused(slice, "\"slice\":{\"dim\":1,\"ranges\":" + text + "}", part);
  };
  ranges("[]", "a slice without ranges");
  ranges("{}", "a slice without ranges");
  ranges("7", "is not a range");
  ranges("[[3,6,9]]", "[3,6,9] is not a range");
  ranges("[[3]]", "[3] is not a range");
  ranges("[3,6]", "3 is not a range");
  ranges("[[3,\"6\"]]", "not a whole number");
  ranges("[[3,6.5]]", "not a whole number");
  ranges("[[12,15],[3,6],[21,24]]", "range 3:6 of dim 1 of 27 indices, after 15");
  ranges("[[3,6],[5,15],[21,24]]", "range 5:15");
  ranges("[[3,6],[12,15],[21,28]]", "range 21:28");
  ranges("[[-3,6],[12,15],[21,24]]", "range -3:6");
  ranges("[[3,3],[12,15],[21,24]]", "range 3:3");
  ranges("[[3,9223372036854775807]]", "range 3:9223372036854775807");
  ranges("[[3,18446744073709551615]]", "not a whole number that fits");
  ranges("[[-9223372036854775808,6]]", "range -9223372036854775808:6");
  ranges("[[3,6],[12,15],[20,23]]", "indices 20 to 21 of dim 1 of 'h.0.c_attn.weight' are held twice");
  ranges("[[3,6],[12,15]]", "holds elements 0 + 45 of 'h.0.c_attn.weight', which has 30");
  ranges("[[3,6],[12,15],[21,25]]", "elements 45 to 50 of slice [:,3:6+12:15+21:25] of 'h.0.c_attn.weight'");
  for (const char* dim : {"2", "-1", "2147483648", "0.5", "\"1\"", "null"})
    refused(slice, fmt::format("\"slice\":{{\"dim\":{},\"ranges\":[[3,6],[12,15],[21,24]]}}", dim), "m: ");
  refused(slice, "\"slice\":[1,[3,6]]", "not a manifest");
  refused(slice, "\"slice\":null", "not a manifest");
  refused(slice, "\"slice\":{\"dim\":1}", "not a manifest");
}

// One piece of a manifest for rank 0, whose file is as large as can be.
PieceRecord record(i64 param, i64 begin, i64 count, const ParamSlice& slice) {
  PieceRecord p{{param, begin, count, slice}, {}};
  p.states[State::Param] = DatasetRecord{0, std::vector<u64>(static_cast<size_t>(div_ceil(4 * count, kChecksumBlock)))};
  return p;
}

TEST(SlicedManifest, ChecksTakeTimeByItsSize) {
  Manifest m;
  m.files.resize(1);
  m.files[0].bytes = i64{1} << 60;
  const i64 n = 100000;
  m.params = {{"slices", {n}, ""}, {"pieces", {n, 8}, ""}};
  ParamSlice many{1, {{0, 1}, {2, 3}, {4, 5}, {6, 7}}}, others{1, {{1, 2}, {3, 4}, {5, 6}, {7, 8}}};
  for (i64 i = 0; i < n; ++i) {
    m.files[0].pieces.push_back(record(0, 0, 1, {0, {{i, i + 1}}}));
    m.files[0].pieces.push_back(record(1, 4 * i, 4, many));
    m.files[0].pieces.push_back(record(1, 4 * i, 4, others));
  }
  const auto start = std::chrono::steady_clock::now();
  validate_manifest(m, "m", Errc::Corrupt);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));  // a square would take hours
  std::swap(m.files[0].pieces[0].slice, m.files[0].pieces[3].slice);
  validate_manifest(m, "m", Errc::Corrupt);
  m.files[0].pieces[0].slice = m.files[0].pieces[3].slice;
  EXPECT_ERROR(validate_manifest(m, "m", Errc::Corrupt), Errc::Corrupt, "are held twice");

  ParamSlice too_many{0, {}};
  for (i64 i = 0; i < 1025; ++i) too_many.ranges.emplace_back(2 * i, 2 * i + 1);
  m.params = {{"a", {n}, ""}};
  m.files[0].pieces = {record(0, 0, 1025, too_many)};
  EXPECT_ERROR(validate_manifest(m, "m", Errc::Corrupt), Errc::Corrupt, "a slice of 'a': 1025 ranges");
}

TEST(SlicedManifest, HugeShapesDoNotOverflow) {
  Manifest m;
  m.files.resize(1);
  m.files[0].bytes = i64{1} << 62;
  m.params = {{"a", {i64{1} << 40, 0, i64{1} << 40}, ""}};
  m.files[0].pieces = {record(0, 0, 1, {0, {{0, i64{1} << 40}}})};
  EXPECT_ERROR(validate_manifest(m, "m", Errc::Corrupt), Errc::Corrupt, "'a', which has 0");
  m.files[0].pieces = {record(0, 0, 1, {1, {{0, 1}}})};
  EXPECT_ERROR(validate_manifest(m, "m", Errc::Corrupt), Errc::Corrupt, "of dim 1 of 0 indices");
  m.files[0].pieces.clear();
  validate_manifest(m, "m", Errc::Corrupt);
}

// ---- reading beyond a checksum block

// 12.5 MB in fp32, its columns in three slices of several blocks each, one of them in two ranges, each in two pieces.
const std::vector<ParamEntry> kLarge = {{"big", {2000, 1563}, ""}};
std::vector<Range> large_ranges(int rank) {
  const ParamSlice slices[] = {{1, {{0, 500}, {1200, 1300}}}, {1, {{500, 1200}}}, {1, {{1300, 1563}}}};
  const ParamSlice& slice = slices[rank / 2];
  const i64 n = model::SliceMap(slice, kLarge[0].shape).numel(), cut = n / 7 * 3;
  return {rank % 2 == 0 ? Range{0, 0, cut, slice} : Range{0, cut, n - cut, slice}};
}
std::string save_large(const std::string& dir) {
  std::string step;
  run_threads(6, {}, [&](Communicator& comm) {
    RankState state(DType::F32, large_ranges(comm.rank()), true, kLarge);
    const std::string path = save_checkpoint(dir, sample_meta(1, DType::F32), kLarge, state.fill().pieces(), comm);
    if (comm.rank() == 0) step = path;
  });
  return step;
}

TEST(SlicedCheckpoint, SlicesLargerThanAChecksumBlock) {
  const TempDirectory dir;
  const std::string step = save_large(dir.path());
  const i64 n = 2000 * 1563;
  const std::vector<Range> wanted[] = {
      {{0, 0, n, {}}},
      {{0, 5, 3, {}}, {0, 1499, 4, {}}, {0, 1563 * 1000 - 2, 1563 * 700, {}}, {0, n - 1, 1, {}}},
      {{0, 0, 2000 * 64, {1, {{480, 512}, {1290, 1322}}}}},
      {{0, 77777, 2000 * 781 - 77777, {1, {{0, 781}}}}, {0, 0, 782 * 2000, {1, {{781, 1563}}}}},
      {{0, 1562, 1563 * 900, {0, {{10, 500}, {700, 1700}}}}},
      large_ranges(0),
      large_ranges(3)};
  for (const auto& ranges : wanted) {
    run_threads(2, {}, [&](Communicator& comm) {
      RankState state(DType::F32, ranges, true, kLarge);
      load_checkpoint(step, DType::F32, kLarge, state.pieces(), comm);
      state.expect_filled();
      RankState half(DType::BF16, ranges, false, kLarge);
      load_checkpoint(step, DType::BF16, kLarge, half.pieces(), comm);
      half.expect_filled();
    });
  }
}

// Bytes that this process has asked the system for.
i64 bytes_read() {
  std::ifstream io("/proc/self/io");
  i64 bytes = -1;
  for (std::string word; io >> word;) {
    if (word == "rchar:") io >> bytes;
  }
  return bytes;
}

TEST(SlicedCheckpoint, WhoReadsInOrderReadsEachByteOnce) {
  if (bytes_read() < 0) GTEST_SKIP() << "no /proc/self/io";
  const TempDirectory dir;
  const std::string step = save_large(dir.path());
  const i64 n = 2000 * 1563;
  std::vector<float> out(static_cast<size_t>(n));
  const auto cost = [&](auto&& body) {
    const i64 before = bytes_read();
    body();
    return static_cast<double>(bytes_read() - before) / static_cast<double>(4 * n);
  };
  for (const i64 chunk : {n, i64{100000}, i64{7777}}) {
    CheckpointReader reader(step);
    EXPECT_LT(cost([&] {
                for (i64 at = 0; at < n; at += chunk)
                  reader.read(State::ExpAvg, DType::F32, 0, at, std::min(chunk, n - at), out.data() + at);
              }),
              1.02)
        << chunk;
    for (i64 i = 0; i < n; ++i) ASSERT_EQ(out[i], exp_avg_value(0, i)) << chunk;
  }
  // Another slice of a dim, and the same slice: that alone is read.
  CheckpointReader reader(step);
  const ParamSlice own = large_ranges(2)[0].slice;
  EXPECT_LT(cost([&] { reader.read(State::ExpAvg, DType::F32, 0, own, 0, 700 * 2000, out.data()); }), 0.46);
  const ParamSlice within{1, {{600, 700}}};
  EXPECT_LT(cost([&] { reader.read(State::ExpAvg, DType::F32, 0, within, 0, 100 * 2000, out.data()); }), 0.46);
  const ParamSlice rows{0, {{1900, 1901}}};
  EXPECT_LE(cost([&] { reader.read(State::ExpAvg, DType::F32, 0, rows, 0, 1563, out.data()); }), 1.0);
}

// ---- sharding into slices

TEST(SlicedCheckpoint, WriteShardedTakesSlices) {
  const TempDirectory dir;
  const std::string whole = save_sliced(dir / "whole", 3, DType::BF16, {1, 2}, 1);
  merge_checkpoint(whole, dir / "whole.safetensors", {.optimizer = true});
  merge_checkpoint(whole, dir / "whole.h5", {.optimizer = true});
  const std::string sources[] = {dir / "whole", dir / "whole.safetensors", dir / "whole.h5",
                                 save_sliced(dir / "sliced", 3, DType::BF16, {3, 2}, 1)};
  for (const Ranks ranks : {Ranks{2, 2}, Ranks{3, 1}}) {
    const std::string saved = save_sliced(dir / "saved", 3, DType::BF16, ranks, 2);
    for (const std::string& source : sources) {
      const auto state = open_state(source);
      // A file of tensors has its own order of them.
      std::vector<i64> number(sliced_model().size(), -1);
      for (size_t i = 0; i < state->params().size(); ++i) {
        for (size_t p = 0; p < number.size(); ++p)
          if (sliced_model()[p].name == state->params()[i].name) number[p] = static_cast<i64>(i);
      }
      Sharding sharding{.layout_id = "test", .zero_stage = 2, .mesh = {.dp = ranks.size()}, .ranks = {}};
      for (int rank = 0; rank < ranks.size(); ++rank) {
        sharding.ranks.push_back(sliced_ranges(rank, ranks, 2));
        for (PieceRange& p : sharding.ranks.back()) p.param = number[p.param];
      }
      const std::string out = dir / "out";
      fs::remove_all(out);
      Manifest m;
      i64 done = 0, total = -1;
      write_sharded(*state, out, m, sharding, [&](i64 d, i64 t) { done = d, total = t; });
      EXPECT_EQ(done, total);
      EXPECT_EQ(m.meta.layout_id, "test");
      EXPECT_EQ(m.meta.world_size, ranks.size());
      merge_checkpoint(out, dir / "merged.safetensors", {.optimizer = true, .verify = true});
      merge_checkpoint(source, dir / "from.safetensors", {.optimizer = true});
      EXPECT_EQ(read_file(dir / "merged.safetensors"), read_file(dir / "from.safetensors")) << source;
      if (source == sources[0] || source == sources[3]) load_sliced(find_checkpoint(out), DType::BF16, ranks, 0);
    }
  }
}

TEST(SlicedCheckpoint, SlicesOfATensorFileAreReadInTiles) {
  if (bytes_read() < 0) GTEST_SKIP() << "no /proc/self/io";
  const TempDirectory dir;
  const std::string step = save_large(dir.path()), file = dir / "m.safetensors";
  merge_checkpoint(step, file, {});
  const auto state = open_state(file);
  const auto number_of_calls = [] {
    std::ifstream io("/proc/self/io");
    i64 calls = 0;
    for (std::string word; io >> word;) {
      if (word == "syscr:") io >> calls;
    }
    return calls;
  };
  const ParamSlice slices[] = {{1, {{10, 20}, {500, 700}}}, {0, {{0, 1}, {1999, 2000}}}, {0, {{3, 1900}}}};
  for (const ParamSlice& slice : slices) {
    const model::SliceMap map(slice, kLarge[0].shape);
    std::vector<float> out(static_cast<size_t>(map.numel()));
    const i64 before = number_of_calls();
    state->read(State::Param, DType::F32, 0, slice, 1, map.numel() - 1, out.data() + 1);
    EXPECT_LT(number_of_calls() - before, 50);
    for (i64 i = 1; i < map.numel(); ++i) ASSERT_EQ(out[i], master_value(0, map.global_of(i))) << i;
  }
}

}  // namespace checkpoint_slices_test
}  // namespace ds
