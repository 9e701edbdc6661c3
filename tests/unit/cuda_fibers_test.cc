// SPDX-License-Identifier: Apache-2.0
// The CUDA simulator: threads of a block meet at barriers in any order, and what hardware leaves undefined ends the
// process.

#include "cuda/sim/fibers.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <vector>

namespace ds::cuda::sim {
namespace cuda_fibers_test {

void run(int threads, FunctionRef<void()> thread, size_t shared_bytes = 0) {
  run_grid(dim3(1), threads, shared_bytes, thread);
}

TEST(CudaFibers, WarpsExchangeAndBlocksMeet) {
  for (const char* seed : {"0", "1", "2"}) {
    setenv("DS_SIM_SEED", seed, 1);
    std::vector<int> sums(96);
    run(
        96,
        [&] {
          const int t = thread_index();
          int sum = 0;
          for (int round = 0; round < 3; ++round) {
            const Lanes<int> lanes = warp_exchange(t + round);
            for (size_t lane = 0; lane < 32; ++lane) sum += lanes[lane];
            reinterpret_cast<int*>(block().shared)[t] = sum;
            sync_block();
            sum = reinterpret_cast<int*>(block().shared)[(t + 32) % 96];  // of the next warp
            sync_block();
          }
          sums[t] = sum;
        },
        96 * sizeof(int));
    // After three rounds a warp has its own numbers, gathered while its sum passed through the other two.
    const auto lanes_of = [](int warp, int round) { return 32 * (32 * warp + round) + 31 * 16; };
    for (int t = 0; t < 96; ++t) {
      const int warp = t / 32;
      EXPECT_EQ(sums[t], lanes_of(warp, 0) + lanes_of((warp + 2) % 3, 1) + lanes_of((warp + 1) % 3, 2)) << seed;
    }
  }
  unsetenv("DS_SIM_SEED");
}

TEST(CudaFibers, ASeedChangesTheOrderOfThreads) {
  const auto order = [](const char* seed) {
    setenv("DS_SIM_SEED", seed, 1);
    std::vector<int> ran;
    run(64, [&] { ran.push_back(thread_index()); });
    unsetenv("DS_SIM_SEED");
    return ran;
  };
  std::vector<int> in_order(64);
  std::iota(in_order.begin(), in_order.end(), 0);
  EXPECT_EQ(order("0"), in_order);
  EXPECT_NE(order("1"), in_order);
  EXPECT_NE(order("1"), order("2"));
}

TEST(CudaFibersDeathTest, ABarrierThatAThreadMissesEndsTheProcess) {
  for (const char* seed : {"0", "1"}) {
    setenv("DS_SIM_SEED", seed, 1);
    EXPECT_DEATH(run(64,
                     [] {
                       if (thread_index() != 40) sync_block();
                     }),
                 "not all threads of a block or warp reached a barrier");
    EXPECT_DEATH(run(64,
                     [] {
                       if (thread_index() != 3) warp_exchange(1);
                     }),
                 "not all threads of a block or warp reached a barrier");
  }
  unsetenv("DS_SIM_SEED");
  EXPECT_DEATH(run(
                   64, [] { check_shared(65); }, 64),
               "more shared memory than its launch asked for");
}

TEST(CudaFibersDeathTest, ABlockHasTheSharedMemoryOfTheDevice) {
  constexpr const char* kTooMuch = "more shared memory than the device has";
  const auto ask = [](size_t bytes) {
    run(
        32, [] {}, bytes);
  };
  EXPECT_EQ(most_shared_bytes(), size_t{163} << 10);
  ask(most_shared_bytes());
  EXPECT_DEATH(ask(most_shared_bytes() + 1), kTooMuch);
  setenv("DS_SIM_SHARED_BYTES", "232448", 1);
  EXPECT_EQ(most_shared_bytes(), 232448u);
  ask(232448);
  EXPECT_DEATH(ask(232449), kTooMuch);
  unsetenv("DS_SIM_SHARED_BYTES");
}

}  // namespace cuda_fibers_test
}  // namespace ds::cuda::sim
