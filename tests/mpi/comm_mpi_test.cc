// SPDX-License-Identifier: Apache-2.0
// The mpi communicator under mpirun. The test program starts itself as the ranks; each rank writes what became of it to
// a file of its own.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "../compressed_exercise.h"
#include "../mesh_exercise.h"
#include "../slow_set.h"
#include "comm/make_communicator.h"

namespace ds {
namespace comm_mpi_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Members = std::vector<int>;

void run_mesh(const MeshShape& shape) {
  Mesh mesh(make_mpi_communicator({.timeout_s = 60}), shape, {.timeout_s = 60});
  test::exercise_mesh(mesh, 3001);
}

// As if every two ranks had a node.
std::unique_ptr<Communicator> compose(double timeout_s) {
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  return make_composed_communicator(fmt::format("composed-{}", getppid()), rank % 2, 2, 0, {.timeout_s = timeout_s});
}

void exchange_until_killed(Communicator& c) {
  for (int salt = 0;; ++salt) {
    if (salt == 20 && c.rank() == 2) kill(getpid(), SIGKILL);
    test::exercise_all_to_allv(c, {}, salt % 2 == 0 ? 1 << 20 : 100, salt);
  }
}

// The programs of the ranks, by name.
const std::map<std::string, void (*)()> kPrograms = {
    {"exercise",
     [] {
       const auto c = make_mpi_communicator({.timeout_s = 60});
       test::exercise(*c, c->size() > 4 ? 3001 : 30001);  // more ranks than processors take long
     }},
    {"compressed", [] { test::exercise_compressed(*make_mpi_communicator({.timeout_s = 60}), 1001); }},
    {"inline", [] { test::exercise(*make_mpi_communicator({.timeout_s = 60, .progress_thread = false}), 3001); }},
    {"composed", [] { test::exercise(*compose(60), 9001); }},
    {"composed_absent",
     [] {
       auto c = compose(2);
       c->barrier("t");
       if (c->rank() == 3) std::this_thread::sleep_for(5s);
       c->barrier("meeting");
     }},
    {"composed_killed",
     [] {
       auto c = compose(20);
       c->barrier("t");
       if (c->rank() == 2) kill(getpid(), SIGKILL);
       std::vector<float> x(4000000);
       for (;;) c->all_reduce(x.data(), std::ssize(x), DType::F32, ReduceOp::Sum, "t").wait();
     }},
    {"composed_mesh",
     [] {
       Mesh mesh(compose(60), {.dp = 2, .tp = 2}, {.timeout_s = 60});
       test::exercise_mesh(mesh, 3001);
     }},
    {"uneven",
     [] {
       const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
       make_composed_communicator("uneven", rank == 2 ? 0 : rank, rank == 2 ? 1 : 2, 0, {.timeout_s = 20});
     }},
    {"staging",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 60});
       test::exercise_reduce_scatter(*c, {}, {1000001, 5}, DType::F32, false, false, 1);
     }},
    {"twice",
     [] {
       auto first = make_mpi_communicator({.timeout_s = 20});
       auto second = make_mpi_communicator({.timeout_s = 20});
       first.reset();
       second->barrier("t");
     }},
    {"mismatch",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       double x = 0;
       if (c->rank() == 1) {
         c->broadcast(&x, 8, 0, "odd").wait();
       } else {
         c->all_reduce(&x, 1, DType::F64, ReduceOp::Sum, "even").wait();
       }
     }},
    {"slices",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       std::vector<std::byte> x(300), y(300);
       const std::vector<AllToAllSlice> out(3, {0, 50});
       std::vector<AllToAllSlice> in = {{0, 50}, {50, 50}, {100, 50}};
       if (c->rank() == 2) in[1].bytes = 0;
       c->all_to_allv(x.data(), out, y.data(), in, "t").wait();
     }},
    {"killed_uneven", [] { exchange_until_killed(*make_mpi_communicator({.timeout_s = 20})); }},
    {"composed_killed_uneven", [] { exchange_until_killed(*compose(20)); }},
    {"composed_slices",
     [] {
       auto c = compose(20);
       std::vector<std::byte> x(400), y(400);
       const std::vector<AllToAllSlice> out(4, {0, 50});
       std::vector<AllToAllSlice> in = {{0, 50}, {50, 50}, {100, 50}, {150, 50}};
       if (c->rank() == 2) in[1].bytes = 0;
       c->all_to_allv(x.data(), out, y.data(), in, "t").wait();
     }},
    {"abort",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       try {
         c->barrier("t");
         if (c->rank() == 1) throw Error(Errc::Io, "disk on fire");
         c->barrier("t");
       } catch (const Error& e) {
         c->abort(e);
         throw;
       }
     }},
    {"looking",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       c->barrier("t");
       if (c->rank() == 1) {
         const Error e(Errc::Io, "disk on fire");
         c->abort(e);
         throw e;
       }
       for (;; std::this_thread::sleep_for(1ms)) c->look_for_failures();
     }},
    {"staged",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 60});
       const auto device = make_cpu_device(*cpu_ops(), 1);
       test::exercise(*make_staged_communicator(*world, {.device = device.get()}), 9001);
     }},
    {"absent",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 0.5});
       // On a busy machine, time in which the other ranks did not run does not count.
       if (c->rank() == 1) std::this_thread::sleep_for(3s);
       c->barrier("meeting");
     }},
    {"stopped",  // a rank whose limit passes while it does not run
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       const bool stops = world->rank() == 1;
       const auto c = world->group(Members{0, 1}, "pair", {.timeout_s = stops ? 1.0 : 20.0});
       std::vector<float> all(i64{8} << 20);
       world->barrier("t");
       const pid_t rank = getpid(), stopper = stops ? fork() : 0;
       if (stops && stopper == 0) {
         for (int i = 0; i < 3; ++i) {
           usleep(200'000);
           kill(rank, SIGSTOP);
           usleep(1'500'000);
           kill(rank, SIGCONT);
         }
         _exit(0);
       }
       for (i64 done = 0; done == 0;) {
         const AllGatherSegment s{all.data(), std::ssize(all) * 2};
         c->all_gather({&s, 1}, "t").wait();
         done = stops && waitpid(stopper, nullptr, WNOHANG) == stopper;
         c->all_reduce(&done, 1, DType::I64, ReduceOp::Sum, "t").wait();
       }
     }},
    {"left",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       if (c->rank() != 1) c->barrier("t");
     }},
    {"mesh_dp3_tp2", [] { run_mesh({.dp = 3, .tp = 2}); }},
    {"mesh_dp2_pp2_tp2", [] { run_mesh({.dp = 2, .pp = 2, .tp = 2}); }},
    {"groups",  // of turned order, of groups, made again, left in any order
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       auto rest = world->rank() == 0 ? nullptr : world->group(Members{3, 1, 2}, "turned", {.timeout_s = 20});
       for (int i = 0; i < 10; ++i) {
         const int peer = world->rank() ^ (1 + i % 3);
         const Members pair = {std::min(world->rank(), peer), std::max(world->rank(), peer)};
         const auto c = world->group(pair, "pair", {.timeout_s = 20});
         test::exercise_ring(*c, 1000, i + 10 * pair[0]);
         if (world->rank() == i % 4) rest.reset();
       }
       rest.reset();
       world->barrier("t");
       const auto outer = world->group(Members{3, 2, 1, 0}, "outer", {.timeout_s = 20});
       const auto inner = outer->group(outer->rank() < 2 ? Members{0, 1} : Members{3, 2}, "inner", {.timeout_s = 20});
       i64 sum = world->rank();
       inner->all_reduce(&sum, 1, DType::I64, ReduceOp::Sum, "t").wait();
       test::require(sum == (world->rank() >= 2 ? 5 : 1), "sum of a group of a group");
       test::require(inner->world_rank(0) == (world->rank() >= 2 ? 3 : 0), "world_rank");
     }},
    {"group_abort",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       const auto c = world->group(world->rank() < 2 ? Members{0, 1} : Members{3, 2}, "pair", {.timeout_s = 20});
       const auto alone = world->group(Members{world->rank()}, "alone", {.timeout_s = 20});
       world->barrier("t");
       i64 x = 0;
       if (world->rank() == 3) {
         std::this_thread::sleep_for(100ms);
         const Error e(Errc::Io, "disk on fire");
         c->abort(e);
         throw e;
       }
       if (world->rank() == 0) c->recv(&x, 8, 1, "t").wait();
       if (world->rank() == 1)
         for (;; std::this_thread::sleep_for(1ms)) alone->barrier("t");
       c->barrier("t");
     }},
    {"group_mismatch",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       if (world->rank() == 0) return world->barrier("t");
       const auto c = world->group(Members{3, 2, 1}, "tp", {.timeout_s = 20});
       i64 x = 0;
       if (world->rank() == 2) {
         c->broadcast(&x, 8, 0, "odd").wait();
       } else {
         c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "even").wait();
       }
     }},
    {"other_group",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       if (world->rank() == 0) return world->barrier("t");
       world->group(world->rank() == 2 ? Members{2, 1} : Members{1, 2}, "tp", {.timeout_s = 20});
     }},
    {"group_absent",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       const auto c = world->rank() == 0 ? nullptr : world->group(Members{1, 2, 3}, "tp", {.timeout_s = 1});
       world->barrier("t");
       if (world->rank() == 2) std::this_thread::sleep_for(2500ms);
       (c ? *c : *world).barrier("meeting");
     }},
    {"group_not_made",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       world->barrier("t");
       if (world->rank() % 2 == 1) world->group(Members{1, 2, 3}, "tp", {.timeout_s = 1});
       world->barrier("t");
     }},
    {"group_left",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       auto c = world->rank() == 0 ? nullptr : world->group(Members{1, 2, 3}, "tp", {.timeout_s = 20});
       if (world->rank() == 2) c.reset();
       (c ? *c : *world).barrier("t");
     }},
    {"group_killed",
     [] {
       auto world = make_mpi_communicator({.timeout_s = 20});
       const auto c = world->group(world->rank() < 2 ? Members{0, 1} : Members{2}, "tp", {.timeout_s = 20});
       world->barrier("t");
       if (world->rank() == 2) raise(SIGKILL);
       if (world->rank() == 0) std::this_thread::sleep_for(60s);
       c->barrier("t");
     }},
    {"killed",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       for (int i = 0;; ++i) {
         c->barrier("t");
         if (c->rank() == 1 && i == 10) raise(SIGKILL);
       }
     }},
};

int run_rank(const std::string& program, const std::filesystem::path& stories) {
  std::string story = "ok";
  try {
    kPrograms.at(program)();
  } catch (const Error& e) {
    story = fmt::format("{} {}: {}", static_cast<int>(e.code()), e.rank(), e.what());
  } catch (const std::exception& e) {
    story = e.what();
  }
  const std::filesystem::path own = stories / getenv("OMPI_COMM_WORLD_RANK"),
                              draft = stories.string() + "." + own.filename().string();
  std::ofstream(draft) << story;
  std::filesystem::rename(draft, own);  // who sees it sees all of it
  // mpirun kills the others when the first one fails, so all stories are written before anybody exits.
  const auto stories_written = [&] {
    return std::distance(std::filesystem::directory_iterator(stories), std::filesystem::directory_iterator());
  };
  for (int i = 0; i < 2000 && stories_written() < atoi(getenv("OMPI_COMM_WORLD_SIZE")); ++i)
    std::this_thread::sleep_for(5ms);
  return story == "ok" ? 0 : 1;
}

class CommMpi : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "ds-comm-mpi-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    stories_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(stories_); }

  // Runs the program on `size` ranks; its exit status.
  int run(const std::string& program, int size) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) setenv(name, "1", 1);
      const int quiet = open("/dev/null", O_RDWR);
      for (int fd : {0, 1, 2}) dup2(quiet, fd);
      const std::string n = std::to_string(size), self = std::filesystem::read_symlink("/proc/self/exe");
      execlp("timeout", "timeout", "60", "mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "-n",
             n.c_str(), self.c_str(), "--rank", program.c_str(), stories_.c_str(), nullptr);
      _exit(127);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WEXITSTATUS(status);
  }
  std::string story(int rank) const {
    std::ostringstream text;
    text << std::ifstream(stories_ / std::to_string(rank)).rdbuf();
    return text.str();
  }

  std::filesystem::path stories_;
};

class CommMpiSizes : public CommMpi, public ::testing::WithParamInterface<int> {};
TEST_P(CommMpiSizes, PassTheExercise) {
  EXPECT_EQ(run("exercise", GetParam()), 0);
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(story(r), "ok");
}
TEST_P(CommMpiSizes, PassTheCompressedExercise) {
  EXPECT_EQ(run("compressed", GetParam()), 0);
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(story(r), "ok");
}
INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiSizes, test::values_of<int>({1, 2, 4}, {3, 5, 6, 7, 8}));

TEST_F(CommMpi, ComposedWithSharedMemoryPassesTheExercise) {
  EXPECT_EQ(run("composed", 4), 0);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(story(r), "ok");
  EXPECT_EQ(run("composed_mesh", 4), 0);
  EXPECT_EQ(story(3), "ok");
}

TEST_F(CommMpi, AnAbsentRankOfAnotherNodeIsNamed) {
  EXPECT_NE(run("composed_absent", 4), 0);
  for (int r = 0; r < 4; ++r) EXPECT_THAT(story(r), HasSubstr(" 3: rank 3 did not arrive within")) << r;
}

TEST_F(CommMpi, TheDeathOfARankOfAnotherNodeEndsTheJob) { EXPECT_EQ(run("composed_killed", 4), 137); }

TEST_F(CommMpi, NodesOfUnequalSizesAreRefused) {
  EXPECT_NE(run("uneven", 3), 0);
  for (int r = 0; r < 3; ++r) EXPECT_THAT(story(r), HasSubstr("equal numbers of ranks on every node"));
}

TEST_F(CommMpi, WorksWithoutProgressThread) {
  EXPECT_EQ(run("inline", 2), 0);
  EXPECT_EQ(story(0), "ok");
}

TEST_F(CommMpi, LargeFoldsGoInRounds) {
  EXPECT_EQ(run("staging", 3), 0);
  EXPECT_EQ(story(2), "ok");
}

TEST_F(CommMpi, TheLastCommunicatorFinalises) { EXPECT_EQ(run("twice", 2), 0); }

TEST_F(CommMpi, MismatchedCallsAreAnErrorOnAllRanks) {
  EXPECT_NE(run("mismatch", 3), 0);
  for (int r = 0; r < 3; ++r) EXPECT_THAT(story(r), HasSubstr("rank 1 calls broadcast \"odd\""));
}

TEST_F(CommMpi, MismatchedSlicesNameBothRanksAndSizesOnAllRanks) {
  for (const auto& [program, ranks] : {std::pair{"slices", 3}, {"composed_slices", 4}}) {
    EXPECT_NE(run(program, ranks), 0);
    for (int r = 0; r < ranks; ++r) {
      EXPECT_THAT(story(r), HasSubstr(" 1: sizes do not match: rank 1 sends 50 bytes to rank 2, which expects 0"));
      std::filesystem::remove(stories_ / std::to_string(r));
    }
  }
}

TEST_F(CommMpi, TheDeathOfARankInAnUnevenExchangeEndsTheJob) {
  EXPECT_EQ(run("killed_uneven", 3), 137);
  EXPECT_EQ(run("composed_killed_uneven", 4), 137);
}

TEST_F(CommMpi, AnAbortReachesThePeersWithItsReason) {
  EXPECT_NE(run("abort", 3), 0);
  EXPECT_THAT(story(1), HasSubstr("disk on fire"));
  for (int r : {0, 2}) {
    EXPECT_EQ(story(r), fmt::format("{} 1: rank 1 gave up: disk on fire", static_cast<int>(Errc::Io)));
  }
}

TEST_F(CommMpi, AnAbortIsNoticedByWhoOnlyLooks) {
  EXPECT_NE(run("looking", 2), 0);
  EXPECT_EQ(story(0), fmt::format("{} 1: rank 1 gave up: disk on fire", static_cast<int>(Errc::Io)));
}

TEST_F(CommMpi, CarriesTheStagedCommunicator) {
  EXPECT_EQ(run("staged", 2), 0);
  for (int r : {0, 1}) EXPECT_EQ(story(r), "ok");
}

TEST_F(CommMpi, AnAbsentRankIsATimeoutThatNamesIt) {
  EXPECT_NE(run("absent", 3), 0);
  const auto expected = fmt::format("{} 1: rank 1 did not arrive within 0.5 s", static_cast<int>(Errc::Timeout));
  for (int r = 0; r < 3; ++r) EXPECT_THAT(story(r), HasSubstr(expected));
}

TEST_F(CommMpi, ARankThatDidNotRunForLongBlamesNobody) {
  EXPECT_EQ(run("stopped", 2), 0);
  for (int r : {0, 1}) EXPECT_EQ(story(r), "ok");
}

TEST_F(CommMpi, ARankThatLeftIsNotWaitedFor) {
  const auto start = Clock::now();
  EXPECT_NE(run("left", 2), 0);
  EXPECT_THAT(story(0), HasSubstr("rank 1 has left"));
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(CommMpi, AllAxesOfAMeshWorkAtOnce) {
  EXPECT_EQ(run("mesh_dp3_tp2", 6), 0);
  for (int r = 0; r < 6; ++r) EXPECT_EQ(story(r), "ok");
}

TEST_F(CommMpi, AllAxesOfADeeperMeshWorkAtOnce) {
  EXPECT_EQ(run("mesh_dp2_pp2_tp2", 8), 0);
  for (int r = 0; r < 8; ++r) EXPECT_EQ(story(r), "ok");
}

TEST_F(CommMpi, GroupsComeAndGo) {
  EXPECT_EQ(run("groups", 4), 0);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(story(r), "ok");
}

TEST_F(CommMpi, AnAbortInAGroupEndsTheWaitsInOthers) {
  EXPECT_NE(run("group_abort", 4), 0);
  EXPECT_THAT(story(3), HasSubstr("disk on fire"));
  for (int r : {0, 1, 2})
    EXPECT_EQ(story(r), fmt::format("{} 3: rank 3 gave up: disk on fire", static_cast<int>(Errc::Io)));
}

TEST_F(CommMpi, AMismatchInAGroupNamesRanksOfTheWorld) {
  EXPECT_NE(run("group_mismatch", 4), 0);
  for (int r = 0; r < 4; ++r)
    EXPECT_THAT(story(r), HasSubstr("of group \"tp\": rank 3 calls all_reduce \"even\" (call 1, 1 segments, 8 bytes "
                                    "per slice, int64), rank 2 calls broadcast \"odd\" (call 1"));
}

TEST_F(CommMpi, GroupsThatDoNotMatchAreAnError) {
  EXPECT_NE(run("other_group", 3), 0);
  for (int r = 0; r < 3; ++r) EXPECT_THAT(story(r), HasSubstr("groups do not match"));
}

TEST_F(CommMpi, AnAbsentMemberIsATimeoutThatNamesIt) {
  for (const char* program : {"group_absent", "group_not_made"}) {
    EXPECT_NE(run(program, 4), 0);
    const auto expected = fmt::format("{} 2: rank 2 did not arrive within 1 s", static_cast<int>(Errc::Timeout));
    for (int r = 0; r < 4; ++r) EXPECT_THAT(story(r), AllOf(HasSubstr(expected), HasSubstr("\"tp\"")));
    for (int r = 0; r < 4; ++r) std::filesystem::remove(stories_ / std::to_string(r));
  }
}

TEST_F(CommMpi, ARankThatLeftAGroupIsNotWaitedForThere) {
  const auto start = Clock::now();
  EXPECT_NE(run("group_left", 4), 0);
  for (int r = 0; r < 4; ++r) EXPECT_THAT(story(r), HasSubstr("rank 2 has left"));
  EXPECT_LT(Clock::now() - start, 15s);
}

TEST_F(CommMpi, AKilledRankEndsGroupsItIsNotIn) {
  const auto start = Clock::now();
  EXPECT_EQ(run("group_killed", 3), 128 + SIGKILL);
  EXPECT_LT(Clock::now() - start, 15s);
}

TEST_F(CommMpi, AKilledRankEndsTheJob) {
  const auto start = Clock::now();
  EXPECT_EQ(run("killed", 3), 128 + SIGKILL);
  EXPECT_LT(Clock::now() - start, 10s);
}

}  // namespace comm_mpi_test
}  // namespace ds

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--rank") return ds::comm_mpi_test::run_rank(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
