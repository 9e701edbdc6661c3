// SPDX-License-Identifier: Apache-2.0
// The run directory has one run at a time.

#include "engine/run_directory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "../temp_directory.h"
#include "ds/error.h"

namespace ds::engine {
namespace {

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
  std::ofstream(path + "/metrics.jsonl") << "{}\n";
  EXPECT_THROW(RunDirectory(path, "", ""), Error);
  const RunDirectory run(path, "latest", "");
  EXPECT_THROW(RunDirectory(path, "latest", ""), Error);  // held
  EXPECT_TRUE(std::filesystem::exists(path + "/lock"));
}

}  // namespace
}  // namespace ds::engine
