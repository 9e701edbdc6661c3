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

#include "comm/communicator.h"
#include "ds/config.h"
#include "mesh/mesh.h"
#include "model/pass_memory.h"
#include "optim/optimizer.h"
#include "pipeline/layer_calls.h"
#include "pipeline/schedule.h"
#include "zero/matrix_exchange.h"
#include "zero/shards.h"

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

// What a rank has of the parameters that are updated alike.
struct GroupPieces {
  optim::GroupSize size;
  struct Tiles {
    std::vector<zero::TilePiece> held;     // which it updates
    std::vector<zero::TilePiece> counted;  // in sums over whole parameters: each element is one rank's
  };
  std::vector<Tiles> of;  // by RunPlan::shards
};

// What is done with gradients when each group has summed its own, but for the tied matrix: which of this rank's pieces
// are summed over tp, which are divided otherwise, and which count in the norm.
struct CombinePlan {
  // Over `width` ranks of tp side by side; as much as is exchanged at once.
  struct Exchange {
    int width = 1;
    i64 elems = 0;
    std::vector<zero::Piece> pieces = {};
  };
  struct Scaled {
    zero::Piece piece;
    float factor;
  };
  std::vector<Exchange> exchanges;
  std::vector<Scaled> scaled;
  std::vector<zero::Piece> judged;  // of several parameters where their accumulators lie side by side
};

struct RunPlan {
  DeviceKind device = DeviceKind::Cpu;  // where it runs
  ConfigUse use = ConfigUse::Train;
  MeshShape mesh;
  MeshCoord coord;
  DType work = DType::F32, wire = DType::F32;
  i64 B = 0, T = 0, micro_batches = 0;  // of one rank; T of its part of the sequences
  i64 sequence_length = 0;              // of all of them
  // Units: Model::shared, then layer by layer; of gradients once more shared, for its use by the head.
  std::vector<std::span<const model::ParamRow>> rows, grad_rows;
  std::vector<const model::ParamRow*> params;  // by number
  std::vector<bool> saved;                     // by number: zero::is_saved
  std::vector<zero::ShardsPlan> shards;        // by ParamRow::group: of dp, of the model's splits of it
  CombinePlan combine;
  optim::Groups groups;                                  // of parameters that are updated alike
  i64 optimizer_workspace = 0;                           // bytes
  i64 optimizer_reduction = 0;                           // bytes of the largest, over dp and tp
  std::vector<std::vector<zero::MatrixPlace>> matrices;  // by group, of those that need them
  zero::MatrixMemory matrix_memory;                      // of the largest
  bool reduce_each_micro = false;                        // "micro" order
  bool split_backward = false;
  // Inputs of layers that are computed again: cut over the tensor-parallel ranks; kept in host memory.
  bool partition_inputs = false, offload_inputs = false;
  std::vector<pipeline::Instr> schedule;
  std::vector<ChunkPlan> chunks;
  // What lives as long as a micro-batch's activations, and the bytes of one such slot, of the device and of the host.
  pipeline::KeptSlots kept;
  i64 kept_bytes = 0, host_bytes = 0;
  model::PassMemory pass;   // of training and evaluation: shapes, without memory
  i64 temporary_bytes = 0;  // shared by the layers
  i64 working_bytes = 0;    // over all chunks
  i64 state_bytes = 0;      // of this rank's training state, copied to host memory to be saved or loaded
  i64 stream_slots = 0;     // messages of the pipeline, [stream rows, hidden] each
  i64 exchange_elems = 0;   // fp32, of sums of gradients over pipeline stages and the tensor-parallel group at once
  i64 stream_shares = 1;    // ranks that share the rows of the residual stream

  // What one rank allocates, by tag. Worker scratch inside kernels and the library's own small objects come on top.
  TagBytes memory{};
  // The part of it that each rank takes from the communicator of tp, allocation by allocation.
  std::vector<i64> tp_shared;
  // What one rank sends in one training step, by "axis.collective"; statistics (a few hundred bytes) come on top.
  std::map<std::string, CommCount> traffic;
  MeshCalls largest_calls;  // statistics too

  // Else there are weights alone: neither gradients nor states, and memory of forward passes.
  bool trains() const noexcept { return ds::trains(use); }
  i64 total_memory() const noexcept;  // of the device
  PassShape shape() const noexcept { return {B, T, B * T / stream_shares}; }
  const zero::ShardsPlan& dp() const noexcept { return shards.front(); }
  int dp_rank() const noexcept { return dp().rank; }
  const model::ParamRow& row_of(i64 param) const noexcept { return *params[static_cast<size_t>(param)]; }
  const zero::ShardsPlan& shards_of(i64 param) const noexcept { return shards[row_of(param).group]; }
  // Elements of rows whose gradients are also summed over tp, in the slices that each rank of dp owns, of which there
  // may be a million; by how many ranks share a sum.
  using SummedElems = std::map<int, i64>;
  std::vector<SummedElems> summed_of_ranks() const;
  // The rank of dp that holds most of what ranks of dp differ in: states that not every parameter has alike, sums over
  // tp. All of them share this rank's stage and part of tp.
  MeshCoord fullest() const;
  // What an exchange of such sums holds: where not all ranks of tp share one, each rank gets all that is exchanged.
  i64 exchange_of(int width, i64 elems) const noexcept {
    return std::min(elems, kExchangeElems) * (width == mesh.tp ? 1 : mesh.tp);
  }
  // What this rank has of the parameters of a group.
  GroupPieces pieces_of(size_t group) const;
  // Whether this rank saves a parameter and counts its gradient: no rank before it has the same.
  bool counts(const zero::Piece& piece) const noexcept { return saved[static_cast<size_t>(piece.param)]; }
  // The same of what is trained: its gradient is in the norm.
  bool judges(const zero::Piece& piece) const noexcept { return counts(piece) && !groups.frozen(piece.param); }
  // Sums of gradients over stages and over tp go in parts of so many elements, so that what they take is bounded.
  static constexpr i64 kExchangeElems = i64{1} << 20;
  // Calls visit(begin, count) for each part of so many elements.
  static void for_each_exchange(i64 elems, auto&& visit) {
    for (i64 begin = 0; begin < elems; begin += kExchangeElems) visit(begin, std::min(kExchangeElems, elems - begin));
  }
  static constexpr i64 kSharedUnit = zero::kSharedUnit;
  static constexpr i64 unit_of(i64 layer) noexcept { return zero::unit_of(layer); }
  i64 head_use() const noexcept { return std::ssize(rows); }  // the unit of gradients of shared in the head
  bool tied() const noexcept { return !rows[0].empty(); }
  bool embeds() const noexcept { return chunks.front().first; }  // has the model's first layer
  bool projects() const noexcept { return chunks.back().last; }  // and its last
  // Where the gradient of shared is summed, on the stages that have it.
  i64 shared_grads() const noexcept { return embeds() ? kSharedUnit : head_use(); }
};

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

// The activations of a chunk for one micro-batch in this memory; the same calls that counted it. input_grad: of its
// first layer, which the stage before waits for.
std::vector<model::LayerActs> plan_acts(const model::Model& model, const ChunkPlan& chunk, const RunPlan& plan,
                                        model::ActivationPlanner& planner, model::Mode mode, const PassShape& shape,
                                        TensorView input_grad = {});

// The device's numbers of a step that its host reads when the step is done; each is 8-byte aligned.
struct StepScalars {
  i64 max_abs = 0;
  ExactSum sum;
  GradVerdict verdict;
};

}  // namespace ds::report
