// SPDX-License-Identifier: Apache-2.0
// The thread pool: every tile once, nesting, scratch, more threads than cores, and many short calls in a row.

#include "ds/kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace ds {
namespace thread_pool_test {

TEST(ThreadPool, RunsEveryTileOnce) {
  for (int threads : {1, 2, 3, 5, 16}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (i64 tiles : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<int> hits(static_cast<size_t>(tiles));  // plain ints: one thread writes, the caller reads afterwards
      std::atomic<bool> bad_worker{false};
      pool.parallel_for(tiles, [&](i64 t, int worker) {
        ++hits[t];
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
      pool.parallel_for(5, [&](i64 t, int) { value[t] += t * call; });
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
      sum[t] += static_cast<int>(inner);
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

TEST(ThreadPool, ScratchIsTheMostThatWasReservedForEveryWorker) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.scratch_bytes(), 0);
  void* const small = pool.reserve_scratch(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small) % 64, 0u);
  EXPECT_EQ(pool.scratch_bytes(), 3 * 128);
  EXPECT_EQ(pool.scratch(0), small);
  EXPECT_EQ(pool.reserve_scratch(128), small);
  EXPECT_EQ(pool.reserve_scratch(0), small);
  EXPECT_EQ(pool.scratch_bytes(), 3 * 128);
  pool.reserve_scratch(129);
  EXPECT_EQ(pool.scratch_bytes(), 3 * 192);  // not a byte for later
  EXPECT_NE(pool.scratch(1), pool.scratch(0));
  EXPECT_NE(pool.scratch(2), pool.scratch(1));

  std::atomic<int> torn{0};
  pool.reserve_scratch(4096);
  pool.parallel_for(200, [&](i64 t, int worker) {
    auto* p = static_cast<u8*>(pool.scratch(worker));
    for (int i = 0; i < 4096; ++i) p[i] = static_cast<u8>(t);
    for (int i = 0; i < 4096; ++i) torn += p[i] != static_cast<u8>(t);
  });
  EXPECT_EQ(torn, 0);
}

// A nested op must not move the scratch of workers that are at work.
TEST(ThreadPool, NestedCallsReserveForTheirOwnWorker) {
  ThreadPool pool(3);
  pool.reserve_scratch(64);
  std::atomic<int> torn{0};
  pool.parallel_for(60, [&](i64 t, int worker) {
    const std::size_t bytes = static_cast<std::size_t>(64 * (t + 1));
    auto* const p = static_cast<u8*>(pool.reserve_scratch(bytes));
    if (p != pool.scratch(worker)) ++torn;
    std::memset(p, static_cast<int>(t), bytes);
    pool.parallel_for(2, [&](i64, int inner) { torn += pool.scratch(inner) != p; });
    for (std::size_t i = 0; i < bytes; ++i) torn += p[i] != static_cast<u8>(t);
  });
  EXPECT_EQ(torn, 0);
  pool.reserve_scratch(60 * 64);
  EXPECT_EQ(pool.scratch_bytes(), 3 * 60 * 64);
}

TEST(ThreadPool, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(1 + i % 4);
}

}  // namespace thread_pool_test
}  // namespace ds
