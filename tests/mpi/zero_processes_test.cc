// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, over shared memory and over MPI, train as ranks in threads do, bit for bit: every ZeRO stage,
// bucket size, overlap and precision, with clipping, and fp16 with overflows; N of them with 4 micro-batches train as
// one rank does with 4 N. Each test starts itself under mpirun.

#include "mpi/processes.h"
#include "slow_set.h"

namespace ds::testing {
namespace zero_processes_test {

struct Precision {
  const char* name;
  bool bf16, fp16;
  i64 scale_power;
};
constexpr Precision kPrecisions[] = {
    {"fp32", false, false, 0}, {"bf16", true, false, 0}, {"fp16", false, true, 8}, {"overflow", false, true, 24}};

Config with_precision(Config c, const Precision& p) {
  c.bf16.enabled = p.bf16;
  c.fp16.enabled = p.fp16;
  c.fp16.initial_scale_power = p.scale_power;
  c.fp16.hysteresis = 1;
  c.communication_data_type = wire_type_of(c.work_dtype());
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
                         ::testing::Combine(::testing::Values("shm", "mpi"), test::values_of<int>({2, 3}, {4})),
                         [](const auto& test) {
                           return fmt::format("{}_P{}", std::get<0>(test.param), std::get<1>(test.param));
                         });

}  // namespace zero_processes_test
}  // namespace ds::testing
