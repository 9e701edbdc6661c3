// SPDX-License-Identifier: Apache-2.0
// The shm communicator between real processes: same bits as the oracle, dead and stopped ranks, hostile and stale
// segments, nothing left in /dev/shm.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "../compressed_exercise.h"
#include "../mesh_exercise.h"
#include "../slow_set.h"
#include "comm/make_communicator.h"
#include "comm/shared_file.h"

namespace ds {
namespace comm_shm_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

std::string random_job() {
  std::random_device device;
  return fmt::format("test-{:08x}{:08x}", device(), device());
}

// Names of `job` in /dev/shm.
std::vector<std::string> segments_left(const std::string& job) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with(fmt::format("{}{}", kJobPrefix, job))) names.push_back(name);
  }
  return names;
}

// Processes that run `body(rank)`; their story is the text of the error that it throws, or else "ok".
class Ranks {
 public:
  Ranks(int size, const std::function<void(int)>& body) {
    for (int rank = 0; rank < size; ++rank) {
      std::array<int, 2> pipe_ends{};
      if (pipe(pipe_ends.data()) != 0) throw std::runtime_error("pipe");
      const pid_t pid = fork();
      if (pid == 0) {
        close(pipe_ends[0]);
        std::string story = "ok";
        try {
          body(rank);
        } catch (const Error& e) {
          story = fmt::format("{} {}: {}", static_cast<int>(e.code()), e.rank(), e.what());
        } catch (const std::exception& e) {
          story = e.what();
        }
        const auto written = write(pipe_ends[1], story.data(), story.size());
        _exit(written == std::ssize(story) ? 0 : 9);
      }
      close(pipe_ends[1]);
      pids_.push_back(pid);
      pipes_.push_back(pipe_ends[0]);
    }
  }
  ~Ranks() {
    for (size_t r = 0; r < pids_.size(); ++r) {
      kill(pids_[r], SIGKILL);
      waitpid(pids_[r], nullptr, 0);
      close(pipes_[r]);
    }
  }
  void signal(int rank, int number) { kill(pids_[rank], number); }
  // Blocks until the rank has ended.
  std::string story(int rank) {
    std::string text;
    std::array<char, 512> part;
    while (const ssize_t n = read(pipes_[rank], part.data(), part.size())) {
      if (n < 0) break;
      text.append(part.data(), static_cast<size_t>(n));
    }
    return text;
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
};

std::string error_story(Errc code, int rank) { return fmt::format("{} {}: ", static_cast<int>(code), rank); }

class CommShm : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_THAT(segments_left(job_), ::testing::IsEmpty()); }
  std::unique_ptr<Communicator> join(int rank, int size, double timeout_s = 20) const {
    return make_shm_communicator(job_, rank, size, {.timeout_s = timeout_s});
  }
  const std::string job_ = random_job();
};

class CommShmSizes : public CommShm, public ::testing::WithParamInterface<int> {};

TEST_P(CommShmSizes, PassesTheExercise) {
  const int size = GetParam();
  Ranks ranks(size, [&](int r) {
    auto c = join(r, size, 60);
    test::exercise(*c, size == 2 ? 200001 : 30001);  // the first needs several chunks of staging
  });
  for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.story(r), "ok");
}
TEST_P(CommShmSizes, PassesTheCompressedExercise) {
  Ranks ranks(GetParam(), [&](int r) { test::exercise_compressed(*join(r, GetParam(), 60), 1001); });
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(ranks.story(r), "ok");
}
INSTANTIATE_TEST_SUITE_P(Ranks, CommShmSizes, test::values_of<int>({1, 2, 3, 5}, {4, 6, 7, 8}));

TEST_F(CommShm, NamesAreGoneOnceAllHaveCome) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    MemoryLedger ledger;
    Buffer buffer = c->allocate(ledger, Tag::Params, 100);
    c->barrier("t");
    test::require(segments_left(job_).empty(), "a name is left");
    c->barrier("t");
    // The same name serves again, and memory outlives its communicator.
    c.reset();
    c = join(r, 3);
    c->barrier("t");
    buffer.as<u8>()[99] = 1;
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.story(r), "ok");
}

TEST_F(CommShm, AKilledRankIsNamedSoon) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    std::vector<float> x(100000);
    for (;;) c->all_reduce(x.data(), std::ssize(x), DType::F32, ReduceOp::Sum, "t").wait();
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(1, SIGKILL);
  const auto start = Clock::now();
  for (int r : {0, 2}) EXPECT_THAT(ranks.story(r), HasSubstr(error_story(Errc::Comm, 1) + "rank 1 died"));
  EXPECT_LT(Clock::now() - start, 10s);  // of a timeout of 20 s
}

// Large slices of one call and small ones of the next, of sizes that change.
TEST_F(CommShm, ARankKilledInAnUnevenExchangeIsNamedSoon) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    MemoryLedger ledger;
    const Buffer shared = c->allocate(ledger, Tag::Params, i64{8} << 20);
    for (int salt = 0;; ++salt) {
      test::exercise_all_to_allv(*c, salt % 2 == 0 ? shared.as<std::byte>() : std::span<std::byte>(), 1 << 20, salt);
      test::exercise_all_to_allv(*c, {}, 100, salt);
    }
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(1, SIGKILL);
  const auto start = Clock::now();
  for (int r : {0, 2}) EXPECT_THAT(ranks.story(r), HasSubstr(error_story(Errc::Comm, 1) + "rank 1 died"));
  EXPECT_LT(Clock::now() - start, 10s);  // of a timeout of 20 s
}

TEST_F(CommShm, MismatchedSlicesNameBothRanksAndSizes) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    std::vector<std::byte> x(300), y(300);
    std::vector<AllToAllSlice> out(3, {0, 50}), in = {{0, 50}, {50, 50}, {100, 50}};
    if (r == 2) in[1].bytes = 0;
    c->all_to_allv(x.data(), out, y.data(), in, "t").wait();
  });
  for (int r = 0; r < 3; ++r)
    EXPECT_THAT(ranks.story(r), HasSubstr(error_story(Errc::Comm, 1) +
                                          "sizes do not match: rank 1 sends 50 bytes to rank 2, which expects 0"));
}

TEST_F(CommShm, AKilledRankIsNoticedByWhoOnlyLooks) {
  Ranks ranks(2, [&](int r) {
    auto c = join(r, 2);
    if (r == 1) std::this_thread::sleep_for(60s);
    for (;; std::this_thread::sleep_for(10ms)) c->look_for_failures();
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(1, SIGKILL);
  EXPECT_THAT(ranks.story(0), HasSubstr(error_story(Errc::Comm, 1) + "rank 1 died"));
}

TEST_F(CommShm, CarriesTheStagedCommunicator) {
  Ranks ranks(3, [&](int r) {
    auto world = join(r, 3, 60);
    const auto device = make_cpu_device(*cpu_ops(), 1);
    test::exercise(*make_staged_communicator(*world, {.device = device.get()}), 30001);
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.story(r), "ok");
}

class CommShmMeshes : public CommShm, public ::testing::WithParamInterface<MeshShape> {};

TEST_P(CommShmMeshes, AllAxesWorkAtOnce) {
  const MeshShape shape = GetParam();
  Ranks ranks(shape.world(), [&](int r) {
    Mesh mesh(join(r, shape.world(), 60), shape, {.timeout_s = 60});
    mesh.world().barrier("t");
    test::require(segments_left(job_).empty(), "a name is left");
    test::exercise_mesh(mesh, 3001);
  });
  for (int r = 0; r < shape.world(); ++r) EXPECT_EQ(ranks.story(r), "ok");
}
INSTANTIATE_TEST_SUITE_P(Shapes, CommShmMeshes,
                         ::testing::Values(MeshShape{.dp = 3, .tp = 2}, MeshShape{.dp = 2, .pp = 2, .tp = 2}),
                         [](const auto& test) {
                           const MeshShape& s = test.param;
                           return fmt::format("dp{}_pp{}_tp{}", s.dp, s.pp, s.tp);
                         });

// "inode bytes" of the segments of `job` that this process has open.
std::string open_segments(const std::string& job) {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone);
    struct stat st {};
    if (target.starts_with(shared_path(fmt::format("{}{}", kJobPrefix, job))) && stat(entry.path().c_str(), &st) == 0)
      text += fmt::format("{} {}\n", st.st_ino, st.st_blocks * 512);
  }
  return text;
}

TEST_F(CommShm, AMeshTakesTheSharedMemoryThatWasForetold) {
  const MeshShape shape{.dp = 2, .tp = 2};
  const std::vector<i64> allocations = {3 << 20, 5};
  Ranks ranks(4, [&](int r) {
    Mesh mesh(join(r, 4), shape, {.timeout_s = 20});
    MemoryLedger ledger;
    std::vector<Buffer> buffers;
    for (const i64 bytes : allocations) {
      for (Communicator* axis : {&mesh.dp(), &mesh.tp()}) {
        buffers.push_back(axis->allocate(ledger, Tag::Params, bytes));
        std::memset(buffers.back().data(), 1, static_cast<size_t>(bytes));
      }
    }
    mesh.world().barrier("t");
    const std::string story = open_segments(job_);
    mesh.world().barrier("t");
    throw std::runtime_error(story);
  });
  std::map<i64, i64> segments;
  for (int r = 0; r < 4; ++r) {
    std::istringstream story(ranks.story(r));
    for (i64 inode = 0, bytes = 0; story >> inode >> bytes;) segments[inode] = bytes;
  }
  EXPECT_EQ(segments.size(), 1u + 2 + 2 + 4 * allocations.size());
  i64 taken = 0;
  for (const auto& [inode, bytes] : segments) taken += bytes;
  const i64 predicted = mesh_shm_bytes(shape, allocations, allocations);
  EXPECT_LE(taken, predicted);
  EXPECT_GE(taken, predicted - (i64{1} << 20));
}

// Ranks 0 to 2 wait in groups in which nobody dies.
TEST_F(CommShm, AKilledRankEndsTheWaitsInGroupsItIsNotIn) {
  Ranks ranks(5, [&](int r) {
    auto world = join(r, 5);
    const auto c = world->group(r < 2    ? std::vector<int>{0, 1}
                                : r == 2 ? std::vector<int>{2}
                                         : std::vector<int>{4, 3},
                                "tp", {.timeout_s = 20});
    i64 x = 0;
    if (r == 0) c->recv(&x, 8, 1, "t").wait();
    for (;; std::this_thread::sleep_for(1ms)) {
      c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
      if (r == 2) world->look_for_failures();
    }
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(4, SIGKILL);
  const auto start = Clock::now();
  for (int r : {0, 1, 2, 3}) EXPECT_THAT(ranks.story(r), HasSubstr(error_story(Errc::Comm, 4) + "rank 4 died"));
  EXPECT_LT(Clock::now() - start, 10s);  // of a timeout of 20 s
}

TEST_F(CommShm, AStoppedRankIsATimeoutOfItsGroupThatSaysSo) {
  Ranks ranks(4, [&](int r) {
    auto world = join(r, 4);
    const auto c =
        world->group(r < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}, "tp", {.timeout_s = r < 2 ? 20.0 : 1.0});
    for (;;) c->barrier("t");
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(3, SIGSTOP);
  const auto start = Clock::now();
  for (int r : {0, 1, 2}) {
    const std::string story = ranks.story(r);
    EXPECT_THAT(story, HasSubstr(error_story(Errc::Timeout, 3) + "rank 3 did not arrive within 1 s"));
    EXPECT_THAT(story, HasSubstr("of group \"tp\""));
    EXPECT_THAT(story, HasSubstr("is stopped"));
  }
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(CommShm, AMemberThatDoesNotMakeTheGroupIsNamed) {
  for (const int absent : {1, 3}) {  // who makes the memory, and one who finds it
    Ranks ranks(4, [&](int r) {
      auto world = join(r, 4);
      world->barrier("t");
      if (r != 0 && r != absent) world->group(std::vector<int>{1, 2, 3}, "tp", {.timeout_s = 0.6});
      world->barrier("t");
    });
    const auto expected =
        fmt::format("{}rank {} did not arrive within 0.6 s", error_story(Errc::Timeout, absent), absent);
    for (int r = 0; r < 4; ++r) EXPECT_THAT(ranks.story(r), HasSubstr(expected));
  }
}

TEST_F(CommShm, ManyGroupsLeaveNothing) {
  Ranks ranks(4, [&](int r) {
    auto world = join(r, 4);
    for (int i = 0; i < 10; ++i) {
      const int peer = r ^ (1 + i % 3);
      const auto c = world->group(std::vector<int>{std::min(r, peer), std::max(r, peer)}, "pair", {.timeout_s = 20});
      test::exercise_ring(*c, 1000, i + 10 * std::min(r, peer));
    }
    world->barrier("t");
    test::require(segments_left(job_).empty(), "a name is left");
    world->barrier("t");
  });
  for (int r = 0; r < 4; ++r) EXPECT_EQ(ranks.story(r), "ok");
}

TEST_F(CommShm, ARankThatExitsWithoutGoodbyeIsNamed) {
  Ranks ranks(2, [&](int r) {
    auto c = join(r, 2);
    if (r == 1) _exit(3);
    c->barrier("t");
  });
  EXPECT_THAT(ranks.story(0), HasSubstr(error_story(Errc::Comm, 1) + "rank 1 died"));
}

TEST_F(CommShm, AStoppedRankIsATimeoutThatSaysSo) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3, 1);
    for (;;) c->barrier("t");
  });
  std::this_thread::sleep_for(300ms);
  ranks.signal(2, SIGSTOP);
  const auto start = Clock::now();
  for (int r : {0, 1}) {
    const std::string story = ranks.story(r);
    EXPECT_THAT(story, HasSubstr(error_story(Errc::Timeout, 2) + "rank 2 did not arrive within 1 s"));
    EXPECT_THAT(story, HasSubstr("is stopped"));
  }
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(CommShm, AnErrorInOneProcessReachesTheOthers) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    try {
      for (int i = 0;; ++i) {
        c->barrier("t");
        if (r == 1 && i == 5) throw Error(Errc::Io, "disk on fire");
      }
    } catch (const Error& e) {
      c->abort(e);
      throw;
    }
  });
  EXPECT_THAT(ranks.story(1), HasSubstr("disk on fire"));
  for (int r : {0, 2}) EXPECT_EQ(ranks.story(r), error_story(Errc::Io, 1) + "rank 1 gave up: disk on fire");
}

TEST_F(CommShm, EndingEarlyIsNotDying) {
  Ranks ranks(3, [&](int r) {
    auto c = join(r, 3);
    double x = r;
    c->all_reduce(&x, 1, DType::F64, ReduceOp::Sum, "t").wait();
    if (r == 0) return;  // the others continue without it, longer than a look at its health takes
    std::this_thread::sleep_for((r - 1) * 700ms);
    if (r == 1) {
      c->recv(&x, 8, 2, "t").wait();
    } else {
      c->send(&x, 8, 1, "t").wait();
    }
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.story(r), "ok");
}

TEST_F(CommShm, AMissingRankIsNamed) {
  Ranks ranks(3, [&](int r) {
    if (r != 1) join(r, 3, 0.5);
  });
  for (int r : {0, 2}) {
    const std::string story = ranks.story(r);
    EXPECT_THAT(story, HasSubstr(error_story(Errc::Timeout, 1)));
    EXPECT_THAT(story, HasSubstr("has not attached"));
  }
}

TEST_F(CommShm, AMissingRankZeroIsNamed) {
  Ranks ranks(2, [&](int r) {
    if (r != 0) join(r, 2, 0.3);
  });
  EXPECT_THAT(ranks.story(1), HasSubstr(error_story(Errc::Timeout, 0) + "rank 0 did not arrive within 0.3 s"));
}

TEST_F(CommShm, TooLittleSharedMemoryIsAnErrorWithNumbers) {
  struct statvfs shm {};
  ASSERT_EQ(statvfs("/dev/shm", &shm), 0);
  const i64 too_much = align_up(narrow<i64>(shm.f_blocks * shm.f_frsize) + 1, i64{2} << 20);
  Ranks ranks(2, [&](int r) {
    auto c = join(r, 2);
    MemoryLedger ledger;
    c->allocate(ledger, Tag::Buckets, too_much);
  });
  for (int r = 0; r < 2; ++r) {
    const std::string story = ranks.story(r);
    EXPECT_THAT(story, HasSubstr(fmt::format("{} ", static_cast<int>(Errc::OutOfMemory))));
    EXPECT_THAT(story, HasSubstr(fmt::format("no {} bytes of shared memory for buckets", too_much)));
    EXPECT_THAT(story, HasSubstr("bytes of /dev/shm are free"));
  }
}

TEST_F(CommShm, EveryRankHearsOfTheSameFreeBytes) {
  Ranks ranks(3, [&](int r) {
    if (r == 1) std::this_thread::sleep_for(200ms);  // the others have taken some
    SharedFile told;
    const i64 free = shm_free_bytes(job_, r, 3, 20, told);
    auto c = join(r, 3);
    throw std::runtime_error(fmt::format("{} bytes", free));
  });
  const std::string first = ranks.story(0);
  EXPECT_THAT(first, HasSubstr(" bytes"));
  for (int r : {1, 2}) EXPECT_EQ(ranks.story(r), first);
  Ranks alone(2, [&](int r) {
    SharedFile told;
    if (r == 1) shm_free_bytes(job_, r, 2, 0.3, told);
  });
  EXPECT_THAT(alone.story(1), HasSubstr(error_story(Errc::Timeout, 0) + "rank 0 did not arrive within 0.3 s"));
}

TEST_F(CommShm, ATakenNameIsRefused) {
  SharedFile taken = SharedFile::create();
  ASSERT_TRUE(taken.link(fmt::format("{}{}", kJobPrefix, job_)));
  Ranks ranks(1, [&](int r) { join(r, 1); });
  EXPECT_THAT(ranks.story(0), HasSubstr("exists already"));
}

TEST_F(CommShm, AForeignSegmentDoesNotHang) {
  const auto story = [&] {
    return Ranks(2,
                 [&](int r) {
                   if (r == 1) join(r, 2, 0.3);
                 })
        .story(1);
  };
  SharedFile foreign = SharedFile::create();
  const int fd = foreign.descriptor();
  EXPECT_THAT(story(), HasSubstr("did not arrive within"));  // it has no name yet
  ASSERT_TRUE(foreign.link(fmt::format("{}{}", kJobPrefix, job_)));
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  EXPECT_THAT(story(), HasSubstr("has 4096 bytes"));
  ASSERT_EQ(ftruncate(fd, i64{64} << 20), 0);
  EXPECT_THAT(story(), HasSubstr("is not a segment of this version"));
  ASSERT_EQ(fchmod(fd, 0644), 0);
  EXPECT_THAT(story(), HasSubstr("refused"));
}

// Waits for a start that will never be whole, with what it shares.
void begin_to_start(const std::string& job) {
  SharedFile told;
  shm_free_bytes(job, 0, 2, 20, told);
  make_shm_communicator(job, 0, 2, {.timeout_s = 20});
}

TEST_F(CommShm, TheNextStartRemovesWhatADeadRankLeft) {
  Ranks ranks(1, [&](int) { begin_to_start(job_); });
  for (int i = 0; i < 5000 && segments_left(job_).size() < 2; ++i) std::this_thread::sleep_for(2ms);
  const auto start_another = [] {
    return Ranks(1, [&](int) { make_shm_communicator(random_job(), 0, 1, {}); }).story(0);
  };
  EXPECT_EQ(start_another(), "ok");
  EXPECT_THAT(segments_left(job_), ::testing::SizeIs(2));  // it lives
  ranks.signal(0, SIGKILL);
  ranks.story(0);
  EXPECT_THAT(segments_left(job_), ::testing::SizeIs(2));
  EXPECT_EQ(start_another(), "ok");
  // A job beside this test may have begun to remove one, and ends that; or it is killed, and the next start does.
  for (int i = 1; i <= 2000 && !segments_left(job_).empty(); ++i) {
    std::this_thread::sleep_for(2ms);
    if (i % 500 == 0) {
      EXPECT_EQ(start_another(), "ok");
    }
  }
  EXPECT_THAT(segments_left(job_), ::testing::IsEmpty());
}

TEST_F(CommShm, WhatLivesInAnotherNamespaceIsLeftAlone) {
  Ranks ranks(1, [&](int) {
    if (unshare(CLONE_NEWPID) != 0) throw std::runtime_error("skip");
    const pid_t first = fork();  // number 1 of its own numbers, which mean others here
    if (first == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      begin_to_start(job_);
      _exit(1);
    }
    waitpid(first, nullptr, 0);
  });
  for (int i = 0; i < 1000 && segments_left(job_).size() < 2; ++i) std::this_thread::sleep_for(2ms);
  if (segments_left(job_).empty()) GTEST_SKIP() << "no namespaces here";
  remove_abandoned();
  EXPECT_THAT(segments_left(job_), ::testing::SizeIs(2));
  ranks.signal(0, SIGKILL);
  for (int i = 0; i < 5000 && !segments_left(job_).empty(); ++i) {
    remove_abandoned();
    std::this_thread::sleep_for(2ms);
  }
}

TEST_F(CommShm, FilesOfOthersAreLeftAlone) {
  const std::string stem = shared_path(fmt::format("{}{}", kJobPrefix, job_));
  const std::string names[] = {shared_path("ds-" + job_), stem + "_x", stem + ".open"};
  for (const std::string& name : names) close(open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600));
  ASSERT_EQ(chmod(names[2].c_str(), 0644), 0);
  ASSERT_EQ(symlink(names[0].c_str(), (stem + ".link").c_str()), 0);
  remove_abandoned();
  for (const std::string& name : {names[0], names[1], names[2], stem + ".link"})
    EXPECT_EQ(unlink(name.c_str()), 0) << name;
}

TEST_F(CommShm, TwoProcessesCannotBeOneRank) {
  Ranks ranks(3, [&](int r) { join(std::min(r, 1), 3, 0.5); });
  const std::string first = ranks.story(1), second = ranks.story(2);
  EXPECT_THAT(first + second, HasSubstr("are rank 1"));
  EXPECT_THAT(ranks.story(0), HasSubstr(error_story(Errc::Timeout, 2)));
}

TEST(CommShmName, IsChecked) {
  for (const char* bad : {"", "a/b", "../x", "a b"}) EXPECT_THROW(make_shm_communicator(bad, 0, 1, {}), Error);
}

}  // namespace comm_shm_test
}  // namespace ds
