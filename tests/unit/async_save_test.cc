// SPDX-License-Identifier: Apache-2.0
// A save beside other work: it writes the values that were handed in, all ranks see the same end of it, and a rank that
// leaves early leaves no files.

#include "checkpoint/async_save.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "../checkpoint_state.h"
#include "checkpoint/reader.h"

namespace ds {
namespace async_save_test {

namespace fs = std::filesystem;
using namespace testing;

std::set<std::string> entries(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& e : fs::directory_iterator(dir)) names.insert(e.path().filename().string());
  return names;
}

std::unique_ptr<StepSave> sample_save(const std::string& dir, i64 step, RankState& state, Communicator& comm) {
  return std::make_unique<StepSave>(dir, sample_meta(step, DType::BF16), small_model(), state.pieces(), comm);
}

// Acts as a training loop: every step reduces a number, which carries busy() along. Returns the save and the number of
// steps taken meanwhile.
std::pair<std::unique_ptr<StepSave>, int> train_until_ended(AsyncSave& background, Communicator& comm) {
  for (int steps = 1;; ++steps) {
    i64 busy = background.busy();
    comm.all_reduce(&busy, 1, DType::I64, ReduceOp::Max, "test").wait();
    if (busy != 0) continue;
    if (auto ended = background.proceed()) return {std::move(ended), steps};
  }
}

TEST(AsyncSave, WritesWhatWasHandedInWhileTheRanksWork) {
  const TempDirectory dir;
  run_threads(3, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), comm.size(), 1));
    state.fill();
    AsyncSave background;
    for (i64 step = 1; step <= 3; ++step) {
      EXPECT_FALSE(background.pending());
      background.start(sample_save(dir / "run", step, state, comm));
      EXPECT_TRUE(background.pending());
      const auto [ended, steps] = train_until_ended(background, comm);
      EXPECT_FALSE(ended->error());
      EXPECT_EQ(ended->step_dir(), dir / "run/" + step_name(step));
      EXPECT_GE(steps, 3);  // one for each meeting
    }
    EXPECT_GT(background.worker().cpu_seconds(), 0);
  });
  EXPECT_EQ(entries(dir / "run"), (std::set<std::string>{"latest", step_name(1), step_name(2), step_name(3)}));
  for (i64 step = 1; step <= 3; ++step) {
    EXPECT_TRUE(CheckpointReader(dir / "run/" + step_name(step)).verify({}).empty());
    load_sample(dir / "run/" + step_name(step), DType::BF16, 2);
  }
  EXPECT_EQ(find_checkpoint(dir / "run"), dir / "run/" + step_name(3));
}

// The same bytes but for the name of the save.
TEST(AsyncSave, WritesTheFilesOfASaveAtOnce) {
  const TempDirectory dir;
  save_sample(dir / "now", 5, DType::BF16, 2, 1);
  run_threads(2, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), comm.size(), 1));
    AsyncSave background;
    background.start(sample_save(dir / "beside", 5, state.fill(), comm));
    while (background.pending()) background.proceed();  // in the end it may also be waited for
  });
  CheckpointReader now(dir / "now/step-00000005"), beside(dir / "beside/step-00000005");
  EXPECT_EQ(now.meta(), beside.meta());
  for (size_t f = 0; f < 2; ++f) {
    const FileRecord &a = now.manifest().files[f], &b = beside.manifest().files[f];
    EXPECT_EQ(a.bytes, b.bytes);
    ASSERT_EQ(a.pieces.size(), b.pieces.size());
    for (size_t i = 0; i < a.pieces.size(); ++i) {
      for (State s : kStates) {
        const auto &x = a.pieces[i].states[s], &y = b.pieces[i].states[s];
        ASSERT_EQ(x.has_value(), y.has_value());
        if (!x) continue;
        EXPECT_EQ(x->offset, y->offset);
        EXPECT_EQ(x->checksums, y->checksums);
      }
    }
  }
}

TEST(AsyncSave, ThatFailsOnOneRankFailsOnAllAndLeavesNothing) {
  const TempDirectory dir;
  save_sample(dir / "run", 1, DType::BF16, 3, 1);
  run_threads(3, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), comm.size(), 1));
    state.fill();
    AsyncSave background;
    auto save = sample_save(dir / "run", 2, state, comm);
    if (comm.rank() == 1) save->cancel();
    background.start(std::move(save));
    const auto ended = train_until_ended(background, comm).first;
    ASSERT_TRUE(ended->error());
    EXPECT_EQ(ended->error()->rank(), 1);
    EXPECT_STREQ(ended->error()->what(), "rank 1: the save of step-00000002 was abandoned");
    comm.barrier("test");  // rank 0 has removed it
    EXPECT_EQ(entries(dir / "run"), (std::set<std::string>{"latest", step_name(1)}));
    comm.barrier("test");
    background.start(sample_save(dir / "run", 3, state, comm));  // the next one is not the worse for it
    EXPECT_FALSE(train_until_ended(background, comm).first->error());
  });
  EXPECT_EQ(entries(dir / "run"), (std::set<std::string>{"latest", step_name(1), step_name(3)}));
}

TEST(AsyncSave, WhereTheDirectoryCannotBeMadeSaysWhy) {
  const TempDirectory dir;
  write_file(dir / "file", "");
  run_threads(2, {}, [&](Communicator& comm) {
    RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), comm.size(), 1));
    AsyncSave background;
    background.start(sample_save(dir / "file/run", 1, state.fill(), comm));
    const auto ended = train_until_ended(background, comm).first;
    ASSERT_TRUE(ended->error());
    EXPECT_EQ(ended->error()->code(), Errc::Io);
    EXPECT_NE(std::string(ended->error()->what()).find("file/run: Not a directory"), std::string::npos)
        << ended->error()->what();
  });
}

// Ranks that leave at any of its stages: nothing of it stays, or all of it.
TEST(AsyncSave, GivenUpAtAnyStageLeavesNothingOrAll) {
  for (int stages = 0; stages < 3; ++stages) {
    for (int turn = 0; turn < 5; ++turn) {
      const TempDirectory dir;
      save_sample(dir / "run", 1, DType::BF16, 3, 1);
      run_threads(3, {}, [&](Communicator& comm) {
        RankState state(DType::BF16, owned_ranges(small_model(), comm.rank(), comm.size(), 1));
        AsyncSave background;
        background.start(sample_save(dir / "run", 2, state.fill(), comm));
        for (int i = 0; i < stages; ++i) background.proceed();
      });
      const std::set<std::string> nothing = {"latest", step_name(1)}, all = {"latest", step_name(1), step_name(2)};
      const std::set<std::string> left = entries(dir / "run");
      EXPECT_TRUE(left == nothing || (stages == 2 && left == all)) << stages << ": " << left.size();
      for (const std::string& name : left) {
        if (name != "latest") {
          EXPECT_TRUE(CheckpointReader(dir / "run/" + name).verify({}).empty());
        }
      }
    }
  }
}

TEST(Worker, DoesJobsInOrderAndAllOfThem) {
  std::vector<int> done;
  {
    Worker worker;
    for (int i = 0; i < 100; ++i) worker.post([&, i] { done.push_back(i); });
    worker.wait();
    EXPECT_TRUE(worker.idle());
    EXPECT_EQ(done.size(), 100u);
    for (int i = 100; i < 200; ++i) worker.post([&, i] { done.push_back(i); });
  }
  ASSERT_EQ(done.size(), 200u);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(done[i], i);
}

}  // namespace async_save_test
}  // namespace ds
