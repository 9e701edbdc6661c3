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

#include "../comm_exercise.h"

namespace ds {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::HasSubstr;

// What the ranks do, by name.
const std::map<std::string, void (*)()> kPrograms = {
    {"exercise", [] { test::exercise(*make_mpi_communicator({.timeout_s = 60}), 30001); }},
    {"inline", [] { test::exercise(*make_mpi_communicator({.timeout_s = 60, .progress_thread = false}), 3001); }},
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
       if (c->rank() == 1) std::this_thread::sleep_for(1500ms);
       c->barrier("meeting");
     }},
    {"left",
     [] {
       auto c = make_mpi_communicator({.timeout_s = 20});
       if (c->rank() != 1) c->barrier("t");
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
  std::ofstream(stories / getenv("OMPI_COMM_WORLD_RANK")) << story;
  // mpirun kills the others when the first one fails, so all stories are written before anybody exits.
  const auto stories_written = [&] {
    return std::distance(std::filesystem::directory_iterator(stories), std::filesystem::directory_iterator());
  };
  for (int i = 0; i < 2000 && stories_written() < atoi(getenv("OMPI_COMM_WORLD_SIZE")); ++i)
    std::this_thread::sleep_for(5ms);
  return story == "ok" ? 0 : 1;
}

class CommMpi : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "ds-comm-mpi-XXXXXX";
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

class CommMpiSizes : public CommMpi, public testing::WithParamInterface<int> {};
TEST_P(CommMpiSizes, PassTheExercise) {
  EXPECT_EQ(run("exercise", GetParam()), 0);
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(story(r), "ok");
}
INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiSizes, testing::Values(1, 2, 3, 4));

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
  const auto expected = fmt::format("{} 1: rank 1 did not come within 0.5 s", static_cast<int>(Errc::Timeout));
  for (int r = 0; r < 3; ++r) EXPECT_THAT(story(r), HasSubstr(expected));
}

TEST_F(CommMpi, ARankThatLeftIsNotWaitedFor) {
  const auto start = Clock::now();
  EXPECT_NE(run("left", 2), 0);
  EXPECT_THAT(story(0), HasSubstr("rank 1 has left"));
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(CommMpi, AKilledRankEndsTheJob) {
  const auto start = Clock::now();
  EXPECT_EQ(run("killed", 3), 128 + SIGKILL);
  EXPECT_LT(Clock::now() - start, 10s);
}

}  // namespace
}  // namespace ds

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--rank") return ds::run_rank(argv[2], argv[3]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
