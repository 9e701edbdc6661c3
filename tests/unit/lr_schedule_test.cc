// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules against golden values; W = 10 warm-up steps throughout.
#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <utility>

#include "base/json.h"

namespace ds {
namespace lr_schedule_test {

OptimizerConfig base(double lr) {
  OptimizerConfig o;
  o.lr = lr;
  return o;
}

std::string golden() {
  std::ifstream file(DS_TEST_DATA "/schedules.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// DeepSpeed's own classes and transformers' own functions, over ten thousand steps.
TEST(LrSchedule, IsThatOfTheOriginals) {
  const Json cases = Json::parse(golden());
  ASSERT_GT(cases.size(), 50u);
  for (const Json& c : cases) {
    SCOPED_TRACE(c.at("scheduler").dump());
    const Json text = {{"optimizer", {{"type", "AdamW"}, {"params", {{"lr", c.at("lr")}}}}},
                       {"scheduler", c.at("scheduler")}};
    const ConfigResult read = parse_config(text.dump(), "schedules.json", {}, 1, ConfigUse::Inspect);
    for (const Diagnostic& d : read.diagnostics) EXPECT_FALSE(d.key.starts_with("scheduler")) << to_string(d);
    const LrSchedule schedule(read.config.optimizer, read.config.scheduler);
    const bool moves = c.contains("beta_at");
    double lr_sum = 0, beta_sum = 0;
    for (i64 n = 0; n < 10000; ++n) {
      const double weight = static_cast<double>(n % 97 + 1);
      lr_sum += weight * schedule.lr_at(n - 1);
      const std::optional<Betas> betas = schedule.betas_at(n - 1);
      ASSERT_EQ(betas.has_value(), moves);
      if (moves) beta_sum += weight * betas->first;
    }
    // The absolute tolerance allows for one rounding of the quotient in a cosine over 10000 steps.
    const double least = 1e-15 * c.at("lr").get<double>();
    for (const Json& point : c.at("lr_at")) {
      const double want = point.at(1).get<double>();
      EXPECT_NEAR(schedule.lr_at(point.at(0).get<i64>() - 1), want, 1e-12 * want + least) << point.dump();
    }
    EXPECT_NEAR(lr_sum / c.at("lr_sum").get<double>(), 1, 1e-12);
    if (!moves) continue;
    for (const Json& point : c.at("beta_at"))
      EXPECT_NEAR(schedule.betas_at(point.at(0).get<i64>() - 1)->first, point.at(1).get<double>(), 1e-14);
    EXPECT_EQ(schedule.betas_at(4)->second, c.at("beta2").get<double>());
    EXPECT_NEAR(beta_sum / c.at("beta_sum").get<double>(), 1, 1e-12);
  }
}

// A warm-up of no steps, one step in all, ends before the beginning.
TEST(LrSchedule, FieldsOwnAtTheirEdges) {
  using T = SchedulerType;
  for (const T type : {T::Linear, T::Cosine, T::CosineRestarts, T::Wsd, T::InverseSqrt}) {
    SchedulerConfig s;
    s.type = type;
    s.warmup_num_steps = 0;
    s.total_num_steps = 4;
    s.decay_num_steps = 2;
    s.min_lr_ratio = 0.25;
    s.timescale = 1;
    const LrSchedule lr(base(2), s);
    EXPECT_EQ(lr.lr_at(-1), 2) << static_cast<int>(type);
    if (type == T::InverseSqrt) {
      EXPECT_EQ(lr.lr_at(14), 0.5);
      continue;
    }
    for (const i64 t : {3, 4, 5, 1000}) EXPECT_EQ(lr.lr_at(t), 0.5) << static_cast<int>(type) << " " << t;
    s.total_num_steps = s.decay_num_steps = 1;
    EXPECT_EQ(LrSchedule(base(2), s).lr_at(0), 0.5) << static_cast<int>(type);
    s.total_num_steps = s.decay_num_steps = 0;
    EXPECT_EQ(LrSchedule(base(2), s).lr_at(0), 0.5) << static_cast<int>(type);
    s.warmup_num_steps = 10;  // longer than the run
    EXPECT_EQ(LrSchedule(base(2), s).lr_at(4), 1) << static_cast<int>(type);
  }
}

using Point = std::pair<i64, double>;

SchedulerConfig scheduler(SchedulerType type, WarmupType warmup) {
  SchedulerConfig s;
  s.type = type;
  s.warmup_type = warmup;
  s.warmup_num_steps = 10;
  s.warmup_max_lr = 1;
  s.total_num_steps = 20;
  return s;
}

TEST(LrSchedule, ConstantWithoutScheduler) {
  const LrSchedule lr(base(3e-4), {});
  for (i64 t : {-1, 0, 1, 1000000}) EXPECT_EQ(lr.lr_at(t), 3e-4);
}

TEST(LrSchedule, WarmupLogMatchesGoldenValues) {
  const LrSchedule lr(base(1), scheduler(SchedulerType::WarmupLR, WarmupType::Log));
  for (auto [t, want] : {Point{-1, 0}, {0, 0}, {1, .30103}, {4, .69897}, {8, .954243}, {9, 1}, {10, 1}, {999, 1}})
    EXPECT_NEAR(lr.lr_at(t), want, 5e-7) << t;
}

TEST(LrSchedule, WarmupLinearMatchesGoldenValues) {
  const LrSchedule lr(base(1), scheduler(SchedulerType::WarmupLR, WarmupType::Linear));
  for (auto [t, want] : {Point{-1, 0}, {0, 0}, {1, .1}, {5, .5}, {9, .9}, {10, 1}}) EXPECT_DOUBLE_EQ(lr.lr_at(t), want);
}

TEST(LrSchedule, WarmupStartsAtItsMinimum) {
  SchedulerConfig s = scheduler(SchedulerType::WarmupLR, WarmupType::Linear);
  s.warmup_min_lr = 0.5;
  s.warmup_max_lr = 2.5;
  const LrSchedule lr(base(7), s);  // WarmupLR is absolute: the optimizer's lr plays no part
  for (auto [t, want] : {Point{-1, .5}, {0, .5}, {5, 1.5}, {10, 2.5}}) EXPECT_DOUBLE_EQ(lr.lr_at(t), want) << t;
}

// DeepSpeed's WarmupDecayLR: max(0, (20 - t) / (20 - 10)) from the end of the warm-up on.
TEST(LrSchedule, DecayMatchesGoldenValues) {
  SchedulerConfig s = scheduler(SchedulerType::WarmupDecayLR, WarmupType::Linear);
  const LrSchedule lr(base(7), s);
  for (auto [t, want] :
       {Point{-1, 0}, {0, 0}, {5, .5}, {9, .9}, {10, 1}, {11, .9}, {15, .5}, {19, .1}, {20, 0}, {99, 0}})
    EXPECT_DOUBLE_EQ(lr.lr_at(t), want) << t;
  s.warmup_min_lr = 0.5;
  s.warmup_max_lr = 2.5;
  s.warmup_type = WarmupType::Log;
  const LrSchedule from_half(base(7), s);
  for (auto [t, want] : {Point{-1, .5}, {0, .5}, {1, 1.10206}, {9, 2.5}, {10, 2.5}, {15, 1.5}, {20, .5}, {99, .5}})
    EXPECT_NEAR(from_half.lr_at(t), want, 5e-6) << t;
  s.total_num_steps = 5;  // before the warm-up ends
  EXPECT_EQ(LrSchedule(base(7), s).lr_at(12), 0.5);
}

TEST(LrSchedule, CosineMatchesGoldenValuesAsRatioOfTheBase) {
  const LrSchedule lr(base(2), scheduler(SchedulerType::WarmupCosineLR, WarmupType::Linear));
  for (auto [t, want] :
       {Point{-1, 0}, {0, 0}, {9, .9}, {10, .975531}, {14, .50005}, {19, .0001}, {20, .0001}, {99, .0001}})
    EXPECT_NEAR(lr.lr_at(t), 2 * want, 2e-6) << t;
}

TEST(LrSchedule, CosineOfASingleStepIsAtItsEndAtOnce) {
  for (const i64 total : {5, 10, 11}) {
    SchedulerConfig s = scheduler(SchedulerType::WarmupCosineLR, WarmupType::Linear);
    s.total_num_steps = total;
    EXPECT_NEAR(LrSchedule(base(1), s).lr_at(10), .0001, 1e-12) << total;
  }
}

TEST(LrSchedule, CosineWarmsUpFromItsMinimumRatio) {
  SchedulerConfig s = scheduler(SchedulerType::WarmupCosineLR, WarmupType::Linear);
  s.warmup_min_ratio = 0.2;
  const LrSchedule lr(base(1), s);
  EXPECT_EQ(lr.lr_at(-1), 0);  // before the first tick DeepSpeed has 0 whatever the ratio
  EXPECT_DOUBLE_EQ(lr.lr_at(0), 0.2);
  EXPECT_DOUBLE_EQ(lr.lr_at(5), 0.6);
}

TEST(LrSchedule, ShortWarmupCountsAsTwoSteps) {
  for (WarmupType type : {WarmupType::Log, WarmupType::Linear}) {
    SchedulerConfig s = scheduler(SchedulerType::WarmupLR, type);
    s.warmup_num_steps = 0;
    const LrSchedule lr(base(1), s);
    EXPECT_EQ(lr.lr_at(0), 0);
    EXPECT_DOUBLE_EQ(lr.lr_at(1), type == WarmupType::Log ? 1.0 : 0.5);
    EXPECT_EQ(lr.lr_at(2), 1);
  }
}

}  // namespace lr_schedule_test
}  // namespace ds
