// SPDX-License-Identifier: Apache-2.0
// If the system refuses a thread or a process, the error names the thread or process and the limit, nothing waits
// forever, and everything started before is gone. Each case is a child process of a user of its own with few tasks.

#include "base/limits.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <linux/close_range.h>
#include <sys/wait.h>

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <functional>

#include "base/as_error.h"
#include "base/file.h"
#include "base/thread.h"
#include "checkpoint/async_save.h"
#include "comm/make_communicator.h"
#include "comm/shared_record.h"
#include "device/device.h"
#include "ds/kernels/thread_pool.h"
#include "ds/limits.h"
#include "formats/confined.h"
#include "launch/limits.h"
#include "launch/process.h"
#include "memreport/machine.h"
#include "probe/host.h"

namespace ds {
namespace limits_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr unsigned kSeconds = 20;  // after which SIGALRM ends a child that hangs

struct LimitsTest : ::testing::Test {
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user, who has no other processes";
  }
};

// Tests in which a limit of tasks is named or met exactly.
struct CountedTasksTest : LimitsTest {
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the thread sanitizer has tasks of its own";
#else
    LimitsTest::SetUp();
#endif
  }
};

std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
    return "done";
  } catch (const Error& e) {
    return fmt::format("{}: {}", exit_code(e.code()), e.what());
  } catch (const std::exception& e) {
    return fmt::format("foreign: {}", e.what());
  }
}

// Returns the outcome of `body` in a child of a user who may have so many processes and threads, the child among them.
std::string limited(rlim_t tasks, const std::function<void()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t pid = ::fork();
  if (pid == 0) {
    const uid_t user = 400'000 + static_cast<uid_t>(::getpid());
    const rlimit limit{tasks, tasks};
    ::alarm(kSeconds);
    std::string text = "no other user";
    if (::setgroups(0, nullptr) == 0 && ::setresgid(user, user, user) == 0 && ::setresuid(user, user, user) == 0 &&
        ::setrlimit(RLIMIT_NPROC, &limit) == 0)
      text = outcome_of(body);
    [[maybe_unused]] const ssize_t n = ::write(ends[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t n; (n = ::read(ends[0], part, sizeof part)) > 0;) text.append(part, static_cast<size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? fmt::format("killed by signal {}", WTERMSIG(status)) : text;
}

TEST_F(CountedTasksTest, APoolIsWholeOrNotThere) {
  for (int tasks = 1; tasks < 4; ++tasks) {
    EXPECT_EQ(limited(static_cast<rlim_t>(tasks), [] { ThreadPool(4); }),
              fmt::format("foreign: thread {} of 4: Resource temporarily unavailable", tasks + 1));
  }
  EXPECT_EQ(limited(4, [] { ThreadPool(4).parallel_for(8, [](i64, int) {}); }), "done");
}

TEST_F(CountedTasksTest, ThreadsOfADeviceAreNamed) {
  EXPECT_EQ(
      limited(2, [] { make_cpu_device(probe::cpu_backend(), 4); }),
      "4: cannot start thread 3 of 4: Resource temporarily unavailable; the limit of processes and threads of this "
      "user (ulimit -u) is 2: raise it or use fewer threads");
}

// Returns the outcome of `body` in a child that may use so much of the resource.
std::string limited_to(__rlimit_resource resource, rlim_t most, const std::function<void()>& body) {
  return limited(100, [&] {
    const rlimit limit{most, most};
    std::signal(SIGXFSZ, SIG_IGN);
    if (::setrlimit(resource, &limit) != 0) throw Error(Errc::Internal, "no limit");
    body();
  });
}

TEST_F(LimitsTest, ReasonsOfTheSystemNameTheLimit) {
  EXPECT_EQ(system_reason(ENOENT), "No such file or directory");
  EXPECT_EQ(limited_to(RLIMIT_NOFILE, 3, [] { File::open_read("/proc/self/maps"); }),
            "1: cannot open /proc/self/maps: Too many open files: the limit of open files (ulimit -n) is 3");
  EXPECT_EQ(limited_to(RLIMIT_FSIZE, 4096, [] { SharedRecord("ds-train.0", std::string(5000, 'x').data(), 5000); }),
            "1: /dev/shm/ds-train.0 cannot be written: File too large: the limit of file size (ulimit -f) is 4 KiB");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their address space is of terabytes
  EXPECT_THAT(limited_to(RLIMIT_AS, u64{1} << 30, [] { throw as_error(std::bad_alloc()); }),
              ::testing::HasSubstr("Cannot allocate memory: the limit of address space (ulimit -v) is 1048576 KiB"));
#endif
}

TEST_F(CountedTasksTest, RanksInThreadsDoNotWaitForOneThatIsNotThere) {
  const auto meet = [] { ds::run_threads(3, {}, [](Communicator& c) { c.barrier("dp.stats"); }); };
  // Threads of the ranks, and those of their communication.
  for (rlim_t tasks = 1; tasks < 7; ++tasks) EXPECT_THAT(limited(tasks, meet), StartsWith("4: cannot start ")) << tasks;
  EXPECT_THAT(limited(2, meet), HasSubstr("rank "));
  EXPECT_EQ(limited(7, meet), "done");
}

TEST_F(LimitsTest, WhatStartsLaterIsNamed) {
  EXPECT_THAT(limited(1, [] { make_self_communicator({})->barrier("dp.stats"); }),
              StartsWith("4: cannot start the communication thread of rank 0: Resource temporarily unavailable; the "));
  EXPECT_THAT(limited(1, [] { Worker(); }), StartsWith("4: cannot start the thread that saves: "));
  EXPECT_THAT(limited(1, [] { ConfinedChild("x.h5", "the parser", -1, {}, [] { return std::string(); }); }),
              StartsWith("4: cannot start a process for the parser to read x.h5: "));
  EXPECT_THAT(limited(1,
                      [] {
                        int error = 0;
                        launch::spawn({.program = "/bin/true",
                                       .argv = {"true"},
                                       .environment = {},
                                       .stdin_fd = 0,
                                       .stdout_fd = 1,
                                       .stderr_fd = 2,
                                       .death_signal = SIGKILL},
                                      &error);
                      }),
              StartsWith("4: cannot start a process for /bin/true: "));
}

TEST_F(CountedTasksTest, AMeasurementDoesNotWaitForRanksThatAreNotThere) {
  const auto measure = [] { memreport::measure_machine({.ranks = 3, .threads = 1}, {}); };
  for (rlim_t tasks = 1; tasks < 4; ++tasks)
    EXPECT_THAT(limited(tasks, measure),
                StartsWith(fmt::format("4: cannot start rank {} of 3 to measure with: ", tasks - 1)));
}

TEST_F(CountedTasksTest, RoomForTasksIsFoundByTrying) {
  EXPECT_EQ(limited(3, [] { require_tasks(2, "MPI"); }), "done");
  EXPECT_EQ(
      limited(3, [] { require_tasks(3, "MPI"); }),
      "4: the limit of processes and threads of this user (ulimit -u) is 3: 2 more can be started, and MPI needs 3: "
      "raise it");
}

TEST_F(CountedTasksTest, LimitsAreNamedWithWhatIsNeeded) {
  const auto with = [](__rlimit_resource resource, rlim_t value, const std::function<void()>& body) {
    return limited(1000, [=] {
      const rlimit limit{value, value};
      ::setrlimit(resource, &limit);
      ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);  // else mpirun would have them, too
      body();
    });
  };
  const auto start = [] { launch::check_limits(2); };
  EXPECT_EQ(with(RLIMIT_NOFILE, 34, start),
            "4: the limit of open files (ulimit -n) is 34, and starting 2 ranks needs 35: raise it");
  EXPECT_EQ(with(RLIMIT_NOFILE, 35, start), "done");
  EXPECT_EQ(with(RLIMIT_STACK, 16 << 10, start),
            "4: the limit of the stack (ulimit -s) is 16 KiB, and starting 2 ranks needs 512 KiB: raise it");
  EXPECT_EQ(with(RLIMIT_FSIZE, 10 << 10, start),
            "4: the limit of file size (ulimit -f) is 10 KiB, and starting 2 ranks needs 16 KiB: raise it");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their address space is of terabytes
  EXPECT_THAT(with(RLIMIT_AS, 40 << 20, start),
              StartsWith("4: the limit of address space (ulimit -v) is 40960 KiB, and starting 2 ranks needs "));
#endif
  EXPECT_EQ(limited(9, start), "done");
  EXPECT_EQ(
      limited(8, start),
      "4: the limit of processes and threads of this user (ulimit -u) is 8: 7 more can be started, and starting 2 "
      "ranks needs 8: raise it");
  EXPECT_THAT(limited(70, [] { launch::check_limits(32); }), HasSubstr("starting 32 ranks needs 72"));
  EXPECT_EQ(with(RLIMIT_STACK, 511 << 10, check_process_limits),
            "4: the limit of the stack (ulimit -s) is 511 KiB, and this program needs 512 KiB: raise it");
}

TEST(AsError, KnowsMemoryFromBugs) {
  EXPECT_EQ(as_error(std::bad_alloc()).code(), Errc::OutOfMemory);
  EXPECT_EQ(as_error(std::runtime_error("x")).code(), Errc::Internal);
  const Error own(Errc::Comm, "gone", 3);
  const std::exception& any = own;
  EXPECT_EQ(as_error(any).code(), Errc::Comm);
  EXPECT_EQ(as_error(any).rank(), 3);
}

}  // namespace limits_test
}  // namespace ds
