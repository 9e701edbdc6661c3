// SPDX-License-Identifier: Apache-2.0
// The memory that an H200's ops held in measured runs, as predicted from the configurations of these runs; which calls
// cuDNN computes, on which GPUs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/json.h"
#include "ds/memreport.h"
#include "expect_error.h"
#include "mesh/from_config.h"
#include "plan/planned.h"
#include "plan/scratch.h"
#include "run/gpu_kernels.h"

namespace ds::testing {
namespace gpu_scratch_test {

GpuMeter meter_of(const Config& config, const GpuKernels& kernels) {
  const plan::Planned planned(config, mesh_shape(config, 1), 0, DeviceKind::Cuda);
  return plan::meter_run(config, planned.model, planned.plan, kernels);
}

Config config_of(const std::string& model, std::vector<std::string> overrides = {}) {
  overrides.emplace_back("device=cuda");
  const ConfigResult read =
      load_config(std::string(DS_TEST_DATA) + "/../../configs/gpu/" + model + ".json", overrides, 1);
  EXPECT_TRUE(read.ok()) << read.message();
  return read.config;
}

// tests/bench/results/h200: runs with our own attention and with cuDNN's, to the byte. cuda_bench measured the rate of
// products before, which needs no memory but the workspace.
TEST(GpuScratch, IsThatOfMeasuredRuns) {
  std::map<std::string, i64> measured;
  for (const char* file : {"first", "second"}) {
    std::ifstream in(std::string(DS_TEST_DATA) + "/../bench/results/h200/" + file + ".jsonl");
    for (std::string line; std::getline(in, line);) {
      const Json json = Json::parse(line);
      if (json.value("section", "") == "step") measured[json.at("of")] = json.at("scratch_bytes");
    }
  }
  int own = 0, by_cudnn = 0;
  for (const auto& [name, bytes] : measured) {
    SCOPED_TRACE(name);
    std::string model = name;
    std::vector<std::string> overrides;
    const auto has = [&](const std::string& suffix) {
      const size_t at = model.find(suffix);
      if (at == std::string::npos) return false;
      model.resize(at);
      return true;
    };
    const bool cudnn = has("-cudnn");
    if (has("-vocab50304")) overrides.emplace_back("model.vocab_size=50304");
    if (has("-offload")) {
      overrides.emplace_back("zero_optimization.stage=1");
      overrides.emplace_back("zero_optimization.offload_optimizer.device=cpu");
    }
    if (has("-graphs") || has("-autotune")) continue;
    const GpuMeter meter = meter_of(config_of(model, overrides), gpu_kernels(9, cudnn));
    EXPECT_EQ(meter.scratch_bytes(), bytes);
    EXPECT_EQ(meter.cudnn.size(), cudnn ? 2u : 0u) << "forward and backward";
    EXPECT_NE(meter.own_attention, cudnn);
    (cudnn ? by_cudnn : own) += 1;
  }
  EXPECT_EQ(by_cudnn, 6);
  EXPECT_GE(own, 7);
}

TEST(GpuScratch, CudnnServesAmpereAndHopper) {
  const Config config = config_of("gpt2-124m");
  for (const int capability : {7, 8, 9, 10, 12}) {
    const GpuKernels kernels = run::kernels_of(config, capability);
    EXPECT_EQ(kernels.cudnn, capability == 8 || capability == 9) << capability;
    EXPECT_EQ(kernels.products_bytes, i64{capability >= 9 ? 64 : 32} << 20);
  }
  Config own = config;
  own.cuda.attention = CudaAttention::Own;
  EXPECT_FALSE(run::kernels_of(own, 9).cudnn);
  Config fp32 = config;
  fp32.bf16.enabled = false;
  EXPECT_FALSE(run::kernels_of(fp32, 9).cudnn);
}

// A call that cuDNN does not support is reported with the reason, and cuDNN computes the others.
TEST(GpuScratch, TheMeterStatesWhatCudnnRefuses) {
  const auto refusal = [](std::vector<std::string> overrides) {
    const GpuMeter meter = meter_of(config_of("gpt2-124m", std::move(overrides)), gpu_kernels(9, true));
    EXPECT_EQ(meter.own_attention, meter.refusal != nullptr);
    return std::string(meter.refusal != nullptr ? meter.refusal : "");
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({"model.attn_pdrop=0.1"}), "dropout");
  EXPECT_EQ(refusal({R"(sparse_attention={"mode": "fixed"})"}), "sparse layout");
  EXPECT_EQ(refusal({"model.n_head=4"}), "a head dim that is no multiple of 8 up to 128");
  EXPECT_EQ(refusal({"bf16.enabled=false"}), "dtype");
  // Evaluations have no dropout, but use the kernels that their run trains with.
  EXPECT_TRUE(
      meter_of(config_of("gpt2-124m", {"model.attn_pdrop=0.1", "data.split=0.1"}), gpu_kernels(9, true)).cudnn.empty());
}

// A prediction of a run that would be refused is refused likewise.
TEST(GpuScratch, CudnnThatIsAskedForIsRequired) {
  const auto predicted = [](std::vector<std::string> overrides, int compute_capability) {
    overrides.emplace_back("cuda.attention=cudnn");
    return [=] {
      memreport::predict(config_of("gpt2-124m", overrides), {.compute_capability = compute_capability},
                         DeviceKind::Cuda);
    };
  };
  EXPECT_NO_THROW(predicted({}, 9)());
  expect_error(Errc::Unavailable, ::testing::HasSubstr("cuda.attention \"cudnn\""), predicted({}, 10));
  expect_error(Errc::Unavailable, ::testing::HasSubstr("of this run: dropout"), predicted({"model.attn_pdrop=0.1"}, 9));
}

// cuBLASLt multiplies with a scale for each block on Hopper alone.
TEST(GpuScratch, Fp8IsOfHopper) {
  const auto predicted = [](int compute_capability) {
    return [=] {
      memreport::predict(config_of("gpt2-124m", {"fp8.enabled=true"}), {.compute_capability = compute_capability},
                         DeviceKind::Cuda);
    };
  };
  EXPECT_NO_THROW(predicted(9)());
  for (const int other : {8, 10, 12})
    expect_error(Errc::Unavailable, ::testing::HasSubstr("fp8.enabled: the GPU has compute capability"),
                 predicted(other));
}

}  // namespace gpu_scratch_test
}  // namespace ds::testing
