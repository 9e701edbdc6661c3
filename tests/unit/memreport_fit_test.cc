// SPDX-License-Identifier: Apache-2.0
// The search for what fits, against every legal arrangement of a small world, one by one.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <set>

#include "ds/memreport.h"
#include "slow_set.h"

namespace ds::memreport {
namespace memreport_fit_test {

constexpr const char* kText =
    R"({"model": {"type": "llama", "vocab_size": 512, "max_position_embeddings": 64, "hidden_size": 64,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
        "data": {"seq_length": 32}, "bf16": {"enabled": true}, "train_batch_size": 16})";

// A configuration for so many ranks; `sound`: it is valid.
Source source(std::vector<std::string> overrides = {}, bool sound = true, int ranks = 8) {
  Source s;
  s.ranks = ranks;
  s.text = kText;
  s.name = "cfg";
  s.overrides = std::move(overrides);
  s.config = parse_config(kText, "cfg", s.overrides, ranks, ConfigUse::Inspect);
  EXPECT_EQ(s.config.ok(), sound) << (sound ? s.config.message() : "");
  return s;
}
const Hardware kHardware = Hardware::of_peaks({1e14, 1e12, 1e11, 1e10}, 4, "");

constexpr i64 kWorkspace = i64{64} << 20;  // of matrix products on a GPU

FitOptions options(i64 memory, size_t most = 100000) {
  return {
      .world = {.ranks = 8, .nodes = 2}, .device = DeviceKind::Cuda, .memory = memory, .host_memory = 0, .most = most};
}

struct Tried {
  i64 device_bytes;
  double tokens_per_s;
};

// Every legal combination of the keys that are searched, on two nodes.
std::vector<Tried> try_all(int ranks) {
  const World world{.ranks = ranks, .nodes = 2};
  std::vector<Tried> all;
  const auto look_at = [&](const std::vector<std::string>& keys) {
    const ConfigResult r = parse_config(kText, "cfg", keys, ranks, ConfigUse::Inspect);
    if (!r.ok()) return;
    all.push_back({predict(r.config, world, DeviceKind::Cuda).worst_group().device_bytes,
                   predict_time(r.config, world, DeviceKind::Cuda, kHardware).tokens_per_s});
  };
  const std::pair<const char*, int> schedules[] = {
      {"1f1b", 1}, {"zb-h1", 1}, {"interleaved", 2}, {"interleaved", 3}, {"interleaved", 4}, {"naive", 1}, {"zb-v", 2}};
  for (const int tp : {1, 2, 4}) {
    for (const int sp : {1, 2, 4}) {
      for (const int pp : {1, 2, 4, 8}) {
        if (tp * sp > ranks / 2 || ranks % (tp * sp * pp) != 0) continue;
        const int dp = ranks / (tp * sp * pp);
        for (const int stage : {0, 1, 2, 3}) {
          for (const int micro : {1, 2, 4, 8, 16}) {
            if (16 % (dp * micro) != 0 || (dp * sp == 1 && stage > 0)) continue;
            for (const char* recompute : {"none", "selective", "layer"}) {
              for (const bool rows : {false, true}) {
                if (rows && tp == 1) continue;
                for (const auto& [schedule, chunks] : schedules) {
                  if (pp == 1 && std::string(schedule) != "1f1b") continue;
                  const bool v = std::string_view(schedule) == "zb-v";
                  for (const char* limit : {"1", "0.75", "0.5"}) {
                    if (limit != std::string_view("1") && !(v && pp == 4)) continue;
                    look_at({fmt::format("tensor_parallel.tp_size={}", tp),
                             fmt::format("sequence_parallel_size={}", sp), fmt::format("pipeline.stages={}", pp),
                             fmt::format("pipeline.schedule={}", schedule),
                             fmt::format("pipeline.virtual_stages={}", chunks),
                             fmt::format("zero_optimization.stage={}", stage),
                             fmt::format("zero_optimization.overlap_comm={}", stage > 0),
                             fmt::format("train_micro_batch_size_per_gpu={}", micro),
                             fmt::format("activation_checkpointing.granularity={}", recompute),
                             fmt::format("tensor_parallel.sequence_parallel={}", rows),
                             fmt::format("pipeline.memory_limit={}", limit)});
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return all;
}

TEST(Fit, FindsTheFastestOfAllLegalArrangements) {
  const int ranks = test::in_slow_set() ? 8 : 4;
  const std::vector<Tried> all = try_all(ranks);
  for (const i64 memory : {i64{1} << 40, kWorkspace + (i64{24} << 20) / ranks, kWorkspace + (i64{16} << 20) / ranks}) {
    i64 num_fitting = 0;
    double best = 0;
    for (const Tried& t : all) {
      if (t.device_bytes > memory) continue;
      ++num_fitting;
      best = std::max(best, t.tokens_per_s);
    }
    ASSERT_GT(num_fitting, 0) << memory;
    FitOptions o = options(memory);
    o.world.ranks = ranks;
    const FitResult r = fit(source({}, true, ranks), o, kHardware);
    ASSERT_FALSE(r.fitting.empty()) << memory;
    EXPECT_DOUBLE_EQ(r.fitting.front().time.tokens_per_s, best) << memory;
    EXPECT_EQ(r.num_fitting, std::ssize(r.fitting));
    EXPECT_LE(r.num_fitting, num_fitting);  // it leaves out what computes more again than it must
    for (size_t i = 0; i < r.fitting.size(); ++i) {
      const Arrangement& a = r.fitting[i];
      EXPECT_LE(a.device_bytes, memory);
      EXPECT_EQ(a.micro * a.accumulation * a.mesh.dp, 16);
      EXPECT_EQ(a.mesh.world(), ranks);
      EXPECT_LE(a.mesh.tp * a.mesh.sp, ranks / 2) << "inside a node";
      if (i > 0) {
        EXPECT_GE(r.fitting[i - 1].time.tokens_per_s, a.time.tokens_per_s);
      }
    }
  }
}

// With post-validated steps there is one schedule more, which gains by them.
TEST(Fit, TriesZeroBubbleH2IfStepsArePostValidated) {
  const FitResult r = fit(source({"pipeline.post_validate=true"}), options(kWorkspace + (i64{3} << 20)), kHardware);
  std::set<PipelineSchedule> schedules;
  for (const Arrangement& a : r.fitting) schedules.insert(a.schedule);
  EXPECT_TRUE(schedules.contains(PipelineSchedule::ZeroBubbleH2));
  for (size_t i = 1; i < r.fitting.size(); ++i)
    EXPECT_GE(r.fitting[i - 1].time.tokens_per_s, r.fitting[i].time.tokens_per_s);
}

// The list is the same however much of it is asked for: an arrangement that is never looked at would be missing.
TEST(Fit, AShortListIsTheBeginningOfTheLongOne) {
  const FitResult all = fit(source(), options(kWorkspace + (i64{3} << 20)), kHardware);
  std::set<PipelineSchedule> schedules;
  for (const Arrangement& a : all.fitting) schedules.insert(a.schedule);
  EXPECT_EQ(schedules, (std::set{PipelineSchedule::OneFOneB, PipelineSchedule::Interleaved,
                                 PipelineSchedule::ZeroBubbleH1, PipelineSchedule::ZeroBubbleV}));
  for (const size_t most : {size_t{1}, size_t{4}, size_t{25}}) {
    if (most == 4 && !test::in_slow_set()) continue;
    const FitResult some = fit(source(), options(kWorkspace + (i64{3} << 20), most), kHardware);
    ASSERT_EQ(some.fitting.size(), most);
    for (size_t i = 0; i < most; ++i) EXPECT_EQ(some.fitting[i].keys, all.fitting[i].keys) << i;
  }
}

// A configuration that is not valid on these ranks keeps its batch and everything else that can stay.
TEST(Fit, ASourceThatCannotBeIsRearranged) {
  const auto unsound = [](std::vector<std::string> overrides) { return source(std::move(overrides), false); };
  const FitOptions plenty = options(kWorkspace + (i64{4} << 20), 3);
  for (const std::vector<std::string>& overrides :
       {std::vector<std::string>{"train_batch_size=12"},                        // for 8 ranks of data
        {"tensor_parallel.tp_size=3"},                                          // heads
        {"pipeline.stages=3"},                                                  // ranks
        {"train_micro_batch_size_per_gpu=4", "gradient_accumulation_steps=4"},  // 8 ranks of 16 are 128
        {"pipeline.stages=2", "pipeline.schedule=interleaved"}}) {              // of one chunk
    const Source s = unsound(overrides);
    ASSERT_TRUE(can_be_rearranged(s)) << overrides[0];
    const FitResult r = fit(s, plenty, kHardware);
    EXPECT_FALSE(r.present);
    EXPECT_FALSE(r.present_fits);
    EXPECT_THAT(r.why_not, ::testing::Not(::testing::IsEmpty()));
    ASSERT_EQ(r.fitting.size(), 3u) << overrides[0];
    EXPECT_EQ(arranged(s, r.fitting[0]).batch.train, overrides[0] == "train_batch_size=12" ? 12 : 16);
    ASSERT_TRUE(r.nearest);
    EXPECT_LE(r.nearest->keys.size(), 5u) << fmt::format("{}", fmt::join(r.nearest->keys, " "));
    EXPECT_THAT(text(r, plenty), ::testing::HasSubstr("it cannot be\n  "));
  }
  EXPECT_FALSE(can_be_rearranged(unsound({"train_batch_size=many"})));
  EXPECT_FALSE(can_be_rearranged(unsound({"tensor_parallel.tp_size=3", "no.such.key=1"})));
  // Without known ranks of data the size of a step is not known.
  const Source no_batch = unsound({"pipeline.stages=3", "train_batch_size=auto", "train_micro_batch_size_per_gpu=4"});
  EXPECT_TRUE(can_be_rearranged(no_batch));
  EXPECT_THROW(fit(no_batch, plenty, kHardware), Error);
}

// The second name of tensor parallelism, which written configurations contain too, prevents no arrangement.
TEST(Fit, TheSecondNameOfTensorParallelismYields) {
  const Source s = source({"tensor_parallel.tp_size=2", "tensor_parallel.autotp_size=2"});
  std::set<i64> degrees;
  for (const Arrangement& a : fit(s, options(kWorkspace + (i64{4} << 20)), kHardware).fitting)
    degrees.insert(a.mesh.tp);
  EXPECT_EQ(degrees, (std::set<i64>{1, 2, 4}));
}

// Settings of the batch that the source does not fix follow from the others and count as no change. A source that
// recomputes more than it must is near to arrangements that do so, too. Among arrangements with one change the fastest
// is chosen.
TEST(Fit, TheNearestChangesTheFewestSettings) {
  const auto nearest = [](const Source& s, i64 memory) {
    const FitResult r = fit(s, options(memory, 1), kHardware);
    return r.nearest ? r.nearest->keys : std::vector<std::string>{"none"};
  };
  const auto settings = [](const std::vector<std::string>& keys) {
    return std::ranges::count_if(keys, [](const std::string& k) {
      return !k.starts_with("zero_optimization.overlap") && !k.starts_with("reduce_");
    });
  };
  const i64 plenty = kWorkspace + (i64{4} << 20);
  EXPECT_THAT(nearest(source({"tensor_parallel.tp_size=3"}, false), plenty), ::testing::SizeIs(1));
  EXPECT_THAT(nearest(source({"pipeline.stages=3"}, false), plenty), ::testing::SizeIs(1));
  EXPECT_THAT(nearest(source({"train_micro_batch_size_per_gpu=4"}, false), plenty), ::testing::SizeIs(1));
  const Source again = source({"activation_checkpointing.granularity=layer", "train_micro_batch_size_per_gpu=2"});
  const i64 needed =
      predict(again.config.config, {.ranks = 8, .nodes = 2}, DeviceKind::Cuda).worst_group().device_bytes;
  const std::vector<std::string> keys = nearest(again, needed - 1);
  EXPECT_EQ(settings(keys), 1) << fmt::format("{}", fmt::join(keys, " "));
}

TEST(Fit, WhatIsLargestFitsAndMoreDoesNot) {
  const i64 memory = kWorkspace + (i64{3} << 20);
  const FitResult r = fit(source(), options(memory, 1), kHardware);
  const auto bytes = [&](std::vector<std::string> keys, i64 layers, i64 micro) {
    keys.push_back(fmt::format("model.num_hidden_layers={}", layers));
    if (micro > 0) {
      keys.push_back(fmt::format("train_micro_batch_size_per_gpu={}", micro));
      keys.push_back("train_batch_size=auto");
    }
    const Config c = source(keys).config.config;
    return predict(c, {.ranks = 8, .nodes = 2}, DeviceKind::Cuda).worst_group().device_bytes;
  };
  const Arrangement& best = r.fitting.front();
  EXPECT_GE(r.largest_micro, best.micro);
  EXPECT_LE(bytes(best.keys, 6, r.largest_micro), memory);
  EXPECT_GT(bytes(best.keys, 6, r.largest_micro + 1), memory);
  for (const LargestModel& m : {r.largest, r.largest_of_all}) {
    EXPECT_GE(m.layers, 6);
    EXPECT_LE(bytes(m.keys, m.layers, 0), memory);
    const Config c = source(m.keys).config.config;
    EXPECT_GT(bytes(m.keys, m.layers + 1, 0), memory);
  }
  EXPECT_GE(r.largest_of_all.layers, r.largest.layers);
}

TEST(Fit, WhatIsWrittenIsWhatWasFound) {
  const Source s = source({"seed=7"});
  const FitResult r = fit(s, options(kWorkspace + (i64{3} << 20), 3), kHardware);
  ASSERT_EQ(r.fitting.size(), 3u);
  for (const Arrangement& a : r.fitting) {
    const ConfigResult written = parse_config(resolved_json(arranged(s, a)), "written", {}, 8, ConfigUse::Inspect);
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
  const FitResult as_it_is = fit(source(), options(needed, 1), kHardware);
  EXPECT_TRUE(as_it_is.present_fits);
  EXPECT_FALSE(as_it_is.nearest);
  FitOptions watched = options(needed - 1, 1);
  std::vector<std::string> told;
  watched.on_progress = [&](std::string_view what) { told.emplace_back(what); };
  const FitResult r = fit(source(), watched, kHardware);
  EXPECT_THAT(told, ::testing::IsSupersetOf({"the fastest of them", "the nearest to the present one"}));
  EXPECT_TRUE(told.front().starts_with("arrangements: 1 of ")) << told.front();
  EXPECT_FALSE(r.present_fits);
  ASSERT_TRUE(r.present);
  EXPECT_EQ(r.present->device_bytes, needed);
  EXPECT_GE(r.largest.layers, 6);
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
  EXPECT_THAT(text(none, options(1000)), ::testing::HasSubstr("nothing fits"));
  FitOptions little_host = options(i64{1} << 40);
  little_host.host_memory = 1;  // beside GPUs there are copies of the state in it
  EXPECT_TRUE(fit(source(), little_host, kHardware).fitting.empty());
}

// From some length on, the time of a step is extrapolated from shorter ones: it grows as before.
TEST(Hardware, StepsOfAnyLength) {
  const World world{.ranks = 8, .nodes = 2};
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "interleaved", "gpipe", "naive"}) {
    for (const int stage : {0, 1, 3}) {
      SCOPED_TRACE(fmt::format("{}, stage {}", schedule, stage));
      const auto time = [&](i64 accumulation) {
        const ConfigResult r = parse_config(
            kText, "cfg",
            std::vector<std::string>{
                "pipeline.stages=4", fmt::format("pipeline.schedule={}", schedule),
                fmt::format(
                    "pipeline.virtual_stages={}",
                    schedule == std::string_view("interleaved") || schedule == std::string_view("zb-v") ? 2 : 1),
                fmt::format("zero_optimization.stage={}", stage), fmt::format("train_batch_size={}", 2 * accumulation),
                fmt::format("gradient_accumulation_steps={}", accumulation), "train_micro_batch_size_per_gpu=1"},
            8, ConfigUse::Inspect);
        EXPECT_TRUE(r.ok()) << r.message();
        return predict_time(r.config, world, DeviceKind::Cuda, kHardware);
      };
      const StepTime before = time(4092), last = time(4096), next = time(4100), far = time(4096 + 20000);
      const double slope = (last.step_s - before.step_s) / 4;
      // Work that is done once is spread over the passes; it makes the passes that fill the pipeline a little shorter.
      EXPECT_NEAR(next.step_s, last.step_s + 4 * slope, 1e-6 * last.step_s);
      EXPECT_NEAR(far.step_s, last.step_s + 20000 * slope, 1e-4 * far.step_s);
      EXPECT_NEAR(far.pipeline_s + far.communication_s + far.optimizer_s + far.publish_s, far.step_s,
                  1e-9 * far.step_s);
      for (const auto& [name, op] : next.ops) {
        const OpTime &earlier = last.ops.at(name), &first = before.ops.at(name);
        EXPECT_EQ(op.calls - earlier.calls, earlier.calls - first.calls) << name;
        EXPECT_NEAR(op.seconds, earlier.seconds + (earlier.seconds - first.seconds), 1e-9 * op.seconds) << name;
      }
      EXPECT_NEAR(next.bubble_fraction, last.bubble_fraction, 0.01 * last.bubble_fraction);
      EXPECT_NEAR(next.tokens_per_s * next.step_s, last.tokens_per_s * last.step_s / 4096 * 4100, 1e-6);
      EXPECT_NEAR(next.mfu * next.step_s, last.mfu * last.step_s / 4096 * 4100, 1e-9);
    }
  }
}

// Bytes are exact to the last one.
TEST(Fit, BytesOfLongStepsAreExact) {
  const int ranks = test::in_slow_set() ? 8 : 2;
  for (const int batch : {2 * ranks * 4500, 2 * ranks * 4501}) {
    const Source s =
        source({fmt::format("train_batch_size={}", batch), "train_micro_batch_size_per_gpu=2"}, true, ranks);
    FitOptions o = options(i64{1} << 40, 1);
    o.world.ranks = ranks;
    const FitResult r = fit(s, o, kHardware);
    ASSERT_TRUE(r.present);
    EXPECT_EQ(r.present->device_bytes, predict(s.config.config, o.world, DeviceKind::Cuda).worst_group().device_bytes);
  }
}

TEST(Hardware, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(Hardware::gpu("h1000"), Error);
  for (const std::string& name : Hardware::gpus()) EXPECT_GT(Hardware::gpu(name).flops, 1e14);
  // Ranks that talk over links of which nothing is known.
  const Hardware alone = Hardware::of_peaks({1e14, 1e12, 0, 0}, 8, "");
  EXPECT_THROW(predict_time(source().config.config, {.ranks = 8, .nodes = 1}, DeviceKind::Cuda, alone), Error);
}

}  // namespace memreport_fit_test
}  // namespace ds::memreport
