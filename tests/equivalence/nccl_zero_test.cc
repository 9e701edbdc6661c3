// SPDX-License-Identifier: Apache-2.0
// Training over a communicator of device memory is bit for bit training over one of host memory. On CPU devices, with a
// stand-in for NCCL.

#include <cstdlib>

#include "equivalence/training.h"

namespace ds::testing {
namespace nccl_zero_test {

constexpr i64 kSteps = 4;

// Rank 0's trace; world and dp are two communicators, as on GPUs.
Trace train_over(std::string_view backend, const Config& config, int ranks) {
  setenv("DS_NCCL_LIBRARY", DS_TEST_NCCL, 1);
  auto worlds = make_thread_communicators(ranks, {.timeout_s = 60});
  std::vector<Trace> traces(static_cast<size_t>(ranks));
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const size_t at = static_cast<size_t>(r);
      try {
        const auto device = make_cpu_device(*cpu_ops(), 1);
        const CommOptions options{.timeout_s = 60, .device = device.get()};
        Mesh mesh(std::move(worlds[at]), {.dp = ranks}, options, [&](Communicator& host, const CommOptions& o) {
          if (host.size() == 1) return make_device_self_communicator(host, o);
          return backend == "nccl" ? make_nccl_communicator(host, o) : make_staged_communicator(host, o);
        });
        traces[at] = train_on(*device, mesh, config, kSteps);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  threads.clear();
  return traces[0];
}

class DeviceStages : public ::testing::TestWithParam<std::tuple<const char*, int, i64, bool>> {};

TEST_P(DeviceStages, TrainAsOverHostMemory) {
  const auto& [backend, ranks, stage, bf16] = GetParam();
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    Config c = tiny_config(model, ranks, 2, stage);
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    c.zero.reduce_bucket_size = 9000;
    c.zero.allgather_bucket_size = 9000;
    const Trace want = train_threads(c, ranks, kSteps), got = train_over(backend, c, ranks);
    expect_same_training(got, want, fmt::format("{} stage {}", backend, stage));
    ASSERT_EQ(got.sent.size(), want.sent.size());
    for (const auto& [tag, count] : want.sent) {
      EXPECT_EQ(got.sent.at(tag).calls, count.calls) << tag;
      EXPECT_EQ(got.sent.at(tag).bytes, count.bytes) << tag;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, DeviceStages,
                         ::testing::Combine(::testing::Values("staged", "nccl"), ::testing::Values(2, 3),
                                            ::testing::Values(0, 1, 2, 3), ::testing::Bool()),
                         [](const auto& test) {
                           return fmt::format("{}_P{}_stage{}_{}", std::get<0>(test.param), std::get<1>(test.param),
                                              std::get<2>(test.param), std::get<3>(test.param) ? "bf16" : "fp32");
                         });

}  // namespace nccl_zero_test
}  // namespace ds::testing
