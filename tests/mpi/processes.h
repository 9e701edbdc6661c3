// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tests whose ranks are processes: each starts itself under mpirun.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "equivalence/training.h"

namespace ds::testing {

// By backend, "shm" or "mpi", and number of ranks.
class Processes : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  static bool is_rank() { return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr; }

  // This very test on `ranks` processes; their output is printed.
  static int run_under_mpirun(int ranks) {
    const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string filter = fmt::format("--gtest_filter={}.{}", info->test_suite_name(), info->name());
    const std::string self = std::filesystem::read_symlink("/proc/self/exe"), n = std::to_string(ranks);
    const std::string job = fmt::format("DS_TEST_JOB=processes-{}", ::getpid());
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}) ::setenv(name, "1", 1);
      ::execlp("timeout", "timeout", "500", "mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1",
               "--mca", "mpi_yield_when_idle", "1", "-x", job.c_str(), "-n", n.c_str(), self.c_str(), filter.c_str(),
               nullptr);
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

// This rank of a test under mpirun.
class Rank {
 public:
  explicit Rank(std::string backend, int ranks) : backend_(std::move(backend)), ranks_(ranks) {}

  bool is_first() const { return rank_ == 0; }
  void wait_for_all() { all_->barrier("test"); }
  // Trains `config` on a new communicator; the trace is whole on every rank.
  Trace train(const Config& config, i64 steps, const Hooks& hooks = {}) {
    const CommOptions options{.timeout_s = 120, .progress_thread = config.zero.overlap_comm};
    std::unique_ptr<Communicator> comm =
        backend_ == "mpi" ? make_mpi_communicator(options)
                          : make_shm_communicator(fmt::format("{}-{}", job_, number_++), rank_, ranks_, options);
    return train_rank(std::move(comm), config, steps, 1, *cpu_ops(), hooks);
  }

 private:
  std::string backend_, job_ = std::getenv("DS_TEST_JOB");
  int ranks_, rank_ = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK")), number_ = 0;
  // Keeps MPI alive from the first communicator of the test to the last, and the ranks together.
  std::unique_ptr<Communicator> all_ = make_mpi_communicator({.timeout_s = 120});
};

}  // namespace ds::testing
