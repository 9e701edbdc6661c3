// SPDX-License-Identifier: Apache-2.0
// comm/polling.h: when waits spin, yield and give up.

#include "comm/polling.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>

namespace ds {
namespace polling_test {

// Looks during a wait for something that does not happen.
int looks_of(Polling& polling) {
  int looks = 0;
  EXPECT_FALSE(polling.until([&] {
    ++looks;
    return false;
  }));
  return looks;
}

TEST(Polling, ReturnsAtOnceWhenDone) {
  for (const bool crowded : {false, true}) {
    Polling polling(crowded);
    int looks = 0;
    EXPECT_TRUE(polling.until([&] { return ++looks == 1; }));
    EXPECT_EQ(looks, 1);
  }
  Polling polling(false);
  int looks = 0;
  EXPECT_TRUE(polling.until([&] { return ++looks == 5; }));
  EXPECT_EQ(looks, 5);
}

TEST(Polling, SpinsOnlyIfRanksHaveCores) {
  Polling alone(false), crowded(true);
  EXPECT_GE(looks_of(alone), 400);
  EXPECT_LE(looks_of(crowded), 18);
}

TEST(Polling, StopsSpinningWhereSpinsFail) {
  Polling polling(false);
  for (int i = 0; i < 64; ++i) EXPECT_GE(looks_of(polling), 400) << i;
  int spins = 0;
  for (int i = 0; i < 512; ++i) spins += looks_of(polling) >= 400;
  EXPECT_EQ(spins, 2);  // to learn of a change
  // One that succeeds brings them back.
  for (bool spun = false; !spun;) {
    int looks = 0;
    polling.until([&] { return ++looks == 100; });
    spun = looks == 100;
  }
  EXPECT_GE(looks_of(polling), 400);
}

// A thread that never sleeps, on the core of this one.
class Hog {
 public:
  Hog() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    EXPECT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    thread_ = std::jthread([this] {
      running_ = true;
      while (!stop_.load(std::memory_order_relaxed)) {
      }
    });
    while (!running_) std::this_thread::yield();
  }
  ~Hog() {
    stop_ = true;
    thread_.join();
    sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  std::atomic<bool> running_ = false, stop_ = false;
  std::jthread thread_;
};

TEST(Yields, StopWhereTheCoreDoesNotComeBackSoon) {
  const Hog hog;
  Yields yields;
  int yielded = 0;
  for (int call = 0; call < 2000; ++call) yielded += yields.once();
  // After each long yield twice as many calls as before return without one.
  EXPECT_LT(yielded, 1000);
}

}  // namespace polling_test
}  // namespace ds
