// SPDX-License-Identifier: Apache-2.0
// The search for what fits, against every legal arrangement of a small world, one by one.

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "ds/memreport.h"

namespace ds::memreport {
namespace {

constexpr const char* kText =
    R"({"model": {"type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "hidden_size": 64,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
        "data": {"seq_length": 32}, "bf16": {"enabled": true}, "train_batch_size": 16})";

Source source(std::vector<std::string> overrides = {}) {
  Source s;
  s.ranks = 8;
  s.text = kText;
  s.name = "cfg";
  s.overrides = std::move(overrides);
  s.config = parse_config(kText, "cfg", s.overrides, 8, ConfigUse::Inspect);
  EXPECT_TRUE(s.config.ok()) << s.config.message();
  return s;
}
const Hardware kHardware = Hardware::of_peaks({1e14, 1e12, 1e11, 1e10}, 4, "");

FitOptions options(i64 memory, size_t most = 100000) {
  return {
      .world = {.ranks = 8, .nodes = 2}, .device = DeviceKind::Cuda, .memory = memory, .host_memory = 0, .most = most};
}

// Whatever can be said with the keys that are searched, and is legal: the fastest that fits.
double best_of_all(i64 memory, i64& num_fitting) {
  double best = 0;
  for (const int tp : {1, 2, 4}) {
    for (const int sp : {1, 2, 4}) {
      for (const int pp : {1, 2, 4, 8}) {
        for (const int stage : {0, 1, 2, 3}) {
          for (const int micro : {1, 2, 4, 8, 16}) {
            for (const char* recompute : {"none", "selective", "layer"}) {
              for (const bool rows : {false, true}) {
                if (tp * sp > 4 || 8 % (tp * sp * pp) != 0 || (rows && tp == 1)) continue;
                const int dp = 8 / (tp * sp * pp);
                if (16 % (dp * micro) != 0 || (dp * sp == 1 && stage > 0)) continue;
                const std::vector<std::string> keys = {
                    fmt::format("tensor_parallel.tp_size={}", tp),
                    fmt::format("sequence_parallel_size={}", sp),
                    fmt::format("pipeline.stages={}", pp),
                    fmt::format("zero_optimization.stage={}", stage),
                    fmt::format("zero_optimization.overlap_comm={}", stage > 0),
                    fmt::format("train_micro_batch_size_per_gpu={}", micro),
                    fmt::format("activation_checkpointing.granularity={}", recompute),
                    fmt::format("tensor_parallel.sequence_parallel={}", rows)};
                const ConfigResult r = parse_config(kText, "cfg", keys, 8, ConfigUse::Inspect);
                if (!r.ok()) continue;
                const World world{.ranks = 8, .nodes = 2};
                if (predict(r.config, world, DeviceKind::Cuda).worst_group().device_bytes > memory) continue;
                ++num_fitting;
                best = std::max(best, predict_time(r.config, world, DeviceKind::Cuda, kHardware).tokens_per_s);
              }
            }
          }
        }
      }
    }
  }
  return best;
}

TEST(Fit, FindsTheFastestOfAllLegalArrangements) {
  for (const i64 memory : {i64{1} << 40, i64{3} << 20, i64{2} << 20}) {
    i64 num_fitting = 0;
    const double best = best_of_all(memory, num_fitting);
    ASSERT_GT(num_fitting, 0) << memory;
    const FitResult r = fit(source(), options(memory), kHardware);
    ASSERT_FALSE(r.fitting.empty()) << memory;
    EXPECT_DOUBLE_EQ(r.fitting.front().time.tokens_per_s, best) << memory;
    EXPECT_EQ(r.num_fitting, std::ssize(r.fitting));
    EXPECT_LE(r.num_fitting, num_fitting);  // it leaves out what computes more again than it must
    for (size_t i = 0; i < r.fitting.size(); ++i) {
      const Arrangement& a = r.fitting[i];
      EXPECT_LE(a.device_bytes, memory);
      EXPECT_EQ(a.micro * a.accumulation * a.mesh.dp, 16);
      EXPECT_EQ(a.mesh.world(), 8);
      EXPECT_LE(a.mesh.tp * a.mesh.sp, 4) << "inside a node";
      if (i > 0) {
        EXPECT_GE(r.fitting[i - 1].time.tokens_per_s, a.time.tokens_per_s);
      }
    }
  }
}

TEST(Fit, WhatIsWrittenIsWhatWasFound) {
  const Source s = source({"seed=7"});
  const FitResult r = fit(s, options(i64{3} << 20, 3), kHardware);
  ASSERT_EQ(r.fitting.size(), 3u);
  for (const Arrangement& a : r.fitting) {
    const ConfigResult written = parse_config(written_config(s, a), "written", {}, 8, ConfigUse::Inspect);
    ASSERT_TRUE(written.ok()) << written.message();
    EXPECT_EQ(written.config.seed, 7);
    const Prediction p = predict(written.config, {.ranks = 8, .nodes = 2}, DeviceKind::Cuda);
    EXPECT_EQ(p.worst_group().device_bytes, a.device_bytes);
    EXPECT_EQ(p.mesh, a.mesh);
  }
}

TEST(Fit, KnowsWhetherThePresentFitsAndWhatWould) {
  const Prediction p = predict(source().config.config, {.ranks = 8, .nodes = 2}, DeviceKind::Cuda);
  const i64 needed = p.worst_group().device_bytes;
  EXPECT_TRUE(fit(source(), options(needed, 1), kHardware).present_fits);
  const FitResult r = fit(source(), options(needed - 1, 1), kHardware);
  EXPECT_FALSE(r.present_fits);
  EXPECT_EQ(r.present.device_bytes, needed);
  EXPECT_GE(r.largest_layers, 6);
  EXPECT_FALSE(fit(source(), options(needed, 1), kHardware).nearest);
  // Its keys alone make the source so, and no single one of what fits has fewer.
  ASSERT_TRUE(r.nearest);
  const Source changed = source(r.nearest->keys);
  const Prediction q = predict(changed.config.config, {.ranks = 8, .nodes = 2}, DeviceKind::Cuda);
  EXPECT_EQ(q.worst_group().device_bytes, r.nearest->device_bytes);
  EXPECT_LT(r.nearest->device_bytes, needed);
  EXPECT_EQ(q.mesh, r.nearest->mesh);
  EXPECT_GE(r.nearest->keys.size(), 1u);
  EXPECT_LE(r.nearest->keys.size(), 3u);
  EXPECT_GE(r.largest_micro, r.fitting.front().micro);
  const FitResult none = fit(source(), options(1000), kHardware);
  EXPECT_TRUE(none.fitting.empty());
  EXPECT_THAT(text(none, options(1000)), testing::HasSubstr("nothing fits"));
  FitOptions little_host = options(i64{1} << 40);
  little_host.host_memory = 1;  // beside GPUs there are copies of the state in it
  EXPECT_TRUE(fit(source(), little_host, kHardware).fitting.empty());
}

TEST(Hardware, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(Hardware::gpu("h1000"), Error);
  for (const std::string& name : Hardware::gpus()) EXPECT_GT(Hardware::gpu(name).flops, 1e14);
  // Ranks that talk over links of which nothing is known.
  const Hardware alone = Hardware::of_peaks({1e14, 1e12, 0, 0}, 8, "");
  EXPECT_THROW(predict_time(source().config.config, {.ranks = 8, .nodes = 1}, DeviceKind::Cuda, alone), Error);
}

}  // namespace
}  // namespace ds::memreport
