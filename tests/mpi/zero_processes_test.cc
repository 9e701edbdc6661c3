// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, over shared memory and over MPI, train as ranks in threads do, bit for bit: every ZeRO stage,
// bucket size, overlap and precision, with clipping, and fp16 with overflows; N of them with 4 micro-batches train as
// one rank does with 4 N. Each test starts itself under mpirun.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "equivalence/training.h"

namespace ds::testing {
namespace {

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

// This rank of a test under mpirun.
class Rank {
 public:
  explicit Rank(std::string backend, int ranks) : backend_(std::move(backend)), ranks_(ranks) {}

  bool is_first() const { return rank_ == 0; }
  void wait_for_all() { all_->barrier("test"); }
  // What `config` trains on a new communicator; whole on every rank.
  Trace train(const Config& config, i64 steps) {
    const CommOptions options{.timeout_s = 120, .progress_thread = config.zero.overlap_comm};
    std::unique_ptr<Communicator> comm =
        backend_ == "mpi" ? make_mpi_communicator(options)
                          : make_shm_communicator(fmt::format("{}-{}", job_, number_++), rank_, ranks_, options);
    return train_rank(std::move(comm), config, steps, 1, *cpu_ops(), {});
  }

 private:
  std::string backend_, job_ = std::getenv("DS_TEST_JOB");
  int ranks_, rank_ = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK")), number_ = 0;
  // Keeps MPI alive from the first communicator of the test to the last, and the ranks together.
  std::unique_ptr<Communicator> all_ = make_mpi_communicator({.timeout_s = 120});
};

Config with_precision(Config c, const Precision& p) {
  c.bf16.enabled = p.bf16;
  c.fp16.enabled = p.fp16;
  c.fp16.initial_scale_power = p.scale_power;
  c.fp16.hysteresis = 1;
  c.communication_data_type = c.work_dtype();
  c.gradient_clipping = 0.5;  // below the first norms
  return c;
}

bool overflows(const Precision& p) { return p.scale_power > 16; }
i64 num_steps(const Precision& p) { return overflows(p) ? 16 : 6; }

void expect_clipping_and_skips(const Trace& base, const Precision& p) {
  EXPECT_EQ(base.skipped.front(), overflows(p));
  EXPECT_FALSE(base.skipped.back());
  if (!overflows(p)) {
    EXPECT_GT(base.norms.front(), 0.5);
  }
}

TEST_P(Processes, TrainAsThreadsDo) {
  const auto& [backend, ranks] = GetParam();
  if (!is_rank()) {
    EXPECT_EQ(run_under_mpirun(ranks), 0);
    return;
  }
  Rank self(backend, ranks);
  for (const Precision& precision : kPrecisions) {
    const auto configure = [&](i64 stage, i64 bucket, bool overlap) {
      Config c = with_precision(tiny_config(tiny_gpt2(), ranks, 1, stage), precision);
      c.zero.reduce_bucket_size = c.zero.allgather_bucket_size = bucket;
      c.zero.overlap_comm = overlap;
      return c;
    };
    const i64 steps = num_steps(precision);
    const Trace base = self.is_first() ? train_threads(configure(0, 7000, true), ranks, steps) : Trace{};
    self.wait_for_all();
    if (self.is_first()) expect_clipping_and_skips(base, precision);
    for (i64 stage = 0; stage <= 3; ++stage) {
      for (const i64 bucket : {i64{1000}, i64{500'000'000}}) {
        for (const bool overlap : {true, false}) {
          const Trace t = self.train(configure(stage, bucket, overlap), steps);
          if (!self.is_first()) continue;
          expect_same_training(t, base,
                               fmt::format("{} stage {} bucket {} overlap {}", precision.name, stage, bucket, overlap));
        }
      }
    }
  }
}

TEST_P(Processes, WithMicroBatchesTrainAsOneRankDoes) {
  const auto& [backend, ranks] = GetParam();
  if (!is_rank()) {
    EXPECT_EQ(run_under_mpirun(ranks), 0);
    return;
  }
  constexpr i64 kMicroBatches = 4;
  Rank self(backend, ranks);
  for (const Precision& precision : kPrecisions) {
    for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
      const auto configure = [&](int world, i64 stage, bool overlap) {
        Config c = with_precision(tiny_config(model, world, kMicroBatches * ranks / world, stage), precision);
        c.reduce_order = ReduceOrder::Micro;
        c.zero.reduce_bucket_size = 3000;
        c.zero.overlap_comm = overlap;
        return c;
      };
      const i64 steps = num_steps(precision);
      const Trace base = self.is_first() ? train_threads(configure(1, 0, false), 1, steps) : Trace{};
      self.wait_for_all();
      if (self.is_first()) expect_clipping_and_skips(base, precision);
      for (i64 stage = 0; stage <= 3; ++stage) {
        const Trace t = self.train(configure(ranks, stage, stage % 2 == 0), steps);
        if (!self.is_first()) continue;
        expect_same_training(t, base, fmt::format("{} {} stage {}", precision.name, model.hidden, stage));
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
