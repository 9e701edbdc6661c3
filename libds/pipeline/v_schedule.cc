// SPDX-License-Identifier: Apache-2.0
#include "pipeline/v_schedule.h"

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

namespace ds::pipeline {
namespace {

// Passes from one stage to the next, down and up; and from the first chunk to the second at the bottom, forward and
// back, and from forward to backward at the top.
struct Pattern {
  i64 down, up, forward_turn = 1, backward_turn = 1, top = 1;
};

// Which of them is best depends on the number of stages: with some, two passes of a stage fall on the same time, and
// one has to wait. In the order of the memory that they take, the largest first.
constexpr Pattern kPatterns[] = {{2, 4},          {1, 4, 5, 6, 1}, {1, 4, 5, 5, 1}, {1, 4, 5, 4, 1}, {1, 4, 4, 4, 2},
                                 {1, 4, 4, 4, 1}, {1, 4, 4, 2, 1}, {1, 4, 3, 2, 1}, {1, 4, 2, 3, 1}, {2, 3, 3, 3},
                                 {1, 3, 4, 1, 1}, {1, 3, 3, 3},    {1, 3},          {1, 2, 3, 3},    {1, 2, 3, 1},
                                 {1, 2, 1, 1, 2}, {1, 2},          {1, 1, 3, 3},    {1, 1}};
constexpr i64 kPeriod = 6;

// Forward passes and input gradients of a stage in the order of a pattern.
std::vector<Instr> pattern_order(const Pattern& t, i64 stages, i64 stage, i64 micro_batches) {
  const i64 last = stages - 1, below = last - stage;
  const i64 down = stage * t.down, up = last * t.down + t.forward_turn + below * t.up;
  const i64 top = last * (t.down + t.up) + t.forward_turn + t.top;
  const i64 back_down = top + stage * t.down, back_up = top + last * t.down + t.backward_turn + below * t.up;
  // When the first micro-batch has them. If two fall on the same time, gradients come first: they free memory.
  struct Timed {
    i64 at, chunk;
    Op op;
  };
  std::array<Timed, 4> passes = {{{back_up, 0, Op::BackwardInput},
                                  {back_down, 1, Op::BackwardInput},
                                  {down, 0, Op::Forward},
                                  {up, 1, Op::Forward}}};
  std::ranges::stable_sort(passes, {}, [](const Timed& pass) { return pass.at % kPeriod; });
  std::vector<Instr> order;
  for (i64 period = 0; std::ssize(order) < 4 * micro_batches; ++period) {
    for (const Timed& pass : passes) {
      const i64 k = period - pass.at / kPeriod;
      if (k >= 0 && k < micro_batches) order.push_back({pass.op, k, pass.chunk});
    }
  }
  return order;
}

struct Orders {
  std::vector<std::vector<Instr>> of_stages{};
  i64 time = 0;  // until all have ended
};

// Runs the orders of a pattern on all stages, each pass in a unit of time and as soon as it can, and adds weight
// gradients.
class Filling {
 public:
  Filling(const Pattern& pattern, const Placement& placement, i64 micro_batches, i64 most_kept)
      : placement_(placement),
        micro_batches_(micro_batches),
        most_kept_(most_kept),
        blocks_(2 * i64{placement.stages}),
        forward_at_(static_cast<size_t>(blocks_ * micro_batches), kNever),
        backward_at_(forward_at_) {
    for (i64 s = 0; s < placement.stages; ++s)
      stages_.push_back({.order = pattern_order(pattern, placement.stages, s, micro_batches)});
  }

  // Nothing if the stages wait forever, because none may keep more.
  std::optional<Orders> run() && {
    i64 left = kPeriod * micro_batches_ * placement_.stages, time = 0;
    for (bool moves = true; left > 0; ++time) {
      if (!std::exchange(moves, false)) return std::nullopt;
      for (int s = 0; s < placement_.stages; ++s) {
        if (!step(s, time)) continue;
        moves = true;
        --left;
      }
    }
    Orders orders{.time = time};
    for (Stage& stage : stages_) orders.of_stages.push_back(std::move(stage.done));
    return orders;
  }

 private:
  struct Stage {
    std::vector<Instr> order;
    size_t next = 0;
    std::deque<Instr> weights{};  // that wait
    i64 kept = 0;                 // passes whose activations are
    std::vector<Instr> done{};
  };
  static constexpr i64 kNever = std::numeric_limits<i64>::max();

  // When a pass of a block has ended.
  i64& ended(Op op, i64 block, i64 micro) {
    return (op == Op::Forward ? forward_at_ : backward_at_)[static_cast<size_t>(block * micro_batches_ + micro)];
  }
  bool is_ready(const Stage& stage, const Instr& pass, i64 block, i64 time) {
    if (pass.op == Op::Forward)
      return stage.kept < most_kept_ && (block == 0 || ended(pass.op, block - 1, pass.micro) <= time);
    return std::ssize(stage.weights) < placement_.stages &&
           (block + 1 == blocks_ || ended(pass.op, block + 1, pass.micro) <= time);
  }

  // Whether the stage runs a pass.
  bool step(int s, i64 time) {
    Stage& stage = stages_[static_cast<size_t>(s)];
    if (stage.next < stage.order.size()) {
      const Instr& pass = stage.order[stage.next];
      const i64 block = placement_.block_of(s, pass.chunk);
      if (is_ready(stage, pass, block, time)) {
        ended(pass.op, block, pass.micro) = time + 1;
        if (pass.op == Op::Forward) {
          ++stage.kept;
        } else {
          stage.weights.push_back({Op::BackwardWeight, pass.micro, pass.chunk});
        }
        stage.done.push_back(pass);
        ++stage.next;
        return true;
      }
    }
    if (stage.weights.empty()) return false;
    stage.done.push_back(stage.weights.front());
    stage.weights.pop_front();
    --stage.kept;
    return true;
  }

  Placement placement_;
  i64 micro_batches_, most_kept_, blocks_;
  std::vector<i64> forward_at_, backward_at_;
  std::vector<Stage> stages_;
};

}  // namespace

std::vector<std::vector<Instr>> v_orders(const ScheduleOptions& o) {
  const Placement placement = o.placement();
  const i64 most = most_kept_passes({.stages = o.stages, .memory_limit = o.memory_limit});
  // A pipeline that is full repeats itself: which pattern is best shows in a shorter step.
  const i64 shorter = std::min(o.micro_batches, 3 * i64{o.stages});
  const Pattern* best = nullptr;
  i64 least = std::numeric_limits<i64>::max();
  for (const Pattern& pattern : kPatterns) {
    const std::optional<Orders> orders = Filling(pattern, placement, shorter, most).run();
    if (!orders || orders->time >= least) continue;
    best = &pattern, least = orders->time;
    if (least == kPeriod * shorter + o.stages - 1) break;  // no stage waits for more than its first input
  }
  DS_ASSERT(best != nullptr);
  std::optional<Orders> orders = Filling(*best, placement, o.micro_batches, most).run();
  DS_ASSERT(orders.has_value());
  return std::move(orders->of_stages);
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
