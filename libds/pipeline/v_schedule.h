// SPDX-License-Identifier: Apache-2.0
#pragma once
// Schedules of a V: two chunks per stage, the first half of the blocks on the way down the stages and the second half
// on the way back up. Every micro-batch takes 6 passes on a stage, forward, input gradient and weight gradient of both
// chunks, and a stage repeats them with that period. When a stage runs them follows from few numbers, after Qi et al.
// 2024 ("Pipeline Parallelism with Controllable Memory", section 3): the passes between a stage and the next one, on
// the way down and on the way up, and those between the two chunks of the last stage and the two ways of the first.
// Activations of a way down wait for the gradients of the way up, so these numbers decide how many are kept: a third of
// 1F1B's with one pass to the next stage (V-Min), half with one down and two up (V-Half), all with two and four (V-ZB).
//
//   stage 0  F0 . . . . . . f0 b0 . . . . . . B0       F, B: chunk 0; f, b: chunk 1 (p = 4, one pass each way)
//   stage 1  . F0 . . . . f0 . . b0 . . . . B0
//   stage 2  . . F0 . . f0 . . . . b0 . . B0
//   stage 3  . . . F0 f0 . . . . . . b0 B0
//
// Such a pattern fixes only the order of a stage's forward passes and input gradients. Weight gradients run where a
// stage would otherwise be idle, where it may keep no more activations, or where as many wait as there are stages,
// since each keeps gradients; so the passes of the pipeline's beginning and end move together (the paper's squeezing
// and reordering).

#include "pipeline/schedule.h"

namespace ds::pipeline {

// The order of passes of each stage: that pattern, of a few, whose step takes least time within the memory limit if all
// passes take equally long. Requires a schedule for which there is one (why_not).
std::vector<std::vector<Instr>> v_orders(const ScheduleOptions& options);

// The order of a stage's forward passes alone: block b runs micro-batch k at time b + 2k.
std::vector<Instr> v_eval_order(const Placement& placement, int stage, i64 micro_batches, int chunks);

}  // namespace ds::pipeline
