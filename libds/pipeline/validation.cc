// SPDX-License-Identifier: Apache-2.0
#include "pipeline/validation.h"

#include <algorithm>
#include <limits>

#include "pipeline/simulate.h"

namespace ds::pipeline {
namespace {

bool is_send(Op op) noexcept { return op == Op::SendActivation || op == Op::SendGrad; }
bool is_receive(Op op) noexcept { return op == Op::RecvActivation || op == Op::RecvGrad; }

// The places of messages of one way among a stage's instructions, in order.
std::vector<size_t> messages(const std::vector<Instr>& schedule, const Placement& placement, Way way, auto&& is) {
  std::vector<size_t> places;
  for (size_t i = 0; i < schedule.size(); ++i) {
    if (is(schedule[i].op) && placement.way_of(schedule[i].op, schedule[i].chunk) == way) places.push_back(i);
  }
  return places;
}

// By stage: the number of instructions that have ended when the first backward pass of the pipeline begins.
std::vector<size_t> ended_before_gradients(const std::vector<std::vector<Instr>>& schedules, bool v) {
  const Costs alike;
  const Timeline timeline = simulate(schedules, {&alike, 1}, {}, v);
  double first = std::numeric_limits<double>::max();
  for (const std::vector<Span>& stage : timeline.stages) {
    for (const Span& span : stage) {
      if (span.instr.op != Op::Forward) first = std::min(first, span.begin);
    }
  }
  std::vector<size_t> ended;
  for (size_t s = 0; s < schedules.size(); ++s) {
    const std::vector<Instr>& schedule = schedules[s];
    size_t at = 0;
    for (const Span& span : timeline.stages[s]) {
      if (span.end > first) break;
      at = static_cast<size_t>(std::ranges::find(schedule, span.instr) - schedule.begin()) + 1;
      while (at < schedule.size() && is_send(schedule[at].op)) ++at;
    }
    ended.push_back(at);
  }
  return ended;
}

}  // namespace

void add_validation(std::vector<std::vector<Instr>>& schedules, const Placement& placement) {
  std::vector<size_t> at = ended_before_gradients(schedules, placement.v);
  const size_t stages = schedules.size();
  // Both ends of a message stand on the same side: whichever end is before Validate alone moves behind it.
  for (bool moved = true; moved;) {
    moved = false;
    for (const Way way : {Way::Down, Way::Up}) {
      for (size_t s = 0; s < stages; ++s) {
        const size_t to = (s + (way == Way::Down ? 1 : stages - 1)) % stages;
        const std::vector<size_t> sent = messages(schedules[s], placement, way, is_send),
                                  received = messages(schedules[to], placement, way, is_receive);
        DS_ASSERT(sent.size() == received.size());
        for (size_t k = 0; k < sent.size(); ++k) {
          if ((sent[k] < at[s]) == (received[k] < at[to])) continue;
          sent[k] < at[s] ? at[s] = sent[k] : at[to] = received[k];
          moved = true;
        }
      }
    }
  }
  for (size_t s = 0; s < stages; ++s)
    schedules[s].insert(schedules[s].begin() + static_cast<std::ptrdiff_t>(at[s]), {Op::Validate, 0});
}

}  // namespace ds::pipeline
