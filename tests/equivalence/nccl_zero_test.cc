// SPDX-License-Identifier: Apache-2.0
// Training over a communicator of device memory is bit for bit training over one of host memory. On CPU devices, with a
// stand-in for NCCL.

#include <cstdlib>

#include "equivalence/training.h"
#include "nccl_threads/queued_device.h"

namespace ds::testing {
namespace nccl_zero_test {

constexpr i64 kSteps = 4;

// Rank 0's trace, and logits of any rank; world and dp are two communicators, as on GPUs.
Trace train_over(std::string_view backend, const Config& config, int ranks) {
  setenv("DS_NCCL_LIBRARY", DS_TEST_NCCL, 1);
  auto worlds = make_thread_communicators(ranks, {.timeout_s = 60});
  std::vector<Trace> traces(static_cast<size_t>(ranks));
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const size_t at = static_cast<size_t>(r);
      try {
        const auto device = std::make_unique<test::QueuedDevice>(make_cpu_device(*cpu_ops(), 1));
        const CommOptions options{.timeout_s = 60, .device = device.get()};
        Mesh mesh(std::move(worlds[at]), mesh_shape(config, ranks), options,
                  [&](Communicator& host, const CommOptions& o) {
                    if (host.size() == 1) return make_device_self_communicator(host, o);
                    return backend == "nccl" ? make_nccl_communicator(host, o) : make_staged_communicator(host, o);
                  });
        try {
          traces[at] = train_on(*device, mesh, config, kSteps);
        } catch (const Error& e) {
          mesh.abort(e);
          throw;
        }
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << r << ": " << e.what();
      }
    });
  }
  threads.clear();
  for (const Trace& t : traces) {
    if (traces[0].logits.empty()) traces[0].logits = t.logits;  // of the stage that has them
  }
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

// Messages of the pipeline and of ring attention go from device to device, and the host runs ahead of them.
struct Linked {
  const char* name;
  int ranks;
  std::function<void(Config&)> change;
};

class LinkedRanks : public ::testing::TestWithParam<Linked> {};

TEST_P(LinkedRanks, TrainAsOverHostMemory) {
  const Linked& p = GetParam();
  for (const bool bf16 : {false, true}) {
    ModelConfig model = tiny_llama();
    model.layers = 8;
    Config c = tiny_config(model, 1, 6, 1);
    c.data.seq_length = 12;
    c.bf16.enabled = bf16;
    c.communication_data_type = wire_type_of(c.work_dtype());
    p.change(c);
    const Trace want = train_threads(c, p.ranks, kSteps), got = train_over("nccl", c, p.ranks);
    expect_same_training(got, want, p.name);
    for (const auto& [tag, count] : want.sent) {
      EXPECT_EQ(got.sent.at(tag).calls, count.calls) << tag;
      EXPECT_EQ(got.sent.at(tag).bytes, count.bytes) << tag;
    }
  }
}

Linked pipeline(const char* name, int stages, PipelineSchedule schedule, i64 chunks = 1) {
  return {name, stages, [=](Config& c) {
            c.pipeline.stages = stages;
            c.pipeline.schedule = schedule;
            c.pipeline.virtual_stages = chunks;
          }};
}

INSTANTIATE_TEST_SUITE_P(Messages, LinkedRanks,
                         ::testing::Values(pipeline("gpipe", 2, PipelineSchedule::GPipe),
                                           pipeline("one_f_one_b", 4, PipelineSchedule::OneFOneB),
                                           pipeline("interleaved", 2, PipelineSchedule::Interleaved, 2),
                                           pipeline("zb_h1", 3, PipelineSchedule::ZeroBubbleH1),
                                           pipeline("zb_v", 4, PipelineSchedule::ZeroBubbleV, 2),
                                           Linked{"dp_and_post_validated", 4,
                                                  [](Config& c) {
                                                    c.batch = {.train = 12, .micro = 2, .accumulation = 3};
                                                    c.pipeline.stages = 2;
                                                    c.pipeline.post_validate = true;
                                                    c.gradient_clipping = 1;
                                                  }},
                                           Linked{"ring", 3,
                                                  [](Config& c) {
                                                    c.sequence_parallel.size = 3;
                                                    c.sequence_parallel.mode = SequenceParallelMode::Ring;
                                                  }}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace nccl_zero_test
}  // namespace ds::testing
