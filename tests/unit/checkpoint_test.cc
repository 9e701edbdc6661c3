// SPDX-License-Identifier: Apache-2.0
// Saving and loading at any layout; every kind of damage is refused by name; failures and kills leave what was there.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <mutex>
#include <random>

#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/step_writer.h"
#include "checkpoint_state.h"
#include "ds/log.h"
#include "slow_set.h"
#include "test_data.h"

namespace ds {
namespace checkpoint_test {

namespace fs = std::filesystem;
using namespace testing;

void load_weights_only(const std::string& step_dir, const std::vector<ParamEntry>& params) {
  run_threads(1, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(params, 0, 1, 0), false);
    load_checkpoint(step_dir, DType::BF16, params, state.pieces(), comm);
  });
}

// Flips one bit of a file.
void flip(const std::string& path, size_t at, int bit = 3) {
  std::string bytes = read_file(path);
  bytes.at(at) = static_cast<char>(bytes.at(at) ^ (1 << bit));
  write_file(path, bytes);
}

// Changes the manifest's text and seals it again, as somebody who means it would.
void forge(const std::string& step_dir, const std::function<void(Manifest&)>& change) {
  const std::string path = step_dir + "/manifest.json";
  Manifest m = parse_manifest(read_file(path), path);
  change(m);
  write_file(path, format_manifest(m));
}

std::vector<std::string> entries(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(dir)) names.push_back(e.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

using Names = std::vector<std::string>;

struct Reshape {
  DType dtype;
  int save, load;
};
class CheckpointLayouts : public ::testing::TestWithParam<Reshape> {};

TEST_P(CheckpointLayouts, LoadAtAnotherLayoutBitForBit) {
  const auto [dtype, save, load] = GetParam();
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 7, dtype, save, 1);
  EXPECT_EQ(step, dir / "step-00000007");
  load_sample(step, dtype, load, 2);
  load_sample(step, dtype, load, 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointLayouts,
                         ::testing::Values(Reshape{DType::F32, 1, 1}, Reshape{DType::F32, 2, 3},
                                           Reshape{DType::BF16, 1, 4}, Reshape{DType::BF16, 2, 1},
                                           Reshape{DType::BF16, 3, 2}, Reshape{DType::BF16, 4, 4},
                                           Reshape{DType::F16, 4, 3}, Reshape{DType::F16, 2, 2}),
                         [](const auto& p) {
                           return fmt::format("{}From{}To{}", dtype_name(p.param.dtype), p.param.save, p.param.load);
                         });

TEST(Checkpoint, MoreRanksThanElementsOfSomeParameters) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 1, DType::BF16, 40, 1);
  load_sample(step, DType::BF16, 1);
}

TEST(Checkpoint, LoadsInAnotherPrecision) {
  const TempDirectory dir;
  for (DType saved : {DType::F32, DType::BF16, DType::F16}) {
    const std::string step = save_sample(dir / std::string(dtype_name(saved)), 7, saved, 2);
    for (DType wanted : {DType::F32, DType::BF16, DType::F16}) load_sample(step, wanted, 3, 1);
  }
}

TEST(Checkpoint, DataLargerThanAChecksumBlock) {
  const TempDirectory dir;
  const std::vector<ParamEntry> params = {{"big", {1537, 1031}, ""}};  // 6.3 MB in fp32
  std::string step;
  run_threads(2, {}, [&](Communicator& comm) {
    const i64 cut = 1200000, n = 1537 * 1031;
    RankState state(DType::F32, {comm.rank() == 0 ? Range{0, 0, cut} : Range{0, cut, n - cut}});
    const std::string path =
        save_checkpoint(dir.path(), sample_meta(1, DType::F32), params, state.fill().pieces(), comm);
    if (comm.rank() == 0) step = path;
  });
  run_threads(1, {}, [&](Communicator& comm) {  // inside a block, across two, across the shards
    RankState state(DType::F32, {{0, 5, 3}, {0, 1048570, 20}, {0, 1199999, 2}, {0, 1037, 1500000}});
    load_checkpoint(step, DType::F32, params, state.pieces(), comm);
    state.expect_filled();
  });
}

TEST(Checkpoint, MetaRoundTripsExactly) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 123456789, DType::BF16, 2);
  EXPECT_EQ(step, dir / "step-123456789");
  CheckpointMeta want = sample_meta(123456789, DType::BF16);
  want.world_size = 2;
  EXPECT_EQ(CheckpointReader(step).manifest().meta, want);
  want.numbers = {{"optimizer_numbers", {{"wte.weight", {0.1, 1.0 / 3}}, {"ln_f.weight", {0, 5e-324}}}}};
  EXPECT_EQ(parse_meta(format_meta(want), "text"), want);
  want.numbers.clear();
  run_threads(
      2, {}, [&](Communicator& comm) { EXPECT_EQ(load_checkpoint(step, DType::BF16, small_model(), {}, comm), want); });
}

TEST(Checkpoint, StateThatTheRunDoesNotHave) {
  const TempDirectory dir;
  run_threads(1, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), 0, 1, 0), false);
    const std::string step =
        save_checkpoint(dir.path(), sample_meta(1, DType::BF16), small_model(), state.fill().pieces(), comm);
    for (const bool sq : {false, true}) {
      RankState other(DType::BF16, owned_ranges(small_model(), 0, 1, 1), true);
      for (StatePiece& p : other.pieces()) p.data[sq ? State::ExpAvg : State::ExpAvgSq] = nullptr;
      EXPECT_ERROR(load_checkpoint(step, DType::BF16, small_model(), other.pieces(), comm), Errc::Mismatch,
                   sq ? "contains no exp_avg_sq;" : "contains no exp_avg;");
    }
    load_weights_only(step, small_model());
  });
}

// Before the first update moments are zero, so a step of then needs none.
TEST(Checkpoint, MomentsBeforeTheFirstUpdateAreZero) {
  const TempDirectory dir;
  run_threads(1, {}, [&](Communicator& comm) {
    const std::vector<Range> ranges = owned_ranges(small_model(), 0, 1, 0);
    RankState saved(DType::BF16, ranges, false);
    const std::string step =
        save_checkpoint(dir.path(), sample_meta(0, DType::BF16), small_model(), saved.fill().pieces(), comm);
    RankState state(DType::BF16, ranges), want(DType::BF16, ranges);
    load_checkpoint(step, DType::BF16, small_model(), state.pieces(), comm);
    want.fill();
    for (size_t i = 0; i < ranges.size(); ++i) {
      const StatePiece &got = state.pieces()[i], &filled = want.pieces()[i];
      EXPECT_EQ(std::memcmp(got.data[State::Param], filled.data[State::Param], static_cast<size_t>(got.count) * 2), 0);
      for (i64 e = 0; e < got.count; ++e) {
        EXPECT_EQ(got.values(State::Master)[e], filled.values(State::Master)[e]);
        EXPECT_EQ(got.values(State::ExpAvg)[e], 0);
        EXPECT_EQ(got.values(State::ExpAvgSq)[e], 0);
      }
    }
  });
}

TEST(Checkpoint, PiecesWithoutASliceAreOfWholeParameters) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 1, DType::BF16, 2);
  run_threads(1, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), 0, 1, 1));
    for (StatePiece& p : state.pieces()) p.slice = nullptr;
    load_checkpoint(step, DType::BF16, small_model(), state.pieces(), comm);
    state.expect_filled();
  });
}

TEST(Checkpoint, OneThatTheCallerDoesNotWantFillsNothing) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 7, DType::BF16, 2);
  run_threads(2, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), 2, 1));
    const StatePiece& piece = state.pieces()[0];
    const size_t bytes = static_cast<size_t>(piece.count) * 2;
    const std::string before(static_cast<const char*>(piece.data[State::Param]), bytes);
    const auto refuse = [](const Manifest& there) {
      throw Error(Errc::Mismatch, fmt::format("step {} is of another run", there.meta.step));
    };
    EXPECT_ERROR(load_checkpoint(step, DType::BF16, small_model(), state.pieces(), comm, {}, refuse), Errc::Mismatch,
                 "step 7 is of another run");
    EXPECT_EQ(std::memcmp(piece.data[State::Param], before.data(), bytes), 0);
  });
}

// Everything but the bulk is looked at: names and shapes, and the structure of every file.
TEST(Checkpoint, IsCheckedBeforeItIsLoaded) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 1, DType::BF16, 2);
  EXPECT_EQ(check_checkpoint(step, small_model()), CheckpointReader(step).manifest().meta);
  std::vector<ParamEntry> other = small_model();
  other[2].shape = {6, 7};
  EXPECT_ERROR(check_checkpoint(step, other), Errc::Mismatch, "[3, 2, 7] there and [6, 7] here");
  std::vector<ParamOptimizer> optimizers(other.size());
  optimizers[0] = {"AdamW", state_set({State::ExpAvg, State::ExpAvgSq}), true, 0};
  check_checkpoint(step, small_model(), optimizers);
  optimizers[0].numbers = 2;
  EXPECT_ERROR(check_checkpoint(step, small_model(), optimizers), Errc::Mismatch,
               "holds 0 optimizer_numbers of 'wte.weight', and AdamW has 2");
  for (const char* name : {"/rank-00000.h5", "/rank-00001.h5"}) {
    const std::string whole = read_file(step + name);
    write_file(step + name, std::string(whole.size(), 'x'));
    EXPECT_ERROR(check_checkpoint(step, small_model()), Errc::Corrupt, name + 1);
    write_file(step + name, whole);
  }
}

TEST(Checkpoint, TheViewShowsEveryParameterWhole) {
  if (std::system("/usr/bin/python3 -c 'import h5py' 2>/dev/null") != 0) GTEST_SKIP() << "h5py is not installed";
  const TempDirectory dir;
  for (DType dtype : {DType::F32, DType::BF16, DType::F16}) {
    const std::string step = save_sample(dir / std::string(dtype_name(dtype)), 1, dtype, 3, 2);
    write_file(dir / "view.py", R"(
import h5py, numpy as np, sys
shapes = {'wte.weight': (13, 6), 'h.0.ln.bias': (5,), 'h.0.mlp.weight': (3, 2, 7), 'h.1.ln.bias': (1,),
          'lm_head.weight': (13, 6), 'ln_f.weight': (29,)}
f = h5py.File(sys.argv[1])
assert sorted(f) == sorted(shapes), list(f)
for p, (name, shape) in enumerate(shapes.items()):
    i = np.arange(np.prod(shape))
    want = ((i * 7 + (0 if p == 4 else p) * 31) % 255 - 127) / 16
    if sys.argv[2] == 'fp32': want = want * (1 + 2.0**-13)
    assert f[name].shape == shape and np.array_equal(f[name][...], want.reshape(shape).astype('f4')), name
)");
    // From another directory: the shards are found beside the view.
    EXPECT_EQ(
        std::system(fmt::format("cd / && /usr/bin/python3 {} {}/model.h5 {}", dir / "view.py", step, dtype_name(dtype))
                        .c_str()),
        0);
    if (std::system("command -v h5dump > /dev/null") == 0) {
      const std::string command = fmt::format("cd / && h5dump -d /h.1.ln.bias {}/model.h5 > {}", step, dir / "dump");
      EXPECT_EQ(std::system(command.c_str()), 0);
      EXPECT_NE(read_file(dir / "dump").find("(0): -2.12"), std::string::npos) << read_file(dir / "dump");
    }
  }
}

TEST(Checkpoint, PiecesThatDoNotCoverAreRefused) {
  const TempDirectory dir;
  const auto refused = [&](std::vector<Range> ranges, const char* reason) {
    run_threads(1, {}, [&](Communicator& comm) {
      const std::vector<ParamEntry> params = {{"a", {4}, ""}, {"b", {2}, ""}, {"t", {2}, "b"}};
      RankState state(DType::F32, ranges);
      EXPECT_ERROR(save_checkpoint(dir.path(), sample_meta(1, DType::F32), params, state.fill().pieces(), comm),
                   Errc::Internal, reason);
    });
    EXPECT_TRUE(fs::is_empty(dir.path()));
  };
  refused({{0, 0, 4}}, "elements 0 to 2 of 'b' are held by no rank");
  refused({{0, 0, 3}, {1, 0, 2}}, "elements 3 to 4 of 'a' are held by no rank");
  refused({{0, 1, 3}, {1, 0, 2}}, "elements 0 to 1 of 'a' are held by no rank");
  refused({{0, 0, 3}, {0, 2, 2}, {1, 0, 2}}, "elements 2 to 3 of 'a' are held twice");
  refused({{0, 0, 4}, {0, 0, 4}, {1, 0, 2}}, "held twice");
  refused({{0, 0, 5}, {1, 0, 2}}, "which has 4");
  refused({{0, 0, 4}, {1, 0, 2}, {2, 0, 2}}, "which is tied");
  refused({{0, 0, 4}, {1, 0, 2}, {3, 0, 2}}, "parameter 3 of 3");
}

TEST(Checkpoint, ImpossibleParametersAreRefused) {
  const TempDirectory dir;
  const auto refused = [&](const std::vector<ParamEntry>& params, const char* reason) {
    run_threads(1, {}, [&](Communicator& comm) {
      EXPECT_ERROR(save_checkpoint(dir.path(), sample_meta(1, DType::F32), params, {}, comm), Errc::Internal, reason);
    });
  };
  for (const char* name : {"/a", "a/", "a//b", "a/../b", ".", "a\nb"}) {
    refused({{name, {0}, ""}}, "cannot be a parameter's name");
  }
  refused({{"", {0}, ""}}, "cannot be a parameter's name");
  refused({{"a", {0}, ""}, {"a", {0}, ""}}, "appears twice");
  refused({{"a", {-1}, ""}}, "impossible shape");
  refused({{"a", {0}, ""}, {"b", {1}, "a"}}, "is tied to 'a', which is not");
  refused({{"b", {1}, "c"}}, "is tied to 'c', which is not");
}

TEST(Checkpoint, ParametersWithoutElements) {
  const TempDirectory dir;
  run_threads(2, {}, [&](Communicator& comm) {
    const std::vector<ParamEntry> params = {{"none", {0, 4}, ""}, {"one", {1}, ""}};
    RankState state(DType::BF16, comm.rank() == 0 ? std::vector<Range>{{0, 0, 0}} : std::vector<Range>{{1, 0, 1}});
    const std::string step =
        save_checkpoint(dir.path(), sample_meta(1, DType::BF16), params, state.fill().pieces(), comm);
    RankState back(DType::BF16, {{1, 0, 1}, {0, 0, 0}});
    load_checkpoint(step, DType::BF16, params, back.pieces(), comm);
    back.expect_filled();
  });
}

// ---- another model

TEST(Checkpoint, AnotherModelIsRefused) {
  const TempDirectory dir;
  const std::string step = save_sample(dir.path(), 1, DType::BF16, 2);
  const auto refused = [&](const std::function<void(std::vector<ParamEntry>&)>& change, const char* reason) {
    std::vector<ParamEntry> params = small_model();
    change(params);
    EXPECT_ERROR(load_weights_only(step, params), Errc::Mismatch, reason);
  };
  refused([](auto& p) { p[1].name = "h.0.ln.gain"; }, "it does not contain 'h.0.ln.gain' (and 1 more differences)");
  refused([](auto& p) { p[0].shape = {13, 7}, p.pop_back(); }, "'wte.weight' has shape [13, 6] there and [13, 7] here");
  refused([](auto& p) { p[2].shape = {6, 7}; }, "[3, 2, 7] there and [6, 7] here");
  refused([](auto& p) { p.pop_back(); }, "it contains 'ln_f.weight', which this model does not have");
  refused([](auto& p) { p[4].tied_to = ""; }, "'lm_head.weight' is tied to 'wte.weight' there and untied here");
  refused([](auto& p) { p[4].tied_to = "ln_f.weight"; },
          "'lm_head.weight' is tied to 'wte.weight' there and tied to 'ln_f.weight' here");
  refused([](auto& p) { p[3].tied_to = "h.0.ln.bias"; },
          "'h.1.ln.bias' is untied there and tied to 'h.0.ln.bias' here");
  std::vector<ParamEntry> shuffled = small_model();
  std::swap(shuffled[0], shuffled[5]);
  EXPECT_NO_THROW(load_weights_only(step, shuffled));
}

// ---- damage

class DamagedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { step = save_sample(dir.path(), 1, DType::BF16, 2, 1); }
  void refused(const char* part, Errc code = Errc::Corrupt) {
    EXPECT_ERROR(load_sample(step, DType::BF16, 2), code, part);
  }
  TempDirectory dir;
  std::string step;
};

TEST_F(DamagedCheckpoint, EveryFlippedBitIsFound) {
  // The rank files are small here, so whole structure and data are walked; loading reads all of both.
  for (const std::string name : {"rank-00000.h5", "rank-00001.h5", "manifest.json"}) {
    const std::string path = step + "/" + name, good = read_file(path);
    const size_t stride = good.size() / (test::in_slow_set() ? 150 : 50) + 1;
    for (size_t i = 0; i < good.size(); i += stride) {
      flip(path, i, static_cast<int>(i % 8));
      EXPECT_ERROR(load_sample(step, DType::BF16, 1), Errc::Corrupt, name);
      write_file(path, good);
    }
  }
  load_sample(step, DType::BF16, 1);
  const std::string view = step + "/model.h5", good = read_file(view);
  for (size_t i = 0; i < good.size(); i += good.size() / 50) {
    flip(view, i);
    const std::vector<std::string> bad = CheckpointReader(step).verify({});
    ASSERT_EQ(bad.size(), 1u);
    EXPECT_NE(bad[0].find("model.h5"), std::string::npos);
    write_file(view, good);
  }
  EXPECT_TRUE(CheckpointReader(step).verify({}).empty());
}

TEST_F(DamagedCheckpoint, VerifyListsEveryBadFile) {
  flip(step + "/rank-00000.h5", 10);
  flip(step + "/rank-00001.h5", fs::file_size(step + "/rank-00001.h5") / 2);
  const std::vector<std::string> bad = CheckpointReader(step).verify({});
  ASSERT_EQ(bad.size(), 2u);
  EXPECT_NE(bad[0].find("rank-00000.h5"), std::string::npos);
  EXPECT_NE(bad[1].find("rank-00001.h5"), std::string::npos);
}

// A refusal of the system, or a run that removes the step meanwhile, is no evidence about the files.
TEST_F(DamagedCheckpoint, WhatCannotBeReadIsNoDamage) {
  CheckpointReader reader(step);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_ERROR(reader.verify({}), Errc::Io, "Too many open files");
  ::setrlimit(RLIMIT_NOFILE, &before);
  fs::remove(step + "/model.h5");
  EXPECT_THAT(reader.verify({}), ::testing::ElementsAre(::testing::HasSubstr("model.h5: is missing")));
  fs::remove_all(step);
  EXPECT_ERROR(reader.reopen(), Errc::Io, "has been removed while it was read");
}

TEST_F(DamagedCheckpoint, MissingTruncatedAndSwappedShards) {
  const std::string a = step + "/rank-00000.h5", b = step + "/rank-00001.h5";
  const std::string good_a = read_file(a), good_b = read_file(b);
  fs::remove(b);
  refused("rank-00001.h5: shard of rank 1 is missing");
  write_file(b, good_b.substr(0, good_b.size() - 1));
  refused("rank-00001.h5: ");
  write_file(b, good_b + "x");
  refused("the manifest says");
  write_file(b, "");
  refused("rank-00001.h5: 0 bytes");
  write_file(b, good_a);  // of another rank
  refused("rank-00001.h5");
  write_file(a, good_b);
  refused("rank-0000");
}

TEST_F(DamagedCheckpoint, AShardOfAnotherSaveIsRefused) {
  // Same model, same layout, same state, same sizes: only the identity differs.
  const TempDirectory other;
  const std::string twin = save_sample(other.path(), 1, DType::BF16, 2, 1);
  ASSERT_EQ(fs::file_size(twin + "/rank-00001.h5"), fs::file_size(step + "/rank-00001.h5"));
  fs::copy_file(twin + "/rank-00001.h5", step + "/rank-00001.h5", fs::copy_options::overwrite_existing);
  refused("rank-00001.h5: damaged, or a shard of another rank or save");
}

TEST_F(DamagedCheckpoint, BadManifests) {
  const std::string path = step + "/manifest.json", good = read_file(path);
  const auto with = [&](const std::string& text, const char* part) {
    write_file(path, text);
    refused(part);
  };
  with("", "too few");
  with("garbage", "too few");
  with(std::string(100, 'x'), "does not end like a manifest");
  with(good.substr(0, good.size() - 1), "truncated?");
  with(good.substr(0, good.size() / 2), "truncated?");
  with(good + "\n", "truncated?");
  std::string edited = good;
  edited.replace(edited.find("\"step\": 1"), 9, "\"step\": 2");
  with(edited, "damaged or was edited");
  fs::remove(path);
  refused("is missing, or not a file");
  fs::create_directory(path);
  refused("is missing, or not a file");
}

TEST_F(DamagedCheckpoint, ForgedManifestsAreStillChecked) {
  const std::string path = step + "/manifest.json", good = read_file(path);
  const auto forged = [&](const std::function<void(Manifest&)>& change, const char* part) {
    write_file(path, good);
    forge(step, change);
    refused(part);
  };
  forged([](Manifest& m) { m.meta.world_size = 3; }, "world size 3, 2 files");
  forged(
      [](Manifest& m) {
        m.meta.numbers["optimizer_numbers"]["wte.weight"] = {0.5, -1};
      },
      "optimizer_numbers of 'wte.weight'");
  forged([](Manifest& m) { m.files.pop_back(), m.meta.world_size = 1; }, "held by no rank");
  forged([](Manifest& m) { m.params[0].shape = {i64{1} << 40, i64{1} << 40}; }, "impossible shape of 'wte.weight'");
  forged([](Manifest& m) { m.params[5].shape = {30}; }, "elements 29 to 30 of 'ln_f.weight' are held by no rank");
  forged([](Manifest& m) { m.params[4].tied_to = "nothing"; }, "tied to 'nothing'");
  forged([](Manifest& m) { m.params[1].name = "../../x"; }, "cannot be a parameter's name");
  forged([](Manifest& m) { m.files[1].pieces[0].param = 99; }, "a piece of parameter 99 of 6");
  forged([](Manifest& m) { m.files[1].pieces[0].begin = -1; }, "holds elements -1");
  forged([](Manifest& m) { m.files[1].pieces[0].count = std::numeric_limits<i64>::max(); }, "holds elements");
  forged([](Manifest& m) { m.files[0].pieces.push_back(m.files[0].pieces[0]); }, "held twice");
  forged([](Manifest& m) { m.files[0].pieces[0].states[State::Param]->offset = i64{1} << 62; },
         "lies outside rank-00000.h5");
  forged([](Manifest& m) { m.files[0].pieces[0].states[State::Param]->offset = -8; }, "lies outside rank-00000.h5");
  forged([](Manifest& m) { m.files[0].pieces[0].states[State::Master]->checksums.clear(); }, "0 checksums");
  forged([](Manifest& m) { m.files[0].pieces[0].states[State::ExpAvg].reset(); }, "exp_avg");
  forged([](Manifest& m) { m.files[1].pieces[0].states[State::Param]->offset += 2; }, "rank-00001.h5");
}

// A manifest whose text is rewritten by hand, with a right checksum.
TEST(CheckpointManifest, ForeignTextIsRefused) {
  const TempDirectory dir;
  const std::string good = read_file(save_sample(dir.path(), 1, DType::BF16, 1) + "/manifest.json");
  const auto sealed = [](std::string body) {
    const std::string sum = fmt::format("{:016x}", checksum(body.data(), static_cast<i64>(body.size())));
    return body + ",\n\"checksum\": \"" + sum + "\"\n}\n";
  };
  const std::string body = good.substr(0, good.rfind(",\n\"checksum\""));
  ASSERT_EQ(sealed(body), good);
  const auto refused = [&](const std::string& from, const std::string& to, Errc code, const char* part) {
    std::string text = body;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    EXPECT_ERROR(parse_manifest(sealed(text), "m"), code, part);
  };
  refused("\"version\": 1", "\"version\": 5", Errc::Unavailable, "format version 5; this libds reads versions 1 to 4");
  refused("\"version\": 1", "\"version\": 2", Errc::Corrupt, "format version 2, but its contents are of version 1");
  refused("libds-checkpoint", "other", Errc::Corrupt, "not a checkpoint's manifest");
  for (const char* bad : {"-1", "9223372036854775807"}) {
    for (const char* key : {"step", "consumed_samples", "optimizer_step", "skipped_steps"}) {
      const std::string from = fmt::format("\"{}\": ", key);
      const size_t at = body.find(from) + from.size();
      refused(from + body.substr(at, body.find(',', at) - at), from + bad, Errc::Corrupt,
              fmt::format("{}: {} is not a count", key, bad).c_str());
    }
  }
  refused("\"step\": 1", "\"step\": \"1\"", Errc::Corrupt, "not a whole number");
  refused("\"step\": 1", "\"step\": 1e300", Errc::Corrupt, "not a whole number");
  refused("\"seed\": 4", "\"seed\": 44", Errc::Corrupt, "does not fit");
  refused("\"bf16\"", "\"fp8\"", Errc::Corrupt, "'fp8' is not a work dtype");
  refused("rank-00000.h5", "../rank-00000.h5", Errc::Corrupt, "unexpected file name");
  refused("\"seed\": 4000000000,", "", Errc::Corrupt, "not a manifest");
  refused("\"file\":0", "\"file\":7", Errc::Corrupt, "a piece in file 7 of 1");
  refused("\"xxh3\":[\"", "\"xxh3\":[\"z", Errc::Corrupt, "is not a checksum");
  refused("\"isa\": \"avx2\"", "\"isa\": " + std::string(100000, '['), Errc::Corrupt, "nested deeper than 64 levels");
  EXPECT_ERROR(parse_manifest(sealed("[1"), "m"), Errc::Corrupt, "m:2:11: unexpected ':'");
}

// ---- the format stays readable

// Version 1 as it was first written, by save_sample(kGolden, 3, DType::BF16, 2, 2).
const std::string kGolden = test_data("checkpoint-v1");

TEST(GoldenCheckpoint, VersionOneLoads) {
  const std::string step = find_checkpoint(kGolden);
  EXPECT_TRUE(CheckpointReader(step).verify({}).empty());
  for (DType dtype : {DType::F32, DType::BF16}) load_sample(step, dtype, 3, 1);
  CheckpointMeta want = sample_meta(3, DType::BF16);
  want.world_size = 2;
  EXPECT_EQ(CheckpointReader(step).manifest().meta, want);
}

// Version 2, in which pieces are of slices, as it was first written, by save_sliced(..., 3, DType::BF16, {2, 2}, 0).
TEST(GoldenCheckpoint, VersionTwoLoads) {
  const std::string step = find_checkpoint(test_data("checkpoint-v2"));
  EXPECT_TRUE(CheckpointReader(step).verify({}).empty());
  for (DType dtype : {DType::F32, DType::BF16}) load_sliced(step, dtype, {3, 1}, 1);
}

// ---- finding

TEST(FindCheckpoint, LatestStepNamesAndPaths) {
  const TempDirectory dir;
  save_sample(dir.path(), 5, DType::F32, 1);
  const std::string newest = save_sample(dir.path(), 10, DType::F32, 2);
  EXPECT_EQ(read_file(dir / "latest"), "step-00000010\n");
  EXPECT_EQ(find_checkpoint(dir.path()), newest);
  EXPECT_EQ(find_checkpoint(dir.path(), "step-00000005"), dir / "step-00000005");
  EXPECT_EQ(find_checkpoint("/nowhere", newest), newest);
  EXPECT_EQ(find_checkpoint("/nowhere", dir.path()), newest);
  EXPECT_EQ(find_checkpoint(newest), newest);
  fs::rename(dir / "step-00000005", dir / "kept");  // a path from the current directory, and no step's name
  EXPECT_ERROR(find_checkpoint(dir.path(), "kept"), Errc::Io, "kept: no such checkpoint");
}

// Warnings printed while `body` runs, one a line.
template <class F>
std::string warnings_of(F&& body) {
  std::string said;
  set_log_sink([&](LogLevel level, std::string_view message) {
    if (level == LogLevel::Warning) said += std::string(message) + "\n";
  });
  body();
  set_log_sink(nullptr);
  return said;
}

TEST(FindCheckpoint, TakesTheNewestCompleteStepWhereLatestIsDamaged) {
  const TempDirectory dir;
  const std::string other = save_sample(dir / "other", 7, DType::F32, 1);
  save_sample(dir.path(), 4, DType::F32, 1);
  save_sample(dir.path(), 5, DType::F32, 1);
  fs::create_directory(dir / "step-00000099");  // not complete
  const auto refused = [&](const std::string& text, const char* part) {
    write_file(dir / "latest", text);
    const std::string said =
        warnings_of([&] { EXPECT_EQ(find_checkpoint(dir.path()), dir / "step-00000005") << text; });
    EXPECT_NE(said.find(part), std::string::npos) << said;
    EXPECT_NE(said.find("using the newest complete step, " + dir / "step-00000005"), std::string::npos) << said;
    EXPECT_NE(said.find("skipping " + dir / "step-00000099: "), std::string::npos) << said;
  };
  refused("", "names ''");
  refused("\n", "names ''");
  refused("step-00000005\n\n", "is not a step");
  refused("garbage", "names 'garbage', which is not a step");
  refused("../x", "names '../x', which is not a step");
  refused("/etc", "is not a step");
  refused("step-00000005/../../x", "is not a step");
  refused("step-5", "is not a step");
  refused("step-00000007", "does not exist or is not complete");
  refused("step-00000099", "does not exist or is not complete");
  refused("other/step-00000007", "is not a step");
  refused(other, "is not a step");
  refused(std::string(5000, 'x'), "5000 bytes");
  fs::remove(dir / "latest");
  fs::create_directory(dir / "latest");
  EXPECT_NE(warnings_of([&] { find_checkpoint(dir.path()); }).find("not a regular file; using"), std::string::npos);
  fs::remove(dir / "latest");

  write_file(dir / "latest", "garbage");
  for (const char* step : {"step-00000004", "step-00000005"}) fs::remove(dir / step + "/rank-00000.h5");
  EXPECT_ERROR(find_checkpoint(dir.path()), Errc::Corrupt,
               "names 'garbage', which is not a step; there is no other complete step");
}

// find_checkpoint takes the step that `latest` names, even if its data is damaged: the reader detects and reports that.
TEST(FindCheckpoint, TakesNoOtherStepInPlaceOfDamagedData) {
  const TempDirectory dir;
  save_sample(dir.path(), 5, DType::F32, 1);
  const std::string newest = save_sample(dir.path(), 6, DType::F32, 1);
  write_file(newest + "/manifest.json", "damaged");
  EXPECT_EQ(warnings_of([&] { EXPECT_EQ(find_checkpoint(dir.path()), newest); }), "");
  fs::remove(newest + "/rank-00000.h5");
  EXPECT_EQ(find_checkpoint(dir.path()), newest);
}

TEST(FindCheckpoint, TheStepBeforeIsTheNewestCompleteOne) {
  const TempDirectory dir;
  for (i64 step : {3, 5, 7, 9}) save_sample(dir.path(), step, DType::F32, 1);
  fs::resize_file(dir / "step-00000007/rank-00000.h5", 100);
  const std::string said =
      warnings_of([&] { EXPECT_EQ(step_before(dir.path(), dir / "step-00000009"), dir / "step-00000005"); });
  EXPECT_NE(said.find("skipping " + dir / "step-00000007: "), std::string::npos) << said;
  EXPECT_EQ(step_before(dir.path(), dir / "step-00000005"), dir / "step-00000003");
  EXPECT_EQ(step_before(dir.path(), dir / "step-00000003"), "");
  EXPECT_EQ(step_before(dir.path(), dir.path()), "");
}

TEST(FindCheckpoint, MissingLatestIsAWarning) {
  const TempDirectory dir;
  save_sample(dir.path(), 5, DType::F32, 1);
  save_sample(dir.path(), 6, DType::F32, 1);
  write_file(dir / "step-00000006/manifest.json", "damaged");
  fs::rename(dir / "latest", dir / "no step");
  const std::string said = warnings_of([&] { EXPECT_EQ(find_checkpoint(dir.path()), dir / "step-00000005"); });
  EXPECT_NE(said.find("latest is missing; using the newest complete step"), std::string::npos) << said;
  EXPECT_NE(said.find("skipping " + dir / "step-00000006: "), std::string::npos) << said;
  EXPECT_EQ(std::ranges::count(said, '\n'), 2) << said;  // and of nothing else
}

TEST(FindCheckpoint, NothingThere) {
  const TempDirectory dir;
  EXPECT_ERROR(find_checkpoint(dir.path()), Errc::Io, "no checkpoint in this directory");
  EXPECT_ERROR(find_checkpoint(dir / "absent"), Errc::Io, "no such directory");
  EXPECT_ERROR(find_checkpoint(dir.path(), "step-00000001"), Errc::Io, "no such checkpoint");
  write_file(dir / "file", "");
  EXPECT_ERROR(find_checkpoint(dir / "file"), Errc::Io, "not a directory");
}

// ---- retention and saving again

TEST(SaveCheckpoint, KeepsTheNewest) {
  const TempDirectory dir;
  for (i64 step = 1; step <= 5; ++step) save_sample(dir.path(), step, DType::F32, 1, 0, 3);
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000003", "step-00000004", "step-00000005"}));
  // A run that went back: steps with higher numbers are not its own; they neither count nor go.
  for (i64 step = 1; step <= 2; ++step) save_sample(dir.path(), step, DType::F32, 1, 0, 1);
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000002", "step-00000003", "step-00000004", "step-00000005"}));
  EXPECT_EQ(find_checkpoint(dir.path()), dir / "step-00000002");
}

TEST(SaveCheckpoint, TheSameStepAgainReplacesIt) {
  const TempDirectory dir;
  save_sample(dir.path(), 1, DType::F32, 3);
  save_sample(dir.path(), 1, DType::BF16, 2);
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000001"}));
  EXPECT_EQ(entries(dir / "step-00000001"), (Names{"manifest.json", "model.h5", "rank-00000.h5", "rank-00001.h5"}));
  load_sample(dir / "step-00000001", DType::BF16, 1);
}

TEST(SaveCheckpoint, AnUnfinishedSaveIsClearedByTheNext) {
  const TempDirectory dir;
  fs::create_directory(dir / ".tmp-step-00000001");
  fs::create_directory(dir / ".tmp-step-00000077");
  write_file(dir / ".latest.tmp-0123456789abcdef", "");
  write_file(dir / ".tmp-step-00000001/rank-00009.h5", "left behind");
  const std::string step = save_sample(dir.path(), 1, DType::F32, 1);
  EXPECT_EQ(entries(step), (Names{"manifest.json", "model.h5", "rank-00000.h5"}));
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000001"}));
}

TEST(SaveCheckpoint, ARankThatOutlivesItsRunHasNoPlaceInTheNextOnesSave) {
  const TempDirectory dir;
  Manifest before, now;
  before.meta.step = now.meta.step = 7;
  before.id = "0123456789abcdef", now.id = "fedcba9876543210";
  prepare_step(dir.path(), before);
  prepare_step(dir.path(), now);
  RankContents nothing;
  EXPECT_ERROR(write_rank_file(dir.path(), before, 0, nothing), Errc::Io, "rank-00000.h5");
  abandon_step(dir.path(), before);
  EXPECT_TRUE(fs::is_empty(unfinished_step(dir.path(), now)));
}

TEST(SaveCheckpoint, StepsThatWerePassedOverNeitherCountNorGo) {
  const TempDirectory dir;
  for (const i64 step : {5, 10, 15, 18, 20}) save_sample(dir.path(), step, DType::F32, 1);
  const std::vector<i64> damaged = {18};
  remove_old_steps(dir.path(), 20, 2, damaged);
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000015", "step-00000018", "step-00000020"}));
}

TEST(SaveCheckpoint, OldStepsGoWithoutAWord) {
  const TempDirectory dir;
  for (const i64 step : {5, 10, 15}) save_sample(dir.path(), step, DType::F32, 1);
  write_file(dir / "notes.txt", "");
  EXPECT_EQ(list_steps(dir.path()), (std::vector<i64>{15, 10, 5}));
  fs::create_directories(dir / ".tmp-step-00000005/of an earlier try");
  EXPECT_EQ(warnings_of([&] { remove_old_steps(dir.path(), 15, 1); }), "");
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "notes.txt", "step-00000015"}));
  EXPECT_NE(warnings_of([&] { EXPECT_TRUE(list_steps(dir / "absent").empty()); }).find("cannot list"),
            std::string::npos);
}

// In a directory whose path is so long that the name that a step takes on its way out does not fit.
TEST(SaveCheckpoint, AStepThatCannotBeRemovedIsAWarning) {
  const TempDirectory dir;
  std::string deep = dir.path();
  while (deep.size() < 4080) deep += "/" + std::string(std::min<size_t>(200, 4079 - deep.size()), 'd');
  fs::create_directories(deep + "/step-00000005");
  fs::create_directories(deep + "/step-00000009");
  const std::string said = warnings_of([&] { remove_old_steps(deep, 9, 1); });
  EXPECT_NE(said.find("cannot remove the old checkpoint " + deep + "/step-00000005: "), std::string::npos) << said;
  EXPECT_EQ(entries(deep), (Names{"step-00000005", "step-00000009"}));
}

TEST(SaveCheckpoint, ALatestThatCannotBeReplacedLeavesNoStep) {
  const TempDirectory dir;
  fs::create_directory(dir / "latest");
  EXPECT_ERROR(save_sample(dir.path(), 1, DType::F32, 2), Errc::Io, "latest");
  EXPECT_EQ(entries(dir.path()), (Names{"latest"}));
  fs::remove(dir / "latest");
  save_sample(dir.path(), 1, DType::F32, 2, 1);
  fs::remove(dir / "latest");
  fs::create_directory(dir / "latest");
  EXPECT_ERROR(save_sample(dir.path(), 1, DType::BF16, 2, 2), Errc::Io, "latest");  // the old directory stays
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000001"}));
  load_sample(dir / "step-00000001", DType::F32, 1, 1);
}

// ---- failing saves

// Every failed save must leave the earlier step, `latest` and nothing else.
void expect_untouched(const TempDirectory& dir) {
  EXPECT_EQ(entries(dir.path()), (Names{"latest", "step-00000001"}));
  EXPECT_EQ(find_checkpoint(dir.path()), dir / "step-00000001");
  load_sample(dir / "step-00000001", DType::BF16, 2, 1);
}

// Runs body in a child process and returns its exit status; gtest failures in it count.
int in_child(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    try {
      body();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "child: %s\n", e.what());
      ::_exit(99);
    }
    ::_exit(::testing::Test::HasFailure() ? 98 : 0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

TEST(SaveCheckpoint, AFullDiskLeavesWhatWasThere) {
  const TempDirectory dir;
  save_sample(dir.path(), 1, DType::BF16, 2);
  // A limit on the size of files acts as a full disk: every file of the save fails at some limit.
  for (rlim_t limit : {0, 100, 1000, 3000, 5000, 8000}) {
    EXPECT_EQ(in_child([&] {
                std::signal(SIGXFSZ, SIG_IGN);
                const rlimit r{limit, limit};
                ::setrlimit(RLIMIT_FSIZE, &r);
                EXPECT_ERROR(save_sample(dir.path(), 2, DType::BF16, 2), Errc::Io, "File too large");
              }),
              0)
        << limit;
    expect_untouched(dir);
  }
}

TEST(SaveCheckpoint, AnyRanksFailureIsEveryRanksError) {
  const TempDirectory dir;
  save_sample(dir.path(), 1, DType::BF16, 2);
  std::mutex mutex;
  Names errors;
  // Rank 2 cannot write its file: its pieces name a parameter that does not exist.
  run_threads(3, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), 3, 0));
    state.fill();
    if (comm.rank() == 2) state.pieces()[0].param = 100;
    try {
      save_checkpoint(dir.path(), sample_meta(2, DType::BF16), small_model(), state.pieces(), comm);
      ADD_FAILURE() << "rank " << comm.rank() << " did not notice";
    } catch (const Error& e) {
      EXPECT_EQ(e.rank(), 2);
      const std::lock_guard lock(mutex);
      errors.emplace_back(e.what());
    }
  });
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[1], errors[2]);
  EXPECT_TRUE(errors[0].starts_with("rank 2: ")) << errors[0];
  expect_untouched(dir);
}

TEST(SaveCheckpoint, PlacesThatCannotBeWritten) {
  const TempDirectory dir;
  write_file(dir / "file", "");
  EXPECT_ERROR(save_sample(dir / "file", 1, DType::F32, 2), Errc::Io, "file");
  EXPECT_ERROR(save_sample(dir / "file/below", 1, DType::F32, 2), Errc::Io, "Not a directory");
  // A directory in the way of rank 1's file: an error of one rank only that no permission hides from root.
  EXPECT_ERROR(save_sample("/proc/checkpoints", 1, DType::F32, 2), Errc::Io, "/proc/checkpoints");
  if (::geteuid() != 0) {
    fs::permissions(dir.path(), fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_ERROR(save_sample(dir.path(), 1, DType::F32, 2), Errc::Io, "Permission denied");
    fs::permissions(dir.path(), fs::perms::owner_all);
  }
}

TEST(SaveCheckpoint, AKillAtAnyMomentLeavesALoadableLatest) {
  const TempDirectory dir;
  save_sample(dir.path(), 1, DType::BF16, 2, 1);
  // The limit of a round's wait follows the disk: it grows after a round in which no save completed and shrinks after
  // one in which some did, so that kills meet saves at every point however long the disk takes.
  std::mt19937 rng(7);
  u64 limit_us = 10'000;
  i64 newest = 1, interrupted = 0, completed = 0;
  for (int round = 0; round < 40 || interrupted < 20 || completed < 10; ++round) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        for (i64 step = newest + 1;; ++step) save_sample(dir.path(), step, DType::BF16, 2, 1, 2);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "child: %s\n", e.what());
        ::_exit(99);
      }
    }
    ::usleep(static_cast<useconds_t>(rng() % limit_us));
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "round " << round << ", status " << status;
    const std::string step = find_checkpoint(dir.path());
    load_sample(step, DType::BF16, 3, 2);
    const i64 found = *parse_step_name(fs::path(step).filename().string());
    ASSERT_GE(found, newest) << "round " << round;
    (found == newest ? interrupted : completed) += 1;
    limit_us = found == newest ? limit_us + limit_us / 4 : limit_us - limit_us / 4;
    newest = found;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
  }
  save_sample(dir.path(), newest + 1, DType::BF16, 2, 1, 1);
  EXPECT_EQ(entries(dir.path()), (Names{"latest", step_name(newest + 1)}));
}

}  // namespace checkpoint_test
}  // namespace ds
