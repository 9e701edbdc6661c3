// SPDX-License-Identifier: Apache-2.0
#pragma once
// A schedule is data: the instructions of one training step of one pipeline stage, which Stage executes and predictions
// read. Data parallelism alone is the schedule of one stage.
//
// The model is cut in stages * chunks blocks; stage i holds block c * stages + i as its chunk c. All kinds are one
// shape: some forward passes to warm up, then one forward and one backward pass in turn, then the backward passes that
// are left.
//   Naive         no warm-up: one micro-batch in the whole pipeline at a time
//   GPipe         all forward passes first (Huang et al. 2019)
//   OneFOneB      as many as there are later stages: PipeDream-flush (Narayanan et al. 2021, "Memory-efficient ...")
//   Interleaved   1F1B over several chunks per stage (Narayanan et al. 2021, "Efficient large-scale ...", section 2.2)
//   ZeroBubbleH1  1F1B whose backward passes are split in two (Qi et al. 2023, section 2.2): the gradient of the input,
//                 which the previous stage waits for, at once; that of the weights stage micro-batches later
//   BreadthFirst  on one stage: all micro-batches through a chunk before the next one, whose parameters are so gathered
//                 once for all of them (Lamy-Poirier 2022, "Breadth-first pipeline parallelism")
// In each, a chunk's micro-batches are added to its gradients in ascending order, so that the schedule does not
// move a bit of them.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "config/parallel.h"
#include "ds/config.h"

namespace ds::pipeline {

using ScheduleKind = PipelineSchedule;

enum class Op : u8 {
  Load,            // the micro-batch's tokens on the first block, its targets on the last
  RecvActivation,  // from the stage of the block before, into the stash slot of (micro, chunk)
  Forward,
  SendActivation,  // to the stage of the block behind
  RecvGrad,
  Backward,       // gradients of input and weights
  BackwardInput,  // ... of the input alone; the weights' follows as BackwardWeight
  BackwardWeight,
  SendGrad,
};

std::string_view op_name(Op) noexcept;

struct Instr {
  Op op;
  i64 micro;
  i64 chunk = 0;
  friend bool operator==(const Instr&, const Instr&) = default;
};

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::OneFOneB;
  int stages = 1, stage = 0;
  i64 micro_batches = 1;
  int chunks = 1;  // per stage; more than one for Interleaved and BreadthFirst only
};

constexpr i64 block_of(int stages, int stage, i64 chunk) noexcept { return chunk * stages + stage; }

// The schedule that a configuration asks for, of the first stage. With one block it is OneFOneB, whatever
// pipeline.schedule is: all are the same there.
ScheduleOptions schedule_of(const Config& config);

// Empty if there is such a schedule; else a sentence that names the configuration's keys and what would work.
std::string why_not(const ScheduleOptions&);

// One training step of one stage. Throws Errc::Config with why_not().
//
// Messages: activations and gradients travel on separate first-in-first-out channels, one per (source, destination,
// kind); each stage sends to one stage and receives from one stage per kind. Chunks of one stage alone send nothing:
// the next one finds it where it lies. A receive blocks. A send does not; its sender, one per kind, may wait until the
// receiver takes the message. One buffer per kind is enough for what is being sent: if a pass waits until the message
// of the one before has been taken, there is no deadlock and no longer idling.
std::vector<Instr> make_schedule(const ScheduleOptions&);

// Forward passes alone, for evaluation; any number of micro-batches, on one stage each through all chunks in turn.
std::vector<Instr> make_eval_schedule(int stages, int stage, i64 micro_batches, int chunks);

// Memory of a chunk, in micro-batches. Lifetimes are first-in-first-out, so micro-batch k lives in slot k % size.
// A slot is used again when its micro-batch's last pass has run. That its activation has been sent by then is certain
// in training, for the gradient has come back; in evaluation the send must be waited for.
struct StashSizes {
  i64 forward = 1;   // activations: from Forward, or the receive before it, to Backward or BackwardWeight
  i64 backward = 1;  // gradients kept for the weights: from BackwardInput, or its receive, to BackwardWeight
};
StashSizes stash_sizes(std::span<const Instr> schedule, i64 chunk);

// Where a stage keeps the activations of its chunks: slots that all chunks share, of[chunk][micro-batch], as few as are
// in use at once. One is taken by Forward and given back by Backward or BackwardWeight.
struct KeptSlots {
  i64 count = 1;
  std::vector<std::vector<i64>> of;
};
KeptSlots kept_slots(std::span<const Instr> schedule, i64 chunks, i64 micro_batches);

// One stage, m micro-batches: Load, Forward, Backward of each in turn.
inline std::vector<Instr> single_stage_schedule(i64 micro_batches) {
  return make_schedule({.micro_batches = micro_batches});
}

}  // namespace ds::pipeline
