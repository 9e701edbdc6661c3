// SPDX-License-Identifier: Apache-2.0
#pragma once
// A step's layer calls, run without memory: with ops that do nothing or count, and communicators that only count. What
// layers send and compute is so predicted by the code that does it.

#include "plan/counting_device.h"
#include "plan/run_plan.h"

namespace ds::plan {

// The pass that a call belongs to. Recompute: layers compute again what they have not kept, before their backward pass.
enum class Pass : u8 { Forward, Recompute, BackwardInput, BackwardWeight };
inline constexpr size_t kPasses = 4;

// Communicators that only count, along each of model::kLayerAxes.
class CountingAxes {
 public:
  explicit CountingAxes(const model::Shard& shard) {
    for (const model::LayerAxis& a : model::kLayerAxes) {
      // A split of dp has all ranks of sp.
      const bool with_sp = a.axis == Axis::Ep && shard.ep > 1;
      const int size = shard.*a.size * (with_sp ? shard.sp : 1),
                rank = with_sp ? shard.ep_rank * shard.sp + shard.sp_rank : shard.*a.rank;
      all_.emplace_back(a.axis, std::make_unique<CountingCommunicator>(rank, size));
      comms_[a.axis] = all_.back().second.get();
    }
  }
  const model::AxisComms& comms() const noexcept { return comms_; }
  // Calls visit(axis, communicator) for each.
  template <class F>
  void for_each(F&& visit) const {
    for (const auto& [axis, comm] : all_) visit(axis, *comm);
  }
  // Notes the largest calls so far.
  void note(MeshCalls& calls) const {
    for_each([&](Axis axis, const CountingCommunicator& c) { calls.axes[axis].add(c.size(), c.largest()); });
  }

 private:
  std::vector<std::pair<Axis, std::unique_ptr<CountingCommunicator>>> all_;
  model::AxisComms comms_;
};

struct Walk {  // where it takes place
  const OpTable& ops;
  Stream& stream;
  const model::AxisComms& comms;
  bool later = false;     // it is a later micro-batch than the first, so that gradients may be added to sums
  bool predicts = false;  // PassContext
};
// Runs the layer calls of one micro-batch of each chunk. Views have shapes, and data that must not be touched where an
// engine's have data. `enter(chunk, pass)` is called before calls of that chunk (its place in StageCalls::chunks) and
// pass.
void walk_layers(const model::Model& model, const RunPlan& plan, const Walk& walk,
                 FunctionRef<void(size_t chunk, Pass)> enter);

// One forward pass of another mode than training through the layers of each chunk, over `memory`, whose views need no
// data. `before(layer, context)` is called before each layer, which is left out where it returns false.
void walk_forward(const model::Model& model, const RunPlan& plan, model::PassMemory memory, const model::Pass& pass,
                  const Walk& walk, FunctionRef<bool(i64 layer, model::PassContext&)> before);

// Calls the op that packs matrices for each that a run which does not train packs.
void walk_packing(const RunPlan& plan, const OpTable& ops, Stream& stream);

// Messages of the layers and the pipeline of one rank in one training step, by "axis.collective". The largest calls are
// noted in `calls`.
std::map<std::string, CommCount> count_messages(const model::Model& model, const RunPlan& plan, MeshCalls& calls);
// Notes the largest calls of an evaluation.
void note_evaluation(const model::Model& model, const RunPlan& plan, MeshCalls& calls);

// The rows of a layer, or their gradients, as views of that data.
std::vector<TensorView> views_of(std::span<const model::ParamRow> rows, DType dtype, void* data);

}  // namespace ds::plan
