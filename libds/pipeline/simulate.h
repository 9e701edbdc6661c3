// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a pipeline's stages do when: a discrete-event simulation of their schedules, for plans, for people and for the
// proof that no schedule waits for itself. And the idle times that the papers promise.

#include <limits>
#include <span>
#include <vector>

#include "pipeline/schedule.h"

namespace ds::pipeline {

// Of one block and one micro-batch, in any unit of time. Backward takes backward_input + backward_weight.
struct Costs {
  double forward = 1, backward_input = 1, backward_weight = 1;
  double send = 0;  // of what the block sends, in either direction
};

// One pass: Forward, Backward, BackwardInput or BackwardWeight.
struct Span {
  Instr instr;
  double begin, end;
};

struct Timeline {
  std::vector<std::vector<Span>> stages;  // in order
  double makespan = 0;                    // from the first pass's begin to the last one's end

  double idle(size_t stage) const noexcept;
  double bubble_fraction() const noexcept;  // idle time of all stages / all time
};

struct Adversity {
  u64 seed = 0;
  double delay = 0;  // each pass and each message takes up to so much longer, at random
  // Messages of one kind that a stage holds until they are taken; the next pass with such a message waits for one of
  // them. What an executor with so many buffers does.
  i64 send_buffers = std::numeric_limits<i64>::max();
};

// The stages run their schedules, schedules[i] of stage i. A receive waits for its message; a send does not wait, but
// each stage's messages of one kind go one after the other, and each begins only when the receiver is there: the worst
// case of the rule in schedule.h. Loads take no time. The costs of block b are costs[b % costs.size()]: one entry for
// all blocks, one per stage, or one per block.
// Throws Errc::Internal, and says where, if the schedules wait for each other for ever, a message is not the one that
// its receiver expects, or one is left over.
Timeline simulate(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs, const Adversity& = {});

// make_schedule of all stages (options.stage has no meaning).
std::vector<std::vector<Instr>> make_schedules(ScheduleOptions options);

// Idle time of each stage in theory, all blocks costing the same and messages nothing. It is exact for ZeroBubbleH1
// where micro_batches >= stages and backward_weight <= min(forward, backward_input), elsewhere for all.
bool formula_is_exact(const ScheduleOptions&, const Costs& = {});
double idle_formula(const ScheduleOptions&, const Costs& = {});
// Its share of the whole time; 0.43 for 1F1B with 4 stages and 4 micro-batches.
double bubble_formula(const ScheduleOptions&, const Costs& = {});
// The same of any schedule, bit for bit what a simulation of passes of time 1 gives, which only runs where the formula
// is not exact: then there are fewer micro-batches than stages.
double bubble_fraction(const ScheduleOptions&);

}  // namespace ds::pipeline
