// SPDX-License-Identifier: Apache-2.0
// The lengths that steps of a run have: those of its schedules, step by step, whatever these are.

#include "plan/step_lengths.h"

#include <gtest/gtest.h>

#include "config/curriculum.h"
#include "config/random_ltd.h"

namespace ds {
namespace step_lengths_test {

using plan::PassLengths;
using plan::StepLengths;

Config grows(i64 whole, i64 min, i64 max, i64 total, i64 step_size) {
  Config c;
  c.data.seq_length = whole;
  c.curriculum = {.enabled = true, .min_difficulty = min, .max_difficulty = max};
  c.curriculum.total_curriculum_step = total;
  c.curriculum.difficulty_step = step_size;
  return c;
}
void drop(Config& c, i64 min, i64 max, i64 steps, i64 multiple) {
  RandomLtdConfig& ltd = c.random_ltd;
  ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
  ltd.min_value = min, ltd.max_value = max, ltd.require_steps = steps, ltd.seq_per_step = multiple;
}

PassLengths of_step(const Config& c, i64 step) {
  PassLengths l{.sequence = c.data.seq_length, .kept = 0};
  if (c.curriculum.enabled) l.sequence = std::min(l.sequence, curriculum_length(c.curriculum, step));
  if (c.random_ltd.on()) l.kept = random_ltd_kept(c.random_ltd, step);
  if (l.kept >= l.sequence) l.kept = 0;
  return l;
}

void expect_all(const Config& c, i64 steps) {
  std::vector<StepLengths::Kind> want;
  for (i64 step = 1; step <= steps; ++step) {
    const PassLengths l = of_step(c, step);
    EXPECT_EQ(plan::lengths_of_step(c, step), l);
    auto kind = std::ranges::find(want, l, &StepLengths::Kind::lengths);
    if (kind == want.end()) kind = want.insert(kind, {l, 0});
    ++kind->steps;
  }
  const StepLengths got = plan::step_lengths(c, steps);
  EXPECT_TRUE(got.complete);
  ASSERT_EQ(got.kinds.size(), want.size());
  for (size_t k = 0; k < want.size(); ++k) {
    EXPECT_EQ(got.kinds[k].lengths, want[k].lengths);
    EXPECT_EQ(got.kinds[k].steps, want[k].steps);
  }
}

TEST(StepLengths, AreThoseOfEachStep) {
  Config whole;
  whole.data.seq_length = 100;
  expect_all(whole, 7);
  for (const i64 steps : {1, 5, 30, 200}) {
    Config c = grows(100, 8, 100, 40, 8);
    expect_all(c, steps);
    c.curriculum.schedule = CurriculumSchedule::FixedRoot;
    c.curriculum.root_degree = 2;
    expect_all(c, steps);
    c.curriculum.max_difficulty = 300;  // beyond whole sequences
    expect_all(c, steps);
    drop(c, 4, 90, 60, 3);
    expect_all(c, steps);
    c.curriculum.enabled = false;
    expect_all(c, steps);
    // Lengths of a list may shrink, and come again.
    c.curriculum = {.enabled = true, .schedule = CurriculumSchedule::FixedDiscrete};
    c.curriculum.difficulty = {50, 20, 120, 50};
    c.curriculum.max_step = {3, 9, 40};
    expect_all(c, steps);
    c.random_ltd = {};
    expect_all(c, steps);
    EXPECT_EQ(plan::step_lengths(plan::of_whole_sequences(c), steps).kinds.size(), 1u);
  }
}

TEST(StepLengths, AreSomeOfVeryMany) {
  const Config c = grows(1 << 20, 1, 1 << 20, 1'000'000'000, 1);
  const StepLengths some = plan::step_lengths(c, 1'000'000'007);
  EXPECT_FALSE(some.complete);
  ASSERT_EQ(std::ssize(some.kinds), StepLengths::kMost);
  i64 steps = 0;
  for (const StepLengths::Kind& k : some.kinds) steps += k.steps;
  EXPECT_EQ(steps, 1'000'000'007);
  EXPECT_EQ(some.kinds.back().lengths, (PassLengths{1 << 20, 0}));
}

}  // namespace step_lengths_test
}  // namespace ds
