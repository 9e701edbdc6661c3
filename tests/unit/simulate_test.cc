// SPDX-License-Identifier: Apache-2.0
#include "pipeline/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "unit/every_schedule.h"

namespace ds::pipeline {
namespace simulate_test {

using testing::for_every_post_validated;
using testing::for_every_schedule;
using ::testing::HasSubstr;
using Schedules = std::vector<std::vector<Instr>>;

const std::vector<Costs> kUnit = {Costs{}};

std::string error_of(const Schedules& schedules) {
  try {
    simulate(schedules, kUnit);
    return "no error";
  } catch (const Error& e) {
    return e.what();
  }
}

double bubble_of_simulation(const ScheduleOptions& o) {
  return o.post_validate
             ? simulate_steps(make_schedules(o), kUnit, {}, o.placement().v, tied_exchange(o)).bubble_fraction()
             : simulate(o, kUnit).bubble_fraction();
}

// For any delays, and even if a stage holds one message of each kind at a time.
TEST(Simulate, NoScheduleWaitsForEverAndEachMessageIsTheExpectedOne) {
  u64 seed = 0;
  for_every_schedule([&](const ScheduleOptions& o) {
    const Schedules schedules = make_schedules(o);
    const bool v = o.placement().v;
    for (const i64 send_buffers : {i64{1}, i64{1} << 40}) {
      ASSERT_NO_THROW(simulate(schedules, kUnit, {.send_buffers = send_buffers}, v));
      ASSERT_NO_THROW(simulate(schedules, std::vector<Costs>{{1, 1, 1, 0.3}},
                               {.seed = ++seed, .delay = 5, .send_buffers = send_buffers}, v));
    }
  });
}

TEST(Simulate, EvaluationEndsForAnyNumberOfMicroBatches) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (i64 m = 0; m <= 32; ++m) {
        for (const Placement& placement : {Placement{p}, Placement{p, true}}) {
          if (placement.v && v != 2) continue;
          Schedules schedules;
          for (int i = 0; i < p; ++i) schedules.push_back(make_eval_schedule(placement, i, m, v));
          for (const i64 send_buffers : {i64{1}, i64{1} << 40}) {
            const Timeline timeline = simulate(
                schedules, kUnit, {.seed = static_cast<u64>(m), .delay = 3, .send_buffers = send_buffers}, placement.v);
            for (const auto& spans : timeline.stages) ASSERT_EQ(static_cast<i64>(spans.size()), m * v);
          }
        }
      }
    }
  }
}

// Integers, so that every sum is exact.
TEST(Simulate, IdleTimesAreThoseOfThePapers) {
  for_every_schedule([](const ScheduleOptions& o) {
    const bool zero_bubble = o.kind == ScheduleKind::ZeroBubbleH1;
    if (zero_bubble && o.micro_batches < o.stages) return;
    if (o.kind == ScheduleKind::ZeroBubbleV || o.kind == ScheduleKind::ZeroBubbleH2) return;  // below
    for (const Costs& costs : {Costs{1, 1, 1}, Costs{3, 4, 2}, Costs{5, 7, 5}, Costs{8, 3, 9}}) {
      if (zero_bubble && costs.backward_weight > std::min(costs.forward, costs.backward_input)) continue;
      for (const i64 send_buffers : {i64{1}, i64{1} << 40}) {
        const Timeline timeline = simulate(make_schedules(o), {&costs, 1}, {.send_buffers = send_buffers});
        for (size_t stage = 0; stage < timeline.stages.size(); ++stage) {
          ASSERT_EQ(timeline.idle(stage), idle_formula(o, costs)) << stage;
        }
        ASSERT_EQ(timeline.bubble_fraction(), bubble_formula(o, costs));
      }
    }
  });
}

TEST(Simulate, NothingWaitsForeverWhereTheBackwardPassEndsEarly) {
  for_every_schedule([](ScheduleOptions o) {
    if (o.micro_batches % 5 != 1) return;
    for (o.backward_end = 1; o.backward_end < i64{o.stages} * o.chunks; ++o.backward_end) {
      for (const i64 send_buffers : {i64{1}, i64{1} << 40})
        (void)simulate(o, kUnit, {.seed = 7, .delay = 3, .send_buffers = send_buffers});
      ASSERT_EQ(bubble_fraction(o), bubble_of_simulation(o));
    }
  });
}

TEST(Simulate, TheBubbleIsThatOfTheSimulationBitForBit) {
  for_every_schedule([](const ScheduleOptions& o) { ASSERT_EQ(bubble_fraction(o), bubble_of_simulation(o)); });
  for_every_post_validated([](const ScheduleOptions& o) { ASSERT_EQ(bubble_fraction(o), bubble_of_simulation(o)); });
}

// A simulation of these would take memory by the product.
TEST(Simulate, TheBubbleOfAnyNumberOfMicroBatchesTakesNoSimulation) {
  EXPECT_DOUBLE_EQ(bubble_fraction({.stages = 1 << 20, .micro_batches = i64{1} << 40}),
                   1048575. / ((1ull << 40) + 1048575));
}

TEST(Simulate, BubblesOfKnownSizes) {
  using enum ScheduleKind;
  const auto bubble = [](ScheduleOptions o) { return simulate(make_schedules(o), kUnit).bubble_fraction(); };
  EXPECT_DOUBLE_EQ(bubble({OneFOneB, 1, 0, 5}), 0);
  EXPECT_DOUBLE_EQ(bubble({Naive, 4, 0, 8}), 3. / 4);
  EXPECT_DOUBLE_EQ(bubble({GPipe, 4, 0, 8}), 3. / 11);
  EXPECT_DOUBLE_EQ(bubble({OneFOneB, 4, 0, 8}), 3. / 11);
  EXPECT_DOUBLE_EQ(bubble({Interleaved, 4, 0, 8, 2}), 3. / 19);
  EXPECT_DOUBLE_EQ(bubble({ZeroBubbleH1, 4, 0, 8}), 1. / 9);
}

// A V of equal passes is idle only until the first micro-batch is at the last stage, a sixth of 1F1B's idle time; no
// schedule of its blocks is idle for less. One send buffer is enough for that.
TEST(Simulate, AVIsIdleUntilTheLastStageHasItsFirstInput) {
  for (int p = 2; p <= 64; p = p < 8 ? p + 1 : 2 * p) {
    for (const i64 m : {i64{p}, 2 * i64{p} + 1, 4 * i64{p}}) {
      const ScheduleOptions o{ScheduleKind::ZeroBubbleV, p, 0, m, 2};
      ASSERT_TRUE(formula_is_exact(o));
      for (const i64 send_buffers : {i64{1}, i64{1} << 40}) {
        const Timeline t = simulate(o, kUnit, {.send_buffers = send_buffers});
        for (size_t stage = 0; stage < t.stages.size(); ++stage) ASSERT_EQ(t.idle(stage), p - 1) << p << " " << m;
        ASSERT_EQ(t.bubble_fraction(), bubble_formula(o));
      }
      EXPECT_EQ(6 * idle_formula(o), 2 * idle_formula({.stages = p, .micro_batches = m}));
    }
  }
}

// V-Half: half of 1F1B's idle time with (p + 2) / 2 micro-batches' activations. V-Min: two thirds with (p + 4) / 3.
TEST(Simulate, AVOfLessMemoryIsIdleForAsLongAsThePapersSay) {
  const auto idle_of_1f1b = [](const ScheduleOptions& o, i64 kept) {
    ScheduleOptions of_kept = o;
    of_kept.memory_limit = static_cast<double>(kept) / static_cast<double>(2 * o.stages);
    double most = 0;
    for (const i64 send_buffers : {i64{1}, i64{1} << 40}) {
      const Timeline t = simulate(of_kept, kUnit, {.send_buffers = send_buffers});
      for (size_t stage = 0; stage < t.stages.size(); ++stage)
        most = std::max(most, t.idle(stage) / static_cast<double>(6 * (o.stages - 1)));
    }
    return most;
  };
  for (const int p : {4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64}) {
    for (const i64 m : {i64{p}, 3 * i64{p}}) {
      const ScheduleOptions o{ScheduleKind::ZeroBubbleV, p, 0, m, 2};
      EXPECT_LE(idle_of_1f1b(o, p + 2), 0.51) << p << " " << m;
      const double least = idle_of_1f1b(o, least_kept_passes(p));
      EXPECT_LE(least, 0.67) << p << " " << m;
      EXPECT_GT(least, 0.4) << p << " " << m;
      // More memory never costs time.
      double last = least;
      for (i64 kept = least_kept_passes(p) + 1; p <= 9 && kept <= 2 * p; ++kept) {
        const double more = idle_of_1f1b(o, kept);
        EXPECT_LE(more, last) << p << " " << m << " " << kept;
        last = more;
      }
    }
  }
}

// ZB-H2 with as many micro-batches as a stage keeps: from step to step no stage is ever idle.
TEST(Simulate, StepsOfZeroBubbleH2FollowEachOtherWithoutABubble) {
  for (int p = 2; p <= 16; ++p) {
    for (const i64 m : {2 * i64{p} - 1, 3 * i64{p}}) {
      const ScheduleOptions o{ScheduleKind::ZeroBubbleH2, p, 0, m, 1, 0, false, 1, true};
      ASSERT_TRUE(formula_is_exact(o));
      EXPECT_EQ(idle_formula(o), 0);
      const SteadySteps steps = simulate_steps(make_schedules(o), kUnit);
      EXPECT_EQ(steps.period, 3 * m);
      for (const double idle : steps.idle) EXPECT_EQ(idle, 0);
    }
  }
}

// The use of a tied matrix that is sent when it is complete has come when the first stage ends its step. Sent with the
// last stage's last pass, it comes p - 1 passes later: the first stage then begins its step so much later.
TEST(Simulate, TheFirstStageWaitsForATiedMatrixThatIsNotSentAhead) {
  for (int p = 2; p <= 16; ++p) {
    for (const i64 m : {2 * i64{p} - 1, 3 * i64{p}}) {
      ScheduleOptions o{ScheduleKind::ZeroBubbleH2, p, 0, m, 1, 0, false, 1, true, true};
      ASSERT_TRUE(formula_is_exact(o));
      const SteadySteps ahead = simulate_steps(make_schedules(o), kUnit, {}, false, tied_exchange(o));
      EXPECT_EQ(ahead.period, 3 * m);
      for (const double idle : ahead.idle) EXPECT_EQ(idle, 0);
      o.sends_use_ahead = false;
      ASSERT_FALSE(formula_is_exact(o));
      const SteadySteps at_end = simulate_steps(make_schedules(o), kUnit, {}, false, tied_exchange(o));
      EXPECT_EQ(at_end.period, 3 * m + p - 1);
      EXPECT_EQ(bubble_fraction(o), at_end.bubble_fraction());
    }
  }
}

// Waits make no step shorter; a message takes its time once for the first stage, and once more for the last.
TEST(Simulate, TiedMatricesAreWaitedFor) {
  for_every_post_validated([](ScheduleOptions o) {
    if (o.stages == 1 || o.placement().v) return;
    const Schedules schedules = make_schedules(o);
    for (const Costs& costs : {Costs{1, 1, 1}, Costs{3, 4, 2, 0.25}}) {
      const auto period = [&](std::optional<TiedExchange> tied) {
        return simulate_steps(schedules, {&costs, 1}, {}, false, tied).period;
      };
      const double untied = period({}), ahead = period(TiedExchange{}), at_end = period(TiedExchange{.ahead = false});
      ASSERT_LE(untied, ahead + 1e-9);
      ASSERT_LE(ahead, at_end + 1e-9);
      ASSERT_LE(at_end, period(TiedExchange{.send = 7, .ahead = false}) + 1e-9);
      const double alone = simulate(schedules, {&costs, 1}).makespan;
      ASSERT_LE(period(TiedExchange{.send = 7, .ahead = false}), alone + 14 + 1e-9);
    }
  });
}

// Steps that follow each other take no longer than steps that wait for each other, and what a stage works between two
// steps is no bubble.
TEST(Simulate, PostValidatedStepsAreNoSlower) {
  for_every_post_validated([](ScheduleOptions o) {
    const Schedules schedules = make_schedules(o);
    for (const Costs& costs : {Costs{1, 1, 1}, Costs{3, 4, 2, 0.25}, Costs{8, 3, 9}}) {
      const double alone = simulate(schedules, {&costs, 1}, {}, o.placement().v).makespan;
      const SteadySteps steps = simulate_steps(schedules, {&costs, 1}, {}, o.placement().v);
      ASSERT_LE(steps.period, alone + 1e-9);
      const std::vector<double> between(static_cast<size_t>(o.stages), 2.5);
      const SteadySteps with_updates = simulate_steps(schedules, {&costs, 1}, between, o.placement().v);
      ASSERT_LE(with_updates.period, alone + 2.5 + 1e-9);
      ASSERT_GE(with_updates.period, steps.period);
      for (const double idle : with_updates.idle) ASSERT_GE(idle, -1e-9);
    }
  });
}

// If its conditions do not hold, ZB-H1's formula promises too much.
TEST(Simulate, ZeroBubbleWithHeavyWeightGradientsIsSlowerThanItsFormula) {
  const Costs costs{1, 0.8, 1.2};
  const ScheduleOptions o{ScheduleKind::ZeroBubbleH1, 4, 0, 8};
  EXPECT_NEAR(idle_formula(o, costs), 1.8, 1e-12);
  EXPECT_NEAR(simulate(make_schedules(o), {&costs, 1}).idle(0), 3.0, 1e-12);
}

TEST(Simulate, PassesFollowEachOtherAndTheirMessages) {
  const Timeline t = simulate(make_schedules({.stages = 2, .micro_batches = 1}), std::vector<Costs>{{2, 3, 4, 0.5}});
  ASSERT_EQ(t.stages[0].size(), 2u);
  EXPECT_EQ(t.stages[0][0].end, 2);
  EXPECT_EQ(t.stages[1][0].begin, 2.5);
  EXPECT_EQ(t.stages[1][1].begin, 4.5);
  EXPECT_EQ(t.stages[1][1].end, 11.5);
  EXPECT_EQ(t.stages[0][1].begin, 12);
  EXPECT_EQ(t.makespan, 19);
  EXPECT_EQ(t.idle(0), 10);
}

TEST(Simulate, CostsAreOfAllBlocksOrStagesOrOfEachBlock) {
  const Schedules schedules = make_schedules({ScheduleKind::Interleaved, 2, 0, 2, 2});
  const auto forward_costs = [&](const std::vector<Costs>& costs) {
    std::vector<double> result(4);
    const Timeline t = simulate(schedules, costs);
    for (int stage = 0; stage < 2; ++stage) {
      for (const Span& s : t.stages[stage]) {
        if (s.instr.op != Op::Forward) continue;
        result[Placement{2}.block_of(stage, s.instr.chunk)] = s.end - s.begin;
      }
    }
    return result;
  };
  const auto costs = [](auto... forward) { return std::vector<Costs>{{static_cast<double>(forward), 1, 1, 0}...}; };
  EXPECT_EQ(forward_costs(costs(2)), (std::vector<double>{2, 2, 2, 2}));
  EXPECT_EQ(forward_costs(costs(2, 3)), (std::vector<double>{2, 3, 2, 3}));
  EXPECT_EQ(forward_costs(costs(2, 3, 4, 5)), (std::vector<double>{2, 3, 4, 5}));
}

TEST(Simulate, DelaysAreThoseOfTheirSeed) {
  const Schedules schedules = make_schedules({.stages = 4, .micro_batches = 8});
  const auto makespan = [&](u64 seed) { return simulate(schedules, kUnit, {.seed = seed, .delay = 1}).makespan; };
  EXPECT_EQ(makespan(1), makespan(1));
  EXPECT_NE(makespan(1), makespan(2));
  EXPECT_GT(makespan(1), simulate(schedules, kUnit).makespan);
}

TEST(Simulate, FindsSchedulesThatWaitForEachOther) {
  Schedules schedules = make_schedules({.stages = 2, .micro_batches = 2});
  ASSERT_EQ(error_of(schedules), "no error");

  Schedules order = schedules;  // the last stage wants micro-batch 1 first
  for (Instr& i : order[1]) i.micro = 1 - i.micro;
  EXPECT_THAT(error_of(order), HasSubstr("stage 1 is at RecvActivation of micro-batch 1 for block 1, and the next "
                                         "message is micro-batch 0"));

  Schedules deadlock = schedules;  // stage 0 wants the gradient before it has sent the activation
  std::swap(*std::find(deadlock[0].begin(), deadlock[0].end(), Instr{Op::SendActivation, 0}),
            *std::find(deadlock[0].begin(), deadlock[0].end(), Instr{Op::RecvGrad, 0}));
  EXPECT_THAT(error_of(deadlock), HasSubstr("waits forever at RecvGrad of micro-batch 0"));

  Schedules surplus = schedules;
  surplus[0].push_back({Op::SendActivation, 2});
  EXPECT_THAT(error_of(surplus), HasSubstr("stage 0 sends a message that nobody receives"));
}

}  // namespace simulate_test
}  // namespace ds::pipeline
