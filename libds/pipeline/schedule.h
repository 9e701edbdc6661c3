// SPDX-License-Identifier: Apache-2.0
#pragma once
// A schedule is data: the instructions of one training step of one pipeline stage. Stage executes it, and predictions
// read it. Data parallelism alone is the schedule of a single stage.
//
// The model is cut into stages * chunks blocks, which a Placement assigns to stages. All kinds but the last have one
// shape: some forward passes to warm up, then forward and backward passes in turn, then the remaining backward ones.
//   Naive         no warm-up: one micro-batch in the whole pipeline at a time
//   GPipe         all forward passes first (Huang et al. 2019)
//   OneFOneB      as many as there are later stages: PipeDream-flush (Narayanan et al. 2021, "Memory-efficient ...")
//   Interleaved   1F1B over several chunks per stage (Narayanan et al. 2021, "Efficient large-scale ...", section 2.2)
//   ZeroBubbleH1  1F1B with split backward passes (Qi et al. 2023, section 2.2): the input gradient at once, since the
//                 previous stage waits for it; the weight gradient `stage` micro-batches later
//   BreadthFirst  for one stage: all micro-batches pass through a chunk before the next one starts, so its parameters
//                 are gathered once for all of them (Lamy-Poirier 2022, "Breadth-first pipeline parallelism")
//   ZeroBubbleH2  the same with twice the warm-up and twice the delay of weight gradients (section 2.3): a stage keeps
//                 2 * stages - 1 micro-batches, and ends its step as much later than the next stage as it began before
//                 it, so that stages which do not wait for each other between steps are never idle
//   ZeroBubbleV   two chunks per stage, placed as a V, with split backward passes: pipeline/v_schedule.h
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
  // The ranks make the verdict over the gradients of the step before (ScheduleOptions::post_validate). If its update is
  // undone, the instructions so far run again.
  Validate,
};

std::string_view op_name(Op) noexcept;

struct Instr {
  Op op;
  i64 micro;
  i64 chunk = 0;
  friend bool operator==(const Instr&, const Instr&) = default;
};

// The channel of a message: to the next stage (from the last one to the first), or to the previous one.
enum class Way : u8 { Down, Up };

// Which stage has which block of the model. Stage i holds block c * stages + i as its chunk c; in a V odd chunks lie in
// the opposite order, so the first stage has the first block and the last one, and the last stage has two neighbours.
struct Placement {
  int stages = 1;
  bool v = false;

  constexpr i64 block_of(int stage, i64 chunk) const noexcept {
    return v && chunk % 2 == 1 ? (chunk + 1) * stages - 1 - stage : chunk * stages + stage;
  }
  constexpr int stage_of(i64 block) const noexcept {
    const int at = static_cast<int>(block % stages);
    return v && block / stages % 2 == 1 ? stages - 1 - at : at;
  }
  // Whether a block's output is the input of the next block on the same stage, which reads it where it was written.
  constexpr bool stays(i64 block) const noexcept { return stage_of(block) == stage_of(block + 1); }
  // Activations go down the stages and gradients up; in odd chunks of a V it is the other way round.
  constexpr Way way_of(Op op, i64 chunk) const noexcept {
    const bool activation = op == Op::SendActivation || op == Op::RecvActivation;
    return activation == (v && chunk % 2 == 1) ? Way::Up : Way::Down;
  }
  // The stage to which such a message goes, or from which it comes.
  constexpr int peer_of(int stage, Op op, i64 chunk) const noexcept {
    const bool sends = op == Op::SendActivation || op == Op::SendGrad;
    return (stage + (sends == (way_of(op, chunk) == Way::Down) ? 1 : stages - 1)) % stages;
  }
  friend bool operator==(const Placement&, const Placement&) = default;
};

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::OneFOneB;
  int stages = 1, stage = 0;
  i64 micro_batches = 1;
  int chunks = 1;  // per stage; more than one only for Interleaved and BreadthFirst, two for ZeroBubbleV
  // The block in which the backward pass ends: it sends no gradient, and the blocks before it have no backward pass.
  i64 backward_end = 0;
  bool loads_all = false;   // every stage reads tokens, not only those that embed or have losses (Layer::reads_tokens)
  double memory_limit = 1;  // PipelineConfig::memory_limit
  bool post_validate = false;  // PipelineConfig::post_validate
  // A matrix is tied between the first block and the last, on two stages, which exchange its gradient in each step: in
  // post-validated steps after use_complete_after(), or else at the end of a step.
  bool tied = false, sends_use_ahead = true;

  Placement placement() const noexcept { return {.stages = stages, .v = kind == ScheduleKind::ZeroBubbleV}; }
};

// Whether the kind has separate passes for the gradients of inputs and of weights.
constexpr bool splits_backward(ScheduleKind kind) noexcept {
  return kind == ScheduleKind::ZeroBubbleH1 || kind == ScheduleKind::ZeroBubbleH2 || kind == ScheduleKind::ZeroBubbleV;
}

// The schedule that a configuration asks for, of the first stage. With one block it is OneFOneB, whatever
// pipeline.schedule is: all are the same there.
ScheduleOptions schedule_of(const Config& config);
// The same for a model that may not be trained as a whole; cuts: those of its blocks, of cuts_of().
ScheduleOptions schedule_of(const Config& config, const model::Model& model, std::span<const i64> cuts);

// Empty if the schedule exists; else a sentence that names the configuration's keys and valid choices.
std::string why_not(const ScheduleOptions&);

// One training step of one stage. Throws Errc::Config with why_not().
//
// Messages travel on two first-in-first-out channels, one for each Way. On each, a stage sends to one stage and
// receives from one stage, in the order in which that one sends: also in a V, where a way has activations of one chunk
// and gradients of the other. Between two blocks of one stage nothing is sent. A receive blocks. A send does not, but
// its sender thread, one per way, may wait until the receiver takes the message. One send buffer per way and kind is
// enough: if each pass waits until the message of the previous pass of its kind has been taken, there is neither
// deadlock nor additional idle time.
//
// With post_validate every stage has one Validate, before its first backward pass: as late as the stage is when the
// pipeline's first backward pass begins, if all passes take equally long, or somewhat earlier, so that no message is in
// flight between a stage that has validated and one that has not. The instructions before it can therefore run again.
std::vector<Instr> make_schedule(const ScheduleOptions&);
// The same for all stages; options.stage is ignored.
std::vector<std::vector<Instr>> make_schedules(ScheduleOptions options);

// The number of instructions up to Validate; 0 in a schedule without one.
size_t before_gradients(std::span<const Instr> schedule) noexcept;

// A matrix may be tied between the first block and the last. The gradient of the head's use of it is complete with the
// last backward pass of the last block, since the head has no weight pass of its own. The number of instructions of the
// last stage's schedule after which that gradient is sent to the first stage: up to the next pass, beside which it is
// reduced; the schedule's size, if no pass follows.
size_t use_complete_after(std::span<const Instr> schedule) noexcept;

// Forward passes only, for evaluation, with any number of micro-batches; on a single stage each goes through all chunks
// in turn. A block that reads the previous one in place follows it at once.
std::vector<Instr> make_eval_schedule(const Placement& placement, int stage, i64 micro_batches, int chunks);

// Slots per chunk, in micro-batches. Lifetimes are first-in-first-out, so micro-batch k uses slot k % size. A slot is
// reused after its micro-batch's last pass. In training its activation has been sent by then, since the gradient has
// come back; in evaluation, and of a chunk without a backward pass, the send must be waited for.
struct StashSizes {
  i64 forward = 1;   // activations: from Forward, or the receive before it, to Backward or BackwardWeight
  i64 backward = 1;  // gradients kept for the weights: from BackwardInput, or its receive, to BackwardWeight
};
StashSizes stash_sizes(std::span<const Instr> schedule, i64 chunk);
// Slots of the gradient between a chunk and the previous one of the same stage: from the pass that makes it to the last
// one of the previous chunk.
i64 gradient_slots_before(std::span<const Instr> schedule, i64 chunk);

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
