// SPDX-License-Identifier: Apache-2.0
// The run directory has one run at a time.

#include "run/run_directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "../temp_directory.h"
#include "checkpoint/run_lock.h"
#include "ds/error.h"

namespace ds::run {
namespace run_directory_test {

TEST(RunDirectory, HasOneRunAtATimeHoweverTheyComeAndGo) {
  const testing::TempDirectory dir;
  const std::string path = dir / "run";
  std::atomic<int> holders{0}, most{0}, taken{0};
  std::vector<std::thread> runs;
  for (int r = 0; r < 4; ++r) {
    runs.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        try {
          const RunDirectory run(path, "", "");
          const int now = ++holders;
          for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
          }
          ++taken;
          std::this_thread::yield();
          --holders;
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), Errc::Config);
        }
      }
    });
  }
  for (std::thread& run : runs) run.join();
  EXPECT_EQ(most, 1);
  EXPECT_GT(taken, 4);
  EXPECT_TRUE(std::filesystem::is_empty(path));
}

TEST(RunDirectory, IsFreeAgainWhenARunCouldNotHaveIt) {
  const testing::TempDirectory dir;
  const std::string path = dir / "run";
  { const RunDirectory run(path, "", ""); }
  EXPECT_NO_THROW(RunLock::check_free(path));
  EXPECT_NO_THROW(RunLock::check_free(dir / "absent"));
  std::ofstream(path + "/metrics.jsonl") << "{}\n";
  EXPECT_THROW(RunDirectory(path, "", ""), Error);
  const RunDirectory run(path, "latest", "");
  EXPECT_THROW(RunDirectory(path, "latest", ""), Error);  // held
  EXPECT_THROW(RunLock::check_free(path), Error);
  EXPECT_TRUE(std::filesystem::exists(path + "/lock"));
}

TEST(RunDirectory, IsNoLongerOursWhenSomebodyHasReplacedIt) {
  const testing::TempDirectory dir;
  const std::string path = dir / "run";
  {
    RunDirectory run(path, "", "");
    run.append_metrics({{"step", 1}});
    std::filesystem::remove_all(path);
    EXPECT_THROW(run.check_ours(), Error);
    const RunDirectory next(path, "", "");
    EXPECT_THROW(run.append_metrics({{"step", 2}}), Error);
    next.check_ours();
  }
  EXPECT_TRUE(std::filesystem::is_empty(path));
}

TEST(RunDirectory, ThatCannotBeHadLeavesNoDirectories) {
  const testing::TempDirectory dir;
  EXPECT_THROW(RunDirectory(dir / "a/b/" + std::string(300, 'x'), "", ""), Error);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(RunDirectory, FollowsNoLinksAndWaitsForNoPipe) {
  const testing::TempDirectory dir;
  const std::string path = dir / "run";
  std::filesystem::create_directory(path);
  testing::write_file(dir / "victim", "precious");
  std::filesystem::create_symlink(dir / "victim", path + "/lock");
  EXPECT_THROW(RunDirectory(path, "", ""), Error);
  EXPECT_EQ(testing::read_file(dir / "victim"), "precious");
  std::filesystem::remove(path + "/lock");
  ASSERT_EQ(mkfifo((path + "/metrics.jsonl").c_str(), 0600), 0);
  RunDirectory run(path, "latest", "");
  EXPECT_THROW(run.cut_metrics(1), Error);
}

}  // namespace run_directory_test
}  // namespace ds::run
