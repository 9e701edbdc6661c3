// SPDX-License-Identifier: Apache-2.0
#pragma once
// Discrete-event simulation of a pipeline's schedules, for plans and charts and to prove that schedules do not
// deadlock; also the idle times stated in the papers.

#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "pipeline/schedule.h"

namespace ds::pipeline {

// For one block and one micro-batch, in any unit of time. Backward takes backward_input + backward_weight.
struct Costs {
  double forward = 1, backward_input = 1, backward_weight = 1;
  double send = 0;  // time to send the block's output, in either direction
};

// One pass: Forward, Backward, BackwardInput or BackwardWeight.
struct Span {
  Instr instr;
  double begin, end;
};

struct Timeline {
  std::vector<std::vector<Span>> stages;  // in order
  double makespan = 0;                    // from the start of the first pass to the end of the last one

  double idle(size_t stage) const noexcept;
  double bubble_fraction() const noexcept;  // idle time of all stages / all time
};

struct Adversity {
  u64 seed = 0;
  double delay = 0;  // maximum random delay of each pass and each message
  // Messages of one way and kind that a stage buffers until they are taken; the next pass that sends such a message
  // waits for a free buffer.
  i64 send_buffers = std::numeric_limits<i64>::max();
};

// Runs schedules[i] on stage i. A receive waits for its message. A send does not wait, but a stage sends its messages
// of one way one at a time, and each transfer starts only when the receiver is ready: the worst case allowed by
// schedule.h. Loads take no time. v: the blocks are placed as a V. costs: one entry for all blocks, one per stage, or
// one per block. Throws Errc::Internal, naming the place, if schedules deadlock, a receiver gets an unexpected message,
// or a message is left over.
Timeline simulate(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs, const Adversity& = {},
                  bool v = false);
// Runs the schedules of these options; options.stage is ignored.
Timeline simulate(const ScheduleOptions& options, std::span<const Costs> costs, const Adversity& = {});

// Post-validated steps one after the other, when each takes as long as the one before. Stages begin a step without
// waiting for each other, and meet at Validate.
struct SteadySteps {
  double period = 0;         // from the end of a step to that of the next one
  std::vector<double> idle;  // of each stage in that time
  double bubble_fraction() const noexcept;
};
// The gradient of a matrix that is tied between the first and the last stage. At the end of its step the first stage
// waits for the last one's use of the matrix, and then the last one for the sum of both uses.
struct TiedExchange {
  double send = 0;    // time of a message between the two
  bool ahead = true;  // the last stage sends after use_complete_after(), else at the end of its step
};
// That of these options, if there is one.
std::optional<TiedExchange> tied_exchange(const ScheduleOptions&, double send = 0) noexcept;
// between: time for which each stage works between two steps, such as that of its update; empty: none.
SteadySteps simulate_steps(std::span<const std::vector<Instr>> schedules, std::span<const Costs> costs,
                           std::span<const double> between = {}, bool v = false, std::optional<TiedExchange> tied = {});

// Theoretical idle time of each stage, with equal costs for all blocks and free messages. Exact for ZeroBubbleH1 if
// micro_batches >= stages and backward_weight <= min(forward, backward_input); for ZeroBubbleV with all the memory of
// 1F1B if micro_batches >= stages and all passes cost the same: the first micro-batch takes so long to reach the last
// stage. For ZeroBubbleH2, whose formula is that of post-validated steps, if all passes cost the same and micro_batches
// >= 2 * stages - 1, and the use of a tied matrix is sent ahead. Always exact for the other kinds, unless they are
// post-validated.
bool formula_is_exact(const ScheduleOptions&, const Costs& = {});
double idle_formula(const ScheduleOptions&, const Costs& = {});
// The idle share of the total time; 0.43 for 1F1B with 4 stages and 4 micro-batches.
double bubble_formula(const ScheduleOptions&, const Costs& = {});
// The same for any schedule, equal bit for bit to a simulation in which each pass takes time 1: of a step for itself,
// or of post-validated steps one after the other. Simulates only where the formula is not exact (formula_is_exact).
double bubble_fraction(const ScheduleOptions&);

}  // namespace ds::pipeline
