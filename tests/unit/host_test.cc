// SPDX-License-Identifier: Apache-2.0
// How many threads a rank takes.
#include "probe/host.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "ds/log.h"

namespace ds::probe {
namespace host_test {

int threads_with(const char* omp_num_threads, int local_world_size = 1) {
  ::setenv("OMP_NUM_THREADS", omp_num_threads, 1);
  const int threads = rank_threads(local_world_size);
  ::unsetenv("OMP_NUM_THREADS");
  return threads;
}

TEST(Host, TheEnvironmentSaysHowManyThreads) {
  EXPECT_EQ(threads_with("3"), 3);
  EXPECT_EQ(threads_with("3", 8), 3);  // of this rank: not divided
  EXPECT_EQ(threads_with("5,2"), 5);
}

TEST(Host, WhatIsNoNumberOfThreadsIsAWarning) {
  int warnings = 0;
  set_log_sink([&](LogLevel level, std::string_view) { warnings += level == LogLevel::Warning; });
  ::unsetenv("OMP_NUM_THREADS");
  const int by_cores = rank_threads(1);
  EXPECT_EQ(warnings, 0);
  EXPECT_EQ(threads_with(""), by_cores);
  EXPECT_EQ(warnings, 0);
  for (const char* wrong : {"0", "-2", "many", "4x", " 4", "99999999999"}) EXPECT_EQ(threads_with(wrong), by_cores);
  set_log_sink(nullptr);
  EXPECT_EQ(warnings, 6);
}

TEST(Host, RanksShareTheCoresUnlessTheyHaveTheirOwn) {
  EXPECT_EQ(core_share(16, 16, 1), 16);
  EXPECT_EQ(core_share(16, 16, 4), 4);
  EXPECT_EQ(core_share(16, 16, 5), 3);
  EXPECT_EQ(core_share(2, 2, 8), 1);
  EXPECT_EQ(core_share(4, 16, 4), 4);  // bound: a share already
  EXPECT_GE(rank_threads(1000), 1);
}

}  // namespace host_test
}  // namespace ds::probe
