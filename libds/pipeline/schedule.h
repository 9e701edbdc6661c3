// SPDX-License-Identifier: Apache-2.0
#pragma once
// A schedule is data: the instructions of one training step of one pipeline stage. Stage executes it, and predictions
// read it. Data parallelism alone is the schedule of a single stage.
//
// The model is cut into stages * chunks blocks; stage i holds block c * stages + i as its chunk c. All kinds have one
// shape: some forward passes to warm up, then forward and backward passes in turn, then the remaining backward passes.
//   Naive         no warm-up: one micro-batch in the whole pipeline at a time
//   GPipe         all forward passes first (Huang et al. 2019)
//   OneFOneB      as many as there are later stages: PipeDream-flush (Narayanan et al. 2021, "Memory-efficient ...")
//   Interleaved   1F1B over several chunks per stage (Narayanan et al. 2021, "Efficient large-scale ...", section 2.2)
//   ZeroBubbleH1  1F1B with split backward passes (Qi et al. 2023, section 2.2): the input gradient at once, since the
//                 previous stage waits for it; the weight gradient `stage` micro-batches later
//   BreadthFirst  for one stage: all micro-batches pass through a chunk before the next one starts, so its parameters
//                 are gathered once for all of them (Lamy-Poirier 2022, "Breadth-first pipeline parallelism")
// Every schedule adds a chunk's micro-batches to its gradients in ascending order, so results are the same bit for bit.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "config/parallel.h"
#include "ds/config.h"
#include "ds/layer.h"

namespace ds::pipeline {

using ScheduleKind = PipelineSchedule;

enum class Op : u8 {
  Load,            // the micro-batch's tokens on the first block, its targets on the last
  RecvActivation,  // from the stage of the previous block, into the stash slot of (micro, chunk)
  Forward,
  SendActivation,  // to the stage of the next block
  RecvGrad,
  Backward,       // gradients of input and weights
  BackwardInput,  // gradient of the input only; that of the weights follows as BackwardWeight
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
  int chunks = 1;  // per stage; more than one only for Interleaved and BreadthFirst
  // The block in which the backward pass ends: it sends no gradient, and the blocks before it have no backward pass.
  i64 backward_end = 0;
};

constexpr i64 block_of(int stages, int stage, i64 chunk) noexcept { return chunk * stages + stage; }

// The schedule that a configuration asks for, of the first stage. With one block it is OneFOneB, whatever
// pipeline.schedule is: all are the same there.
ScheduleOptions schedule_of(const Config& config);
// The same for a model that may not be trained as a whole; cuts: those of its blocks, of cuts_of().
ScheduleOptions schedule_of(const Config& config, const model::Model& model, std::span<const i64> cuts);

// Empty if the schedule exists; else a sentence that names the configuration's keys and valid choices.
std::string why_not(const ScheduleOptions&);

// One training step of one stage. Throws Errc::Config with why_not().
//
// Messages: activations and gradients travel on separate first-in-first-out channels, one per (source, destination,
// kind). For each kind, a stage sends to one stage and receives from one stage. Chunks of a single stage send nothing;
// the next chunk reads the result in place. A receive blocks. A send does not, but its sender thread, one per kind, may
// wait until the receiver takes the message. One send buffer per kind is enough: if each pass waits until the previous
// pass's message has been taken, there is neither deadlock nor additional idle time.
std::vector<Instr> make_schedule(const ScheduleOptions&);

// Forward passes only, for evaluation, with any number of micro-batches; on a single stage each goes through all chunks
// in turn.
std::vector<Instr> make_eval_schedule(int stages, int stage, i64 micro_batches, int chunks);

// Slots per chunk, in micro-batches. Lifetimes are first-in-first-out, so micro-batch k uses slot k % size. A slot is
// reused after its micro-batch's last pass. In training its activation has been sent by then, since the gradient has
// come back; in evaluation, and of a chunk without a backward pass, the send must be waited for.
struct StashSizes {
  i64 forward = 1;   // activations: from Forward, or the receive before it, to Backward or BackwardWeight
  i64 backward = 1;  // gradients kept for the weights: from BackwardInput, or its receive, to BackwardWeight
};
StashSizes stash_sizes(std::span<const Instr> schedule, i64 chunk);

// Slots for the activations of a stage: of[chunk][micro-batch] is an index into slots shared by all chunks, as few as
// are used at once. Forward takes a slot; Backward or BackwardWeight returns it. Without them the last use of the
// output does: its message, or the last pass of the next chunk.
struct KeptSlots {
  i64 count = 1;
  std::vector<std::vector<i64>> of;
};
KeptSlots kept_slots(std::span<const Instr> schedule, i64 chunks, i64 micro_batches);

// The schedule of a single stage: Load, Forward, Backward for each of m micro-batches.
inline std::vector<Instr> single_stage_schedule(i64 micro_batches) {
  return make_schedule({.micro_batches = micro_batches});
}

}  // namespace ds::pipeline
