// SPDX-License-Identifier: Apache-2.0
#include "zero/gather_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>

namespace ds::zero {
namespace gather_plan_test {

// A training step visits every layer forward and backward, m times; the head of a tied model uses unit 0, too.
std::vector<Access> training_trace(i64 num_layers, bool tied, i64 micro_batches) {
  std::vector<Access> trace;
  const auto visit = [&](i64 layer) {
    trace.push_back(tied && layer == num_layers - 1 ? Access{layer, 0} : Access{layer});
  };
  for (i64 m = 0; m < micro_batches; ++m) {
    for (i64 l = 0; l < num_layers; ++l) visit(l);
    for (i64 l = num_layers - 1; l >= 0; --l) visit(l);
  }
  return trace;
}
std::vector<Access> forward_trace(i64 num_layers, bool tied) {
  std::vector<Access> trace = training_trace(num_layers, tied, 1);
  trace.resize(num_layers);
  return trace;
}

// Plays a plan: everything used is there, nothing overlaps in the pool, nothing is left.
void play(const GatherPlan& plan, std::span<const i64> elems) {
  std::map<i64, i64> live;  // unit -> offset
  for (size_t a = 0; a < plan.accesses.size(); ++a) {
    for (const auto& l : plan.steps[a].launch) {
      ASSERT_FALSE(live.contains(l.unit)) << "gathered twice";
      for (const auto& [unit, offset] : live) {
        ASSERT_TRUE(l.offset + elems[l.unit] <= offset || offset + elems[unit] <= l.offset) << "overlap in the pool";
      }
      ASSERT_LE(l.offset + elems[l.unit], plan.pool_elems);
      live[l.unit] = l.offset;
    }
    for (const i64 unit : plan.accesses[a]) ASSERT_TRUE(elems[unit] == 0 || live.contains(unit)) << "used but absent";
    for (const i64 unit : plan.steps[a].release) ASSERT_EQ(live.erase(unit), 1u);
  }
  EXPECT_TRUE(live.empty());
}

const std::vector<i64> kElems = {100, 40, 40, 0, 40, 60};

TEST(GatherPlan, IsConsistentForAllKnobs) {
  for (const bool tied : {false, true}) {
    for (const i64 prefetch : {0, 50, 120, 1000}) {
      for (const i64 live : {1, 150, 1000}) {
        for (const i64 reuse : {0, 61, 200, 1000}) {
          play(plan_gathers(training_trace(6, tied, 2), kElems, {prefetch, live, reuse}), kElems);
          play(plan_gathers(forward_trace(6, tied), kElems, {prefetch, live, reuse}), kElems);
        }
      }
    }
  }
}

TEST(GatherPlan, WithoutReuseGathersOnceForwardAndOnceBackward) {
  const GatherPlan plan = plan_gathers(training_trace(6, false, 3), kElems, {1000, 1000, 0});
  EXPECT_EQ(plan.gathered_elems, 3 * 2 * 280);
}

TEST(GatherPlan, WithFullReuseGathersEachUnitOnce) {
  const GatherPlan plan = plan_gathers(training_trace(6, false, 3), kElems, {1000, 1000, 1'000'000});
  EXPECT_EQ(plan.gathered_elems, 280);
  EXPECT_EQ(plan.pool_elems, 280);
}

TEST(GatherPlan, PrefetchesAheadOfUseWithinItsBucketAndTheLiveLimit) {
  const GatherPlan ahead = plan_gathers(training_trace(6, false, 1), kElems, {80, 1000, 0});
  ASSERT_EQ(ahead.steps[0].launch.size(), 3u);  // unit 0 now, units 1 and 2 ahead
  const GatherPlan large = plan_gathers(training_trace(6, false, 1), kElems, {1, 1000, 0});
  ASSERT_EQ(large.steps[0].launch.size(), 2u);  // a unit larger than the bucket is still gathered ahead: the last one
  const GatherPlan limited = plan_gathers(training_trace(6, false, 1), kElems, {80, 145, 0});
  EXPECT_EQ(limited.steps[0].launch.size(), 2u);
  EXPECT_LE(limited.peak_live_elems, 145);
  const GatherPlan none = plan_gathers(training_trace(6, false, 1), kElems, {0, 1000, 0});
  EXPECT_EQ(none.steps[0].launch.size(), 1u);
  EXPECT_EQ(none.pool_elems, 100);
}

TEST(GatherPlan, StepByStep) {
  const GatherPlan plan = plan_gathers(training_trace(4, true, 1), std::vector<i64>{50, 30, 40, 20}, {70, 120, 60});
  std::string text;
  for (const GatherStep& step : plan.steps) {
    for (const auto& l : step.launch) text += fmt::format("+{}@{} ", l.unit, l.offset);
    for (const i64 unit : step.release) text += fmt::format("-{} ", unit);
    text += "| ";
  }
  // Units 1 and 2 come ahead within 70; unit 0, which the head uses again, is too far to keep; unit 3 takes the first
  // gap that it fits. In the backward pass units 1 and 0 come ahead of use, 10 elements beyond the bucket.
  EXPECT_EQ(text,
            "+0@0 +1@50 +2@80 -0 | +3@0 -1 | +0@20 -2 | +2@70 -3 -0 | +3@0 +0@20 -3 -0 | +1@0 +0@110 -2 | -1 | -0 | ");
  EXPECT_EQ(plan.peak_live_elems, 120);
}

// The contract step by step, looking at everything for every use.
GatherPlan plan_slowly(const std::vector<Access>& accesses, std::span<const i64> elems, const GatherKnobs& knobs) {
  GatherPlan plan{.accesses = accesses, .steps = std::vector<GatherStep>(accesses.size())};
  std::map<i64, i64> live;  // unit -> offset
  i64 live_elems = 0;
  const auto launch = [&](GatherStep& step, i64 unit) {
    i64 offset = std::numeric_limits<i64>::max();  // the first that is free: 0, or where another unit ends
    const auto is_free = [&](i64 at) {
      return std::ranges::all_of(
          live, [&](const auto& l) { return at + elems[unit] <= l.second || l.second + elems[l.first] <= at; });
    };
    if (is_free(0)) offset = 0;
    for (const auto& [other, at] : live) {
      if (is_free(at + elems[other])) offset = std::min(offset, at + elems[other]);
    }
    live[unit] = offset;
    live_elems += elems[unit];
    step.launch.push_back({unit, offset});
    plan.gathered_elems += elems[unit];
    plan.peak_live_elems = std::max(plan.peak_live_elems, live_elems);
    plan.pool_elems = std::max(plan.pool_elems, offset + elems[unit]);
  };
  for (size_t a = 0; a < accesses.size(); ++a) {
    GatherStep& step = plan.steps[a];
    for (const i64 unit : accesses[a]) {
      if (elems[unit] > 0 && !live.contains(unit)) launch(step, unit);
    }
    i64 ahead = 0;
    bool fits = true;
    for (size_t later = a + 1; later < accesses.size(); ++later) {
      for (const i64 unit : accesses[later]) {
        if (elems[unit] == 0 || live.contains(unit) || ahead >= knobs.prefetch_bucket || !fits) continue;
        fits = live_elems + elems[unit] <= knobs.max_live;
        if (!fits) continue;
        ahead += elems[unit];
        launch(step, unit);
      }
    }
    for (const i64 unit : accesses[a]) {
      if (!live.contains(unit)) continue;
      i64 distance = 0;
      bool again = false;
      for (size_t later = a + 1; later < accesses.size() && !again; ++later) {
        for (const i64 used : accesses[later]) {
          distance += elems[used];
          again |= used == unit;
        }
      }
      if (again && live_elems <= knobs.max_live && distance <= knobs.max_reuse_distance) continue;
      step.release.push_back(unit);
      live_elems -= elems[unit];
      live.erase(unit);
    }
  }
  return plan;
}

std::string text_of(const GatherPlan& plan) {
  std::string text;
  for (const GatherStep& step : plan.steps) {
    for (const auto& l : step.launch) text += fmt::format("+{}@{} ", l.unit, l.offset);
    for (const i64 unit : step.release) text += fmt::format("-{} ", unit);
    text += "| ";
  }
  return text + fmt::format("pool {} gathered {} peak {}", plan.pool_elems, plan.gathered_elems, plan.peak_live_elems);
}

// Small numbers, so that sums meet the knobs exactly: units of nothing and of one element, and some that nobody uses.
TEST(GatherPlan, IsTheContractStepByStep) {
  std::mt19937 random(1);
  const auto below = [&](u32 n) { return static_cast<i64>(random() % n); };
  for (int round = 0; round < 3000; ++round) {
    std::vector<i64> elems(static_cast<size_t>(1 + below(7)));
    for (i64& n : elems) n = below(6);
    std::vector<Access> accesses(static_cast<size_t>(below(12)));
    for (Access& access : accesses) {
      for (i64 uses = 1 + below(3); uses > 0; --uses) {
        const i64 unit = below(static_cast<u32>(elems.size()));
        if (std::ranges::find(access, unit) == access.end()) access.push_back(unit);
      }
    }
    const GatherKnobs knobs{below(8), below(16), below(16)};
    const GatherPlan plan = plan_gathers(accesses, elems, knobs);
    ASSERT_EQ(text_of(plan), text_of(plan_slowly(accesses, elems, knobs))) << round;
    play(plan, elems);
  }
}

// Each of these took minutes when planning looked at all units for every use.
TEST(GatherPlan, AHundredThousandLayersArePlannedAtOnce) {
  constexpr i64 kLayers = 100'000;
  const auto start = std::chrono::steady_clock::now();
  for (const i64 elems : {0, 1000}) {
    const std::vector<i64> unit_elems(kLayers, elems);
    for (const GatherKnobs& knobs : {GatherKnobs{50'000'000, 1'000'000'000, 1'000'000'000}, GatherKnobs{0, 1, 0},
                                     GatherKnobs{50'000, 80'000, 0}}) {
      const GatherPlan plan = plan_gathers(training_trace(kLayers, true, 1), unit_elems, knobs);
      EXPECT_GE(plan.gathered_elems, kLayers * elems);
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Passes of a stream, one after the other: each use finds its unit, places do not overlap, and at any time there are
// only units of `ahead` later accesses beside those in use.
void play_stream(const GatherPlan& plan, std::span<const i64> elems, size_t ahead) {
  std::map<i64, i64> live;
  for (const auto& l : plan.carried) live[l.unit] = l.offset;
  const size_t n = plan.accesses.size();
  for (int pass = 0; pass < 3; ++pass) {
    ASSERT_EQ(live.size(), plan.carried.size());
    for (const auto& l : plan.carried) ASSERT_EQ(live.at(l.unit), l.offset);
    for (size_t a = 0; a < n; ++a) {
      for (const auto& l : plan.steps[a].launch) {
        ASSERT_FALSE(live.contains(l.unit)) << "gathered twice";
        live[l.unit] = l.offset;
      }
      for (const auto& [unit, offset] : live) {
        ASSERT_LE(offset + elems[unit], plan.pool_elems);
        for (const auto& [other, at] : live)
          ASSERT_TRUE(unit == other || at + elems[other] <= offset || offset + elems[unit] <= at);
      }
      for (const i64 unit : plan.accesses[a]) ASSERT_TRUE(elems[unit] == 0 || live.contains(unit)) << "used but absent";
      std::set<i64> wanted;
      size_t more = ahead + 1;
      for (size_t i = a; i < a + n && more > 0; ++i) {
        bool any = i == a;
        for (const i64 unit : plan.accesses[i % n]) any |= elems[unit] > 0, wanted.insert(unit);
        more -= any ? 1 : 0;
      }
      for (const auto& [unit, offset] : live) ASSERT_TRUE(wanted.contains(unit)) << "kept without need";
      for (const i64 unit : plan.steps[a].release) ASSERT_EQ(live.erase(unit), 1u);
    }
  }
}

TEST(GatherPlan, AStreamHasTheNextUnitsAndNoOthers) {
  std::mt19937 random(5);
  int carried = 0;
  constexpr int kTraces = 300;
  for (int t = 0; t < kTraces; ++t) {
    const size_t units = 3 + random() % 20, ahead = random() % 4;
    std::vector<i64> elems;
    for (size_t u = 0; u < units; ++u) elems.push_back(random() % 5 == 0 ? 0 : 1 + static_cast<i64>(random() % 50));
    std::vector<Access> trace;
    for (size_t u = 1; u < units; ++u) trace.push_back({static_cast<i64>(u)});
    if (random() % 2 == 0) trace.back().push_back(0);  // a tied head
    if (random() % 4 == 0) trace.insert(trace.begin(), Access{0});
    for (const bool repeats : {false, true}) {
      const GatherPlan plan = plan_stream(trace, elems, ahead, repeats);
      play_stream(plan, elems, ahead);
      EXPECT_TRUE(repeats || plan.carried.empty());
      carried += repeats && !plan.carried.empty() ? 1 : 0;
    }
  }
  EXPECT_GT(carried, kTraces / 2);
}

// Blocks of one size and a large head, as in a language model.
TEST(GatherPlan, AStreamOfBlocksGathersEachOnce) {
  std::vector<i64> elems(34, 10);
  elems[0] = 45;  // the tied matrix, which the head uses
  elems[33] = 0;
  std::vector<Access> trace;
  for (i64 u = 1; u < 34; ++u) trace.push_back({u});
  trace.back().push_back(0);
  const GatherPlan plan = plan_stream(trace, elems, 2, true);
  EXPECT_EQ(plan.gathered_elems, 32 * 10 + 45);
  EXPECT_EQ(plan.carried.size(), 2u);
  EXPECT_EQ(plan.peak_live_elems, 45 + 2 * 10);
  EXPECT_LE(plan.pool_elems, 45 + 3 * 10);
}

}  // namespace gather_plan_test
}  // namespace ds::zero
