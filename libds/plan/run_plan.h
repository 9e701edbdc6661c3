// SPDX-License-Identifier: Apache-2.0
#pragma once
// RunPlan: (config, model, place in the mesh) -> everything about one rank's run that is known before it starts: which
// layers it has, in which order it runs them, who owns what, when parameters are gathered, how large every buffer is,
// how many bytes travel. A pure function; the engine allocates and communicates by it, and the prediction printed by
// `ds-train --check` is the same value, so prediction and count can differ only by a bug.

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "ds/config.h"
#include "model/pass_memory.h"
#include "offload/offload.h"
#include "pipeline/layer_calls.h"
#include "pipeline/schedule.h"
#include "plan/step_lengths.h"
#include "update/step_results.h"
#include "update/update_plan.h"

namespace ds::plan {

using TagBytes = std::array<i64, static_cast<size_t>(Tag::Count)>;
constexpr TagBytes sum_of(TagBytes a, const TagBytes& b) noexcept {
  for (size_t t = 0; t < a.size(); ++t) a[t] += b[t];
  return a;
}
constexpr i64 total_of(const TagBytes& bytes) noexcept {
  i64 total = 0;
  for (const i64 n : bytes) total += n;
  return total;
}
TagBytes bytes_of(const MemoryLedger& ledger) noexcept;  // what is held now

// A chunk of layers of this rank's pipeline stage, and the memory of its micro-batches.
struct ChunkPlan {
  pipeline::Chunk chunk;
  std::vector<pipeline::LayerCall> forward, backward, weight;  // of Forward; Backward or BackwardInput; BackwardWeight
  std::span<const pipeline::LayerCall> calls(pipeline::Op op) const noexcept;  // none of an op that runs no layers
  // Slots of the gradients that wait for BackwardWeight, and of messages: one more of each than are under way, so that
  // a receive can be posted ahead.
  i64 working_slots = 1, input_slots = 2, grad_in_slots = 2, grad_out_slots = 2;
  // With a split backward pass forward passes work in a slot of their own, the first one, where 1.
  i64 scratch_slots = 0;
  i64 working_bytes = 0;             // of one slot
  bool first = false, last = false;  // of the model
  // Its input is the output of the chunk before it, on this stage, which gets its gradient the same way: both are read
  // where they were written.
  bool continues = false;
  // Whether the gradient of its input goes to the block before, and that of its output comes from the next one: what is
  // before Model::backward_end() has none.
  bool sends_gradient = false, gets_gradient = false;
  bool receives() const noexcept { return !first && !continues; }  // its input is a message
};

// The layer calls of a rank's pipeline stage, in order.
struct StageCalls {
  std::vector<pipeline::Instr> schedule;
  std::vector<ChunkPlan> chunks;
  pipeline::Placement placement;
  // With UpdatePlan::sends_use_ahead, the instructions of the last stage before it sends; else 0.
  size_t use_complete_after = 0;
  bool split_backward = false;
  // Whether this chunk's output is read in place by the next one.
  bool stays(size_t chunk) const noexcept { return chunk + 1 < chunks.size() && chunks[chunk + 1].continues; }
  // All micro-batches go through a chunk of the only stage before the next chunk, which finds its inputs where they
  // were written.
  bool breadth_first = false;
};

// The memory of activations of a rank's stage.
struct ActivationPlan {
  // Inputs of layers that are computed again: cut over the tensor-parallel ranks; kept away from the device's memory.
  bool partition_inputs = false, offload_inputs = false;
  offload::OrderedUses inputs;  // with offload_inputs: all that a step does with them
  // Activations that live from the forward to the backward pass of a micro-batch have a slot; bytes of a slot on the
  // device, and away from it.
  pipeline::KeptSlots kept;
  i64 kept_bytes = 0, away_bytes = 0;
  i64 temporary_bytes = 0;  // shared by the layers
  i64 working_bytes = 0;    // over all chunks
  i64 stream_slots = 0;     // messages of the pipeline
  // Bytes of such a message in training: the stream, [stream rows, hidden], and, from the next multiple of
  // kMessageAlign on, the numbers that layers share.
  i64 message_bytes = 0;
  static constexpr i64 kMessageAlign = 64;
  model::PassMemory pass;  // of training and evaluation: shapes, without memory
};

// The memory that a rank allocates. Worker scratch inside kernels and the library's own small objects come on top.
struct MemoryCount {
  TagBytes by_tag{};
  TagBytes files{};          // in files, by what they hold
  i64 state_bytes = 0;       // in host memory: a copy of what this rank owns, to be saved in the background
  i64 state_part_bytes = 0;  // in host memory beside a GPU: a part of its state, while that is saved or loaded
  // The part of by_tag that each rank takes from the communicators of an axis, allocation by allocation.
  std::vector<i64> dp_shared, tp_shared, outer_shared;
  std::vector<std::vector<i64>> zeropp_shared;  // by zeropp_splits()
};

// The messages that a rank sends, by "axis.collective"; statistics (a few hundred bytes) come on top. All is of a run
// that skips no step.
struct TrafficCount {
  using Counts = std::map<std::string, CommCount>;
  using Bytes = std::map<std::string, i64>;
  Counts last;  // in the last step
  Bytes mean;   // of a step, on average over the run; empty where steps do not differ
  // The most of any step, where a step may send less or more than `last` says: with sparse gradients, whose bytes
  // depend on the tokens, and where ranks average by signs and a step may be skipped.
  Bytes most;
  Counts meetings;    // where each of DiLoCo's fragments meets, once in sync_every steps
  MeshCalls largest;  // calls of all steps, statistics too
  // Between a rank and its files in a step like others: of states; of sums of gradients and slices of parameters.
  offload::FileCounts state_files, array_files;
  offload::HostCopies copies;  // between a GPU and its host, of what is offloaded
};

// The size of a pass: B sequences of T tokens on this rank, of which the residual stream has `stream_rows` rows.
struct PassShape {
  i64 B = 0, T = 0, stream_rows = 0;
  i64 context = 0, largest = 0;  // PlannedPass::context, PlannedPass::largest
};

struct RunPlan : update::UpdatePlan {
  DeviceKind device = DeviceKind::Cpu;  // where it runs
  ConfigUse use = ConfigUse::Train;
  DType work = DType::F32, wire = DType::F32;
  i64 B = 0, T = 0, micro_batches = 0;  // of one rank; T of its part of the sequences
  i64 sequence_length = 0;              // of whole sequences
  i64 stream_shares = 1;                // ranks that share the rows of the residual stream
  i64 aux_losses = 0;                   // layers of the model that add a loss
  i64 expert_counts = 0;                // experts of all layers of the model, whose tokens are counted
  bool reduce_each_micro = false;       // "micro" order
  bool fused = false;                   // layers add to sums of gradients (fuses_gradients)
  bool invariant = false;               // a row's bits in forward passes do not depend on other rows, on GPUs too
  // Weights are streamed: a pass has those of a few layers in memory (zero::plan_stream), this rank's slices read from
  // the tier of offload_param. While an access computes, those of so many later ones are on their way.
  bool streams = false;
  static constexpr size_t kStreamedAhead = 2;
  i64 looked_up = -1;  // then: the parameter of the token embedding, if its rows are looked up alone; else -1
  // Bytes of parameters that this rank reads in a pass, without rows that are looked up.
  i64 streamed_bytes() const noexcept;
  i64 update_number = 1;  // of the step that is counted, the last one
  offload::Settings offload;
  StageCalls stage;
  ActivationPlan activations;
  MemoryCount memory;
  TrafficCount traffic;

  // Otherwise there are weights alone: neither gradients nor states, and memory of forward passes.
  bool trains() const noexcept { return ds::trains(use); }
  // Whether a step's verdict is made within the next step.
  bool validates_later() const noexcept { return trains() && shards.front().undoes; }
  // Bytes that such a step copies before its update, of states and of parameters.
  struct Kept {
    i64 states = 0, params = 0;
  };
  Kept kept_for_undo() const noexcept;
  bool has_sparse_gradients() const noexcept {
    return std::ranges::any_of(shards, [](const zero::ShardsPlan& s) { return !s.grads.sparse.empty(); });
  }
  // Columns of the widest matrix in tiles; 0: there are no tiles.
  i64 tile_cols() const noexcept;
  bool has_tiles() const noexcept {
    return std::ranges::any_of(shards, [](const zero::ShardsPlan& s) { return !s.layout.tiles().empty(); });
  }
  i64 total_memory() const noexcept;  // of the device
  PassShape shape() const noexcept { return {B, T, B * T / stream_shares}; }
  // The losses that all ranks with the same parameters have in a step.
  update::LossCounts loss_counts() const noexcept {
    return {zero::num_shards(mesh), micro_batches, aux_losses, expert_counts};
  }
};

// `model`: of model::shard_of(), after optim::freeze_groups(); it must outlive the plan. `device`: where it runs, not
// Auto. `cuts`: of pipeline::cuts_of(), where they are known already; else empty.
RunPlan make_run_plan(const Config& config, const model::Model& model, const MeshShape& mesh, const MeshCoord& coord,
                      DeviceKind device = DeviceKind::Cpu, std::vector<i64> cuts = {});

// The same run with shorter sequences: the activations are planned anew for `model`, which is made for passes of that
// length. The rest is that of `plan`, predictions too, whose sequences are the longest.
RunPlan plan_of_length(const RunPlan& plan, const Config& config, const model::Model& model, i64 sequence_length);

// Calls visit(model, plan) with those of steps of such lengths: the given ones, or plan_of_length().
void with_lengths(const RunPlan& plan, const Config& config, const model::Model& model, const PassLengths& lengths,
                  FunctionRef<void(const model::Model&, const RunPlan&)> visit);

// Whether layers add to the fp32 sums of a rank's own micro-batches themselves: if there are such sums, and they can.
bool fuses_gradients(const Config& config, const model::Model& model) noexcept;

// Whether a run that trains evaluates: after its last step at least.
bool evaluates(const Config& config) noexcept;

}  // namespace ds::plan
