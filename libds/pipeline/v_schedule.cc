// SPDX-License-Identifier: Apache-2.0
#include "pipeline/v_schedule.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>

namespace ds::pipeline {
namespace {

// Passes from one stage to the next, down and up; and from the first chunk to the second at the bottom, forward and
// back, and from forward to backward at the top.
struct Pattern {
  i64 down, up, forward_turn = 1, backward_turn = 1, top = 1;
};

// With these, two passes of a stage never fall on the same time for one number of stages or another; where they do, the
// later one waits. In the order of the memory that they take.
constexpr Pattern kPatterns[] = {{1, 1}, {1, 1, 3, 3}, {1, 2},       {1, 2, 1, 1, 2}, {1, 2, 3, 1}, {1, 2, 3, 3},
                                 {1, 3}, {1, 3, 3, 3}, {2, 3, 3, 3}, {2, 4}};
constexpr i64 kPeriod = 6;

// Forward passes and input gradients of a stage in the order of a pattern.
std::vector<Instr> pattern_order(const Pattern& t, i64 stages, i64 stage, i64 micro_batches) {
  const i64 last = stages - 1, below = last - stage;
  const i64 down = stage * t.down, up = last * t.down + t.forward_turn + below * t.up;
  const i64 top = last * (t.down + t.up) + t.forward_turn + t.top;
  const i64 back_down = top + stage * t.down, back_up = top + last * t.down + t.backward_turn + below * t.up;
  struct Timed {
    i64 at;
    Instr pass;
  };
  std::vector<Timed> passes;
  for (i64 k = 0; k < micro_batches; ++k) {
    passes.push_back({down + k * kPeriod, {Op::Forward, k, 0}});
    passes.push_back({up + k * kPeriod, {Op::Forward, k, 1}});
    passes.push_back({back_down + k * kPeriod, {Op::BackwardInput, k, 1}});
    passes.push_back({back_up + k * kPeriod, {Op::BackwardInput, k, 0}});
  }
  // Of two at the same time, gradients first: they free memory.
  std::ranges::stable_sort(passes, [](const Timed& a, const Timed& b) {
    return a.at != b.at ? a.at < b.at : a.pass.op != b.pass.op && a.pass.op == Op::BackwardInput;
  });
  std::vector<Instr> order;
  for (const Timed& p : passes) order.push_back(p.pass);
  return order;
}

struct Filled {
  std::vector<std::vector<Instr>> orders;
  i64 time = 0;
};

// Runs the orders of all stages, each pass in a unit of time and as soon as its input is there, and puts weight
// gradients where a stage could run nothing else. Nothing if the stages wait forever, because none may keep more.
std::optional<Filled> with_weights(const Pattern& pattern, const Placement& placement, i64 micro_batches, i64 most) {
  struct Stage {
    std::vector<Instr> order;
    size_t next = 0;
    i64 kept = 0;
    std::deque<Instr> weights;  // input gradients whose weight gradients remain
  };
  constexpr i64 kNever = std::numeric_limits<i64>::max();
  const i64 p = placement.stages, blocks = 2 * p;
  std::vector<Stage> stages(static_cast<size_t>(p));
  Filled filled{.orders = std::vector<std::vector<Instr>>(static_cast<size_t>(p))};
  for (i64 s = 0; s < p; ++s) {
    stages[s].order = pattern_order(pattern, p, s, micro_batches);
    filled.orders[s].reserve(static_cast<size_t>(kPeriod * micro_batches));
  }
  std::vector<i64> forward_at(static_cast<size_t>(blocks * micro_batches), kNever), backward_at = forward_at;
  const auto at = [&](std::vector<i64>& times, i64 block, i64 micro) -> i64& {
    return times[static_cast<size_t>(block * micro_batches + micro)];
  };
  for (i64 left = kPeriod * micro_batches * p; left > 0; ++filled.time) {
    bool moved = false;
    for (i64 s = 0; s < p; ++s) {
      Stage& stage = stages[s];
      const Instr* pass = stage.next < stage.order.size() ? &stage.order[stage.next] : nullptr;
      if (pass != nullptr) {
        const i64 block = placement.block_of(narrow<int>(s), pass->chunk);
        const bool ready = pass->op == Op::Forward
                               ? stage.kept < most && (block == 0 || at(forward_at, block - 1, pass->micro) <= filled.time)
                               : block + 1 == blocks || at(backward_at, block + 1, pass->micro) <= filled.time;
        if (!ready) pass = nullptr;
      }
      if (pass != nullptr) {
        const i64 block = placement.block_of(narrow<int>(s), pass->chunk);
        const bool forward = pass->op == Op::Forward;
        at(forward ? forward_at : backward_at, block, pass->micro) = filled.time + 1;
        if (forward) ++stage.kept;
        if (!forward) stage.weights.push_back({Op::BackwardWeight, pass->micro, pass->chunk});
        filled.orders[s].push_back(*pass);
        ++stage.next;
      } else if (!stage.weights.empty()) {
        filled.orders[s].push_back(stage.weights.front());
        stage.weights.pop_front();
        --stage.kept;
      } else {
        continue;
      }
      --left;
      moved = true;
    }
    if (!moved) return std::nullopt;
  }
  return filled;
}

}  // namespace

std::vector<std::vector<Instr>> v_orders(const ScheduleOptions& o) {
  const Placement placement = o.placement();
  const i64 most = most_kept_passes({.stages = o.stages, .memory_limit = o.memory_limit});
  // A pipeline that is full repeats itself: which pattern is best shows in a shorter step.
  const i64 shorter = std::min(o.micro_batches, 3 * i64{o.stages});
  const Pattern* best = nullptr;
  i64 least = std::numeric_limits<i64>::max();
  for (const Pattern& pattern : kPatterns) {
    const std::optional<Filled> filled = with_weights(pattern, placement, shorter, most);
    if (!filled || filled->time >= least) continue;
    best = &pattern, least = filled->time;
  }
  DS_ASSERT(best != nullptr);
  std::optional<Filled> filled = with_weights(*best, placement, o.micro_batches, most);
  DS_ASSERT(filled.has_value());
  return std::move(filled->orders);
}

std::vector<Instr> v_eval_order(const Placement& placement, int stage, i64 micro_batches, int chunks) {
  std::vector<std::pair<i64, Instr>> passes;
  for (i64 c = 0; c < chunks; ++c) {
    for (i64 k = 0; k < micro_batches; ++k)
      passes.push_back({placement.block_of(stage, c) + 2 * k, {Op::Forward, k, c}});
  }
  std::ranges::sort(passes, {}, &std::pair<i64, Instr>::first);  // no two at the same time
  std::vector<Instr> order;
  for (const auto& [at, pass] : passes) order.push_back(pass);
  return order;
}

}  // namespace ds::pipeline
