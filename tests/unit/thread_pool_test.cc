// SPDX-License-Identifier: Apache-2.0
// The thread pool: every tile once, nesting, scratch, more threads than cores, and many short calls in a row.

#include "ds/kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace ds {
namespace {

TEST(ThreadPool, RunsEveryTileOnce) {
  for (int threads : {1, 2, 3, 5, 16}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (i64 tiles : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<int> hits(static_cast<size_t>(tiles));  // plain ints: one thread writes, the caller reads afterwards
      std::atomic<bool> bad_worker{false};
      pool.parallel_for(tiles, [&](i64 t, int worker) {
        ++hits[static_cast<size_t>(t)];
        if (worker < 0 || worker >= threads) bad_worker = true;
      });
      for (int h : hits) ASSERT_EQ(h, 1) << threads << " threads, " << tiles << " tiles";
      EXPECT_FALSE(bad_worker);
    }
  }
}

TEST(ThreadPool, ManyShortCallsSeeEachOthersResults) {
  for (int threads : {2, 4}) {
    ThreadPool pool(threads);
    std::vector<i64> value(5), want(5);
    for (i64 call = 0; call < 5000; ++call) {
      pool.parallel_for(5, [&](i64 t, int) { value[static_cast<size_t>(t)] += t * call; });
      for (size_t t = 0; t < 5; ++t) {  // by the caller, between calls
        want[t] = want[t] + static_cast<i64>(t) * call + 1;
        ++value[t];
      }
    }
    EXPECT_EQ(value, want);
  }
}

TEST(ThreadPool, WorkersTakePart) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Each of two tiles waits for the other: this ends only if two threads run them.
  pool.parallel_for(2, [&](i64, int) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, NestedCallsStayOnTheirWorker) {
  ThreadPool pool(3);
  std::vector<int> sum(30);
  std::atomic<bool> moved{false};
  pool.parallel_for(30, [&](i64 t, int worker) {
    const auto self = std::this_thread::get_id();
    pool.parallel_for(10, [&](i64 inner, int inner_worker) {
      if (inner_worker != worker || std::this_thread::get_id() != self) moved = true;
      sum[static_cast<size_t>(t)] += static_cast<int>(inner);
    });
  });
  for (int s : sum) EXPECT_EQ(s, 45);
  EXPECT_FALSE(moved);
}

TEST(ThreadPool, TwoPoolsNest) {
  ThreadPool outer(2), inner(2);
  std::atomic<int> count{0};
  outer.parallel_for(1, [&](i64, int) {
    inner.parallel_for(8, [&](i64, int) { ++count; });
    outer.parallel_for(4, [&](i64, int) { ++count; });
  });
  EXPECT_EQ(count, 12);
}

TEST(ThreadPool, ScratchIsAlignedGrowsAndIsPerWorker) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.scratch_bytes(), 0);
  void* small = pool.scratch(0, 100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small) % 64, 0u);
  EXPECT_EQ(pool.scratch_bytes(), 128);
  EXPECT_EQ(pool.scratch(0, 128), small);
  pool.scratch(0, 129);
  EXPECT_EQ(pool.scratch_bytes(), 256);  // doubled
  EXPECT_NE(pool.scratch(1, 64), pool.scratch(0, 64));
  EXPECT_EQ(pool.scratch_bytes(), 512);  // every worker gets what any has needed
  EXPECT_NE(pool.scratch(2, 0), nullptr);

  std::atomic<int> torn{0};
  pool.parallel_for(200, [&](i64 t, int worker) {
    auto* p = static_cast<u8*>(pool.scratch(worker, 4096));
    for (int i = 0; i < 4096; ++i) p[i] = static_cast<u8>(t);
    for (int i = 0; i < 4096; ++i) torn += p[i] != static_cast<u8>(t);
  });
  EXPECT_EQ(torn, 0);
}

TEST(ThreadPool, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(1 + i % 4);
}

}  // namespace
}  // namespace ds
