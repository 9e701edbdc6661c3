// SPDX-License-Identifier: Apache-2.0
// A server that ends in the midst of a step: whatever it has done of it, the next one makes the step whole, or, where
// it was not decided, forgets it.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>

#include "probe/host.h"
#include "serve/passes.h"
#include "serve/stored.h"
#include "temp_directory.h"

namespace ds::serve {
namespace serve_test {

using offload::ServedPart;
using offload::ServedPiece;
using offload::ServedRun;
using offload::ServedSet;

constexpr i64 kPage = 4096, kElems = 64, kChunks = 5, kParts = 2;  // elements of a part; parts of a chunk

// A rank of a parameter for each part, under Adam's states, with gradients; and a server's directory, on a disk or not.
class Serve : public ::testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  Serve() : device_(make_cpu_device(probe::cpu_backend(), 1)) {
    options_.name = "test";
    if (std::get<0>(GetParam())) options_.path = disk_.path();
    options_.checksums = std::get<1>(GetParam());
    ServedSet set{.elems = kElems, .chunk_bytes = std::vector<i64>(kChunks, kPage)};
    i64 at = 0;
    for (const State s : kStates) {
      set.places[s] = has(s) ? at : -1;
      at += has(s) ? kElems * 4 : 0;
    }
    for (i64 i = 0; i < kChunks * kParts; ++i) {
      ServedPart p{.param = i, .count = kElems, .chunk = i / kParts};
      p.work = at;
      p.gradient = i * kElems * 4;
      at += kElems * 4;
      i64 in_chunk = i % kParts * 3 * kElems * 4;
      for (const State s : kStates) {
        p.dtypes[s] = has(s) ? static_cast<i64>(DType::F32) : -1;
        if (!has(s)) continue;
        p.offsets[s] = in_chunk;
        in_chunk += kElems * 4;
      }
      set.parts.push_back(p);
      pieces_.push_back({.param = i, .count = kElems, .index = i, .weight_decay = i % 2 == 0 ? 0.1f : 0.0f});
    }
    set.window = directory_ / "mail.window";
    set.window_bytes = at;
    set.gradients = directory_ / "mail.gradients";
    set.gradient_bytes = kChunks * kParts * kElems * 4;
    window_ = offload::Segment::create(set.window, set.window_bytes);
    gradients_ = offload::Segment::create(set.gradients, set.gradient_bytes);
    auto* const g = reinterpret_cast<float*>(gradients_.data());
    for (i64 i = 0; i < kChunks * kParts * kElems; ++i) g[i] = static_cast<float>(i % 37 - 18) * 0.01f;
    ranks_ = {{.identity = "one", .sets = {set}}};
  }
  static bool has(State s) { return s == State::Master || s == State::ExpAvg || s == State::ExpAvgSq; }

  // With masters that count, and moments that are zero.
  std::unique_ptr<Generation> fresh(bool two_versions) {
    auto g = std::make_unique<Generation>(directory_.path(), ranks_, two_versions, 0, options_);
    Passes passes(*g, ranks_, *device_);
    auto* const place = reinterpret_cast<float*>(window_.data());
    for (i64 i = 0; i < kChunks * kParts; ++i) {
      for (i64 k = 0; k < kElems; ++k) place[k] = static_cast<float>(i * kElems + k);
      passes.write(0, {0, i, 0, kElems, state_set({State::Master})});
    }
    g->flush();
    g->header().record.step = 7;
    return g;
  }
  ServedRun run(i64 tile) const {
    ServedRun r{.tile = tile};
    r.params.lr = 0.01f;
    r.verdict.grad_scale = 0.5f;
    return r;
  }
  std::vector<ServedPiece> first(i64 chunks) const { return {pieces_.begin(), pieces_.begin() + chunks * kParts}; }
  std::vector<float> states(Generation& g) {
    Passes passes(g, ranks_, *device_);
    std::vector<float> all;
    for (i64 i = 0; i < kChunks * kParts; ++i) {
      passes.read(0, {0, i, 0, kElems, state_set({State::Master, State::ExpAvg, State::ExpAvgSq})});
      const auto* const place = reinterpret_cast<const float*>(window_.data());
      all.insert(all.end(), place, place + 3 * kElems);
    }
    return all;
  }
  static offload::ServedRecord eighth() { return {.step = 8, .optimizer_step = 8, .consumed_samples = 80}; }
  // As it is after a process has ended: nothing that it had in memory.
  std::unique_ptr<Generation> reopened(std::unique_ptr<Generation> g) {
    const std::string id = g->id();
    g.reset();
    return std::make_unique<Generation>(directory_.path(), id, options_);
  }

  const testing::TempDirectory directory_, disk_;
  std::unique_ptr<Device> device_;
  Generation::Options options_;
  std::vector<RankLayout> ranks_;
  std::vector<ServedPiece> pieces_;
  offload::Segment window_, gradients_;
};

TEST_P(Serve, AStepThatIsDecidedIsDoneWhateverWasDoneOfIt) {
  const std::unique_ptr<Generation> whole = fresh(false);
  {
    Passes passes(*whole, ranks_, *device_);
    whole->slots().begin_version(8, true);
    const Passes::Run all{0, run(passes.define_tile(0, 0, pieces_))};
    passes.execute({&all, 1}, Passes::Params::Write);
  }
  const std::vector<float> want = states(*whole);
  const std::unique_ptr<Generation> untouched = fresh(false);
  EXPECT_NE(want, states(*untouched));
  for (i64 done = 0; done <= kChunks; ++done) {
    std::unique_ptr<Generation> g = fresh(false);
    {
      Passes passes(*g, ranks_, *device_);
      const Passes::Run all{0, run(passes.define_tile(0, 0, pieces_))};
      write_sealed(g->file("pending"), passes.pending_text(eighth(), {&all, 1}));
      g->slots().begin_version(8, true);
      if (done > 0) {
        const Passes::Run some{0, run(passes.define_tile(0, 0, first(done)))};
        passes.execute({&some, 1}, Passes::Params::Write);
        g->flush();
      }
    }
    for (int again = 0; again < 2; ++again) {
      g = reopened(std::move(g));
      recover(*g, *device_);
      EXPECT_EQ(states(*g), want) << done << " chunks";
      EXPECT_EQ(g->header().record.step, 8);
      EXPECT_EQ(g->header().record.consumed_samples, 80);
      EXPECT_FALSE(std::filesystem::exists(g->file("pending")));
    }
  }
}

// States in two versions: passes run before the step is decided.
TEST_P(Serve, AStepThatIsNotDecidedIsForgotten) {
  std::unique_ptr<Generation> g = fresh(true);
  const std::vector<float> before = states(*g);
  std::vector<float> after;
  Slots::Flips flips;
  std::string text;
  {
    Passes passes(*g, ranks_, *device_);
    g->slots().begin_version(8, false);
    const Passes::Run all{0, run(passes.define_tile(0, 0, pieces_))};
    for (int pass = 0; pass < 3; ++pass) passes.execute({&all, 1}, Passes::Params::Write);
    g->flush();
    after = states(*g);
    EXPECT_NE(after, before);
    flips = g->slots().ahead();
    EXPECT_EQ(std::ssize(flips), kChunks);
    text = passes.pending_text(eighth(), {});
  }
  g = reopened(std::move(g));
  recover(*g, *device_);
  EXPECT_EQ(states(*g), before);
  EXPECT_EQ(g->header().record.step, 7);
  // Passes of a step that is decided, with some of the slots entered.
  for (i64 done = 0; done <= kChunks; ++done) {
    g = fresh(true);
    {
      Passes passes(*g, ranks_, *device_);
      g->slots().begin_version(8, false);
      const Passes::Run all{0, run(passes.define_tile(0, 0, pieces_))};
      for (int pass = 0; pass < 3; ++pass) passes.execute({&all, 1}, Passes::Params::Write);
      g->flush();
      write_sealed(g->file("pending"), passes.pending_text(eighth(), {}));
      g->slots().begin_version(8, true);
      flips = g->slots().ahead();
      flips.resize(static_cast<size_t>(done));
      g->slots().keep(flips);
    }
    g = reopened(std::move(g));
    recover(*g, *device_);
    EXPECT_EQ(states(*g), after) << done << " slots";
    EXPECT_EQ(g->header().record.step, 8);
  }
}

// Damaged files are reported, and not taken for something else.
TEST_P(Serve, WhatIsDamagedIsSaid) {
  std::unique_ptr<Generation> g = fresh(false);
  const auto refused = [&](std::string_view file, const std::string& content, Errc code) {
    const std::string path = g->file(file), whole = read_text_file(path, kMostText);
    replace_text_file(path, content);
    std::filesystem::permissions(path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    try {
      const Generation there(directory_.path(), g->id(), options_);
      ADD_FAILURE() << file;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
    }
    replace_text_file(path, whole);
    std::filesystem::permissions(path, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  };
  const std::string table = read_text_file(g->file("table"), kMostText),
                    layout = read_text_file(g->file("layout"), kMostText);
  refused("layout", layout.substr(0, layout.size() / 2), Errc::Corrupt);
  refused("layout", "", Errc::Corrupt);
  refused("table", table.substr(0, table.size() - 8), Errc::Corrupt);
  refused("table", "", Errc::Corrupt);
  std::string other = table;
  other[0] = 'x';
  refused("table", other, Errc::Corrupt);
  other = table;
  other[8] = 99;  // the version
  refused("table", other, Errc::Unavailable);
  other = table;
  char* const entry = other.data() + sizeof(TableHeader);
  std::memcpy(entry, entry + 8, 8);  // two chunks in a slot
  refused("table", other, Errc::Corrupt);
  other = table;
  std::memset(other.data() + sizeof(TableHeader), 0x7f, 8);  // a slot that is none
  refused("table", other, Errc::Corrupt);
  // A message of a rank that asks for what is not its.
  Passes passes(*g, ranks_, *device_);
  EXPECT_THROW(passes.read(0, {0, 99, 0, 1, {}}), Error);
  EXPECT_THROW(passes.read(0, {1, 0, 0, 1, {}}), Error);
  EXPECT_THROW(passes.read(0, {0, 0, 0, kElems + 1, {}}), Error);
  EXPECT_THROW(passes.read(0, {0, 0, -1, 2, {}}), Error);
  EXPECT_THROW(passes.define_tile(0, 0, {{.param = 3, .begin = 1, .count = kElems}}), Error);
  const Passes::Run none{0, run(17)};
  EXPECT_THROW(passes.execute({&none, 1}, Passes::Params::Write), Error);
}

// Nobody gets the data of a damaged chunk; other chunks are as before. Without checksums the damage is not detected.
TEST_P(Serve, AByteThatIsNotAsItWasWrittenIsSaid) {
  for (const bool two_versions : {false, true}) {
    std::unique_ptr<Generation> g = fresh(two_versions);
    const std::string states = std::filesystem::read_symlink(g->file("states"));
    const i64 at = g->slots().place(2) + 3 * kElems * 4 + 5;  // of the fifth and sixth part
    g = reopened(std::move(g));
    {
      const int fd = ::open(states.c_str(), O_RDWR | O_CLOEXEC);
      char byte = 0;
      ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
      byte = static_cast<char>(byte ^ 4);
      ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
      ::close(fd);
    }
    Passes passes(*g, ranks_, *device_);
    g->slots().begin_version(8, !two_versions);
    const Passes::Run all{0, run(passes.define_tile(0, 0, pieces_))};
    const StateSet master = state_set({State::Master});
    if (!options_.checksums) {
      EXPECT_NO_THROW(passes.read(0, {0, 4, 0, kElems, master}));
      continue;
    }
    const auto refused = [&](auto&& body) {
      try {
        body();
        ADD_FAILURE();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::Corrupt);
        EXPECT_THAT(e.what(), ::testing::HasSubstr(states + ": chunk 2, in slot "));
      }
    };
    for (int again = 0; again < 2; ++again) {
      refused([&] { passes.read(0, {0, 4, 0, kElems, master}); });
      refused([&] { passes.read(0, {0, 5, 0, kElems, master}); });
      refused([&] { passes.write(0, {0, 4, 0, kElems, master}); });
      refused([&] { passes.execute({&all, 1}, Passes::Params::Write); });
      for (const i64 param : {3, 6}) EXPECT_NO_THROW(passes.read(0, {0, param, 0, kElems, master}));
    }
  }
}

TEST_P(Serve, ThereIsRoomOrItIsSaid) {
  options_.capacity = kPage;
  try {
    const Generation g(directory_.path(), ranks_, false, 0, options_);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Unavailable);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("--capacity"));
  }
  // Nothing is left of it.
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path()))
    EXPECT_TRUE(entry.path().filename().string().starts_with("mail.")) << entry.path();
  EXPECT_TRUE(std::filesystem::is_empty(disk_.path()));
}

// Other files beside them stay: those that no link of the server's own names, and those in use.
TEST(Leftovers, OnlyWhatARecordNamesIsRemoved) {
  namespace fs = std::filesystem;
  const testing::TempDirectory home, disk;
  const auto make_generation = [&](const std::string& id, const std::string& states) {
    fs::create_directory(home / id);
    fs::create_symlink(states, home / (id + "/states"));
  };
  const auto write = [](const std::string& path) { std::ofstream(path) << "states"; };
  const std::string mine(16, 'a'), current(16, 'b'), foreign(16, 'c'), other(16, 'd');
  for (const std::string& id : {mine, current, foreign}) write(disk / disk_name("test", id));
  write(disk / "book");
  make_generation(mine, disk / disk_name("test", mine));
  make_generation(current, disk / disk_name("test", current));
  make_generation(other, disk / "book");  // which no server has made
  const StepPlace step = make_step_place(home.path(), disk.path(), "test");
  write(step.path + "/manifest");
  EXPECT_EQ(fs::status(step.path).permissions(), fs::perms::owner_all);
  EXPECT_NE(step.path, step.entry);
  const StepPlace in_memory = make_step_place(home.path(), "", "test");
  EXPECT_EQ(in_memory.path, in_memory.entry);

  const auto names = [](const testing::TempDirectory& in) {
    std::vector<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(in.path())) all.push_back(entry.path().filename());
    std::ranges::sort(all);
    return all;
  };
  {
    const File used = File::open_write(disk / disk_name("test", mine));
    ASSERT_EQ(::flock(used.descriptor(), LOCK_EX | LOCK_NB), 0);
    try {
      Generation::remove(home.path(), mine);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::Unavailable);
      EXPECT_THAT(e.what(), ::testing::HasSubstr("another server uses it"));
    }
    EXPECT_TRUE(fs::exists(home / mine)) << "a file that stays needs its record";
  }
  remove_leftovers(home.path(), current);
  EXPECT_THAT(names(home), ::testing::ElementsAre(current));
  EXPECT_THAT(names(disk), ::testing::ElementsAre("book", disk_name("test", current), disk_name("test", foreign)));
  EXPECT_THAT(states_of_others(disk.path(), "test", current),
              ::testing::ElementsAre(::testing::AllOf(::testing::HasSubstr(disk_name("test", foreign) + " (user "),
                                                      ::testing::HasSubstr(", host "))));
  EXPECT_TRUE(states_of_others(disk.path(), "tes", "").empty());
  fs::rename(disk / disk_name("test", current), disk / "moved");
  fs::create_symlink("moved", disk / disk_name("test", current));
  EXPECT_THROW(remove_leftovers(home.path(), ""), Error);  // somebody's link is no file of the server's
  EXPECT_TRUE(fs::exists(disk / "moved"));
}

INSTANTIATE_TEST_SUITE_P(Places, Serve, ::testing::Combine(::testing::Bool(), ::testing::Bool()), [](const auto& test) {
  return fmt::format("{}{}", std::get<0>(test.param) ? "disk" : "memory",
                     std::get<1>(test.param) ? "_with_checksums" : "");
});

}  // namespace serve_test
}  // namespace ds::serve
