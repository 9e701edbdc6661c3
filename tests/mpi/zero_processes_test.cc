// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, over shared memory and over MPI, train as ranks in threads do, bit for bit: every ZeRO stage,
// bucket size, overlap and precision, with clipping, and fp16 with overflows. Each test starts itself under mpirun.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "equivalence/training.h"

namespace ds::testing {
namespace {

constexpr i64 kSteps = 6;

struct Precision {
  const char* name;
  bool bf16, fp16;
  i64 scale_power;
};
constexpr Precision kPrecisions[] = {
    {"fp32", false, false, 0}, {"bf16", true, false, 0}, {"fp16", false, true, 8}, {"overflow", false, true, 24}};

class Processes : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  static bool is_rank() { return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr; }

  // This very test on `ranks` processes; what they print is printed.
  static int run_under_mpirun(int ranks) {
    const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
    const std::string filter = fmt::format("--gtest_filter={}.{}", info->test_suite_name(), info->name());
    const std::string self = std::filesystem::read_symlink("/proc/self/exe"), n = std::to_string(ranks);
    const std::string job = fmt::format("DS_TEST_JOB=zero-{}", ::getpid());
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

TEST_P(Processes, TrainAsThreadsDo) {
  const std::string backend = std::get<0>(GetParam());
  const int ranks = std::get<1>(GetParam());
  if (!is_rank()) {
    EXPECT_EQ(run_under_mpirun(ranks), 0);
    return;
  }
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const std::string job = std::getenv("DS_TEST_JOB");
  // Keeps MPI alive from the first communicator of the loop to the last, and the ranks together.
  const std::unique_ptr<Communicator> all = make_mpi_communicator({.timeout_s = 120});
  int number = 0;
  const auto connect = [&](bool overlap) {
    const CommOptions options{.timeout_s = 120, .progress_thread = overlap};
    if (backend == "mpi") return make_mpi_communicator(options);
    return make_shm_communicator(fmt::format("{}-{}", job, number++), rank, ranks, options);
  };
  for (const Precision& precision : kPrecisions) {
    const auto configure = [&](i64 stage, i64 bucket, bool overlap) {
      Config c = tiny_config(tiny_gpt2(), ranks, 1, stage);
      c.bf16.enabled = precision.bf16;
      c.fp16.enabled = precision.fp16;
      c.fp16.initial_scale_power = precision.scale_power;
      c.fp16.hysteresis = 1;
      c.communication_data_type = c.work_dtype();
      c.gradient_clipping = 0.5;  // below the first norms
      c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = bucket;
      c.zero.overlap_comm = overlap;
      return c;
    };
    const bool overflows = precision.scale_power > 16;
    const i64 steps = overflows ? 16 : kSteps;
    const Trace base = rank == 0 ? train_threads(configure(0, 7000, true), ranks, steps) : Trace{};
    all->barrier("base");
    if (rank == 0) {
      EXPECT_EQ(base.skipped.front(), overflows);
      EXPECT_FALSE(base.skipped.back());
      if (!overflows) {
        EXPECT_GT(base.norms.front(), 0.5);
      }
    }
    for (i64 stage = 0; stage <= 3; ++stage) {
      for (const i64 bucket : {i64{1000}, i64{500'000'000}}) {
        for (const bool overlap : {true, false}) {
          const Config c = configure(stage, bucket, overlap);
          const Trace t = train_rank(connect(overlap), c, steps, 1, *cpu_ops(), {});
          if (rank != 0) continue;
          expect_same_training(t, base,
                               fmt::format("{} stage {} bucket {} overlap {}", precision.name, stage, bucket, overlap));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, Processes,
                         ::testing::Combine(::testing::Values("shm", "mpi"), ::testing::Values(2, 3, 4)),
                         [](const auto& test) {
                           return fmt::format("{}_P{}", std::get<0>(test.param), std::get<1>(test.param));
                         });

}  // namespace
}  // namespace ds::testing
