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
#include "report/step_lengths.h"
#include "update/update_plan.h"

namespace ds::report {

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

// A chunk of layers of this rank's pipeline stage, and the memory of its micro-batches.
struct ChunkPlan {
  pipeline::Chunk chunk;
  std::vector<pipeline::LayerCall> forward, backward, weight;  // of Forward; Backward or BackwardInput; BackwardWeight
  // Slots of the gradients that wait for BackwardWeight; of the messages that come in, one more of each than are under
  // way, so that a receive can be posted ahead.
  i64 working_slots = 1, input_slots = 2, grad_slots = 2;
  i64 scratch_slots = 0;  // the first of the working slots: of forward passes, where gradients wait in the others
  i64 working_bytes = 0;  // of one slot
  bool first = false, last = false;  // of the model
};

// What a pass runs over: B sequences of T tokens here, of which the residual stream has `stream_rows` rows here.
struct PassShape {
  i64 B = 0, T = 0, stream_rows = 0;
};

struct RunPlan : update::UpdatePlan {
  DeviceKind device = DeviceKind::Cpu;  // where it runs
  ConfigUse use = ConfigUse::Train;
  DType work = DType::F32, wire = DType::F32;
  i64 B = 0, T = 0, micro_batches = 0;  // of one rank; T of its part of the sequences
  i64 sequence_length = 0;              // of all of them
  bool reduce_each_micro = false;       // "micro" order
  i64 update_number = 1;                // of the step that is counted, the last one
  bool split_backward = false;
  // All micro-batches go through a chunk of the only stage before the next one, which finds what is between them where
  // it was left.
  bool breadth_first = false;
  // Inputs of layers that are computed again: cut over the tensor-parallel ranks; kept away from the device's memory.
  bool partition_inputs = false, offload_inputs = false;
  offload::OrderedUses inputs;  // of the latter, all that a step does with them
  offload::Settings offload;
  std::vector<pipeline::Instr> schedule;
  std::vector<ChunkPlan> chunks;
  // What lives as long as a micro-batch's activations, and the bytes of one such slot, of the device and away from it.
  pipeline::KeptSlots kept;
  i64 kept_bytes = 0, away_bytes = 0;
  model::PassMemory pass;    // of training and evaluation: shapes, without memory
  i64 temporary_bytes = 0;   // shared by the layers
  i64 working_bytes = 0;     // over all chunks
  i64 state_bytes = 0;       // of what this rank owns, copied to host memory to be saved in the background
  i64 state_part_bytes = 0;  // of a part of its state, in host memory beside a GPU while it is saved or loaded
  i64 stream_slots = 0;      // messages of the pipeline, [stream rows, hidden] each
  i64 stream_shares = 1;     // ranks that share the rows of the residual stream

  // What one rank allocates, by tag. Worker scratch inside kernels and the library's own small objects come on top.
  TagBytes memory{};
  // What it has in files beside that, by what is in them.
  TagBytes files{};
  // What goes between it and them in a step like others: of states; of sums of gradients and slices of parameters.
  offload::FileCounts state_files, array_files;
  offload::HostCopies copies;  // between a GPU and its host, of what is offloaded
  // The part of it that each rank takes from the communicators of dp and of tp, allocation by allocation.
  std::vector<i64> dp_shared, tp_shared;
  std::vector<std::vector<i64>> zeropp_shared;  // likewise, by zeropp_splits
  std::vector<i64> outer_shared;                // likewise, of the workers' axis
  // What one rank sends where each of DiLoCo's fragments meets, once in sync_every steps.
  std::map<std::string, CommCount> meetings;
  // What one rank sends in one training step, by "axis.collective"; statistics (a few hundred bytes) come on top.
  std::map<std::string, CommCount> traffic;
  // The same on average over the run, in bytes, where steps differ; that above is of its last one. Both are of a run
  // that skips no step.
  std::map<std::string, i64> mean_traffic;
  // Bytes in any step at most, of those names alone of which a step may send less or more than that: with sparse
  // gradients, whose bytes depend on the tokens, and where ranks average by signs and a step may be skipped.
  std::map<std::string, i64> most_traffic;
  MeshCalls largest_calls;  // of all steps, statistics too

  // Else there are weights alone: neither gradients nor states, and memory of forward passes.
  bool trains() const noexcept { return ds::trains(use); }
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
};

// Of dp, for ZeRO++: "near", ranks side by side (one, where there are no second shards), and, where gradients travel as
// codes, "across", those with the same number among them. Who does not train has none.
std::vector<DpSplit> zeropp_splits(const Config& config);

// The part of the model that a rank of the mesh computes.
model::Shard shard_of(const Config& config, const MeshShape& mesh, const MeshCoord& coord);

// The schedule of the first stage: that of one stage is the same whatever it is called.
pipeline::ScheduleOptions schedule_of(const Config& config);

// The first layer of each block of the pipeline, and behind the last one: pipeline.partition. The same on every rank.
std::vector<i64> pipeline_cuts(const Config& config, const model::Model& model);

// `model`: of shard_of(); it must outlive the plan. `device`: where it runs, not Auto. `cuts`: pipeline_cuts() where
// they are known already; else empty.
RunPlan make_run_plan(const Config& config, const model::Model& model, const MeshShape& mesh, const MeshCoord& coord,
                      DeviceKind device = DeviceKind::Cpu, std::vector<i64> cuts = {});

// The same run with shorter sequences: what passes are made of is planned anew for `model`, of such passes; all else is
// that of `plan`, what is predicted, too, which has more.
RunPlan plan_of_length(const RunPlan& plan, const Config& config, const model::Model& model, i64 sequence_length);

// Calls visit(model, plan) with those of steps of such lengths: the given ones, or plan_of_length().
void with_lengths(const RunPlan& plan, const Config& config, const model::Model& model, const PassLengths& lengths,
                  FunctionRef<void(const model::Model&, const RunPlan&)> visit);

// Whether a run that trains evaluates: after its last step at least.
bool evaluates(const Config& config) noexcept;

// The activations of a chunk for one micro-batch in this memory; the same calls that counted it. input_grad: of its
// first layer, which the stage before waits for.
std::vector<model::LayerActs> plan_acts(const model::Model& model, const ChunkPlan& chunk, const RunPlan& plan,
                                        model::ActivationPlanner& planner, model::Mode mode, const PassShape& shape,
                                        TensorView input_grad = {});

}  // namespace ds::report
