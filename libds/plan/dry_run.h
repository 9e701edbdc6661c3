// SPDX-License-Identifier: Apache-2.0
#pragma once
// A step's layer calls without memory: what they send and what they compute is found by running them, with ops that do
// nothing or count and communicators that only count. So what is predicted is what they do.

#include "plan/counting_device.h"
#include "plan/run_plan.h"

namespace ds::plan {

// What a call is part of. Recompute: what a layer has not kept, between the forward and the backward pass.
enum class Pass : u8 { Forward, Recompute, BackwardInput, BackwardWeight };
inline constexpr size_t kPasses = 4;

struct Walk {  // where it takes place
  const OpTable& ops;
  Stream& stream;
  Communicator &tp, &sp;
};
// Runs the layer calls of one micro-batch of each chunk. Views have shapes, and data that must not be touched where an
// engine's have data. `enter(chunk, pass)`: what follows is of this chunk (its place in RunPlan::chunks) and pass.
void walk_layers(const model::Model& model, const RunPlan& plan, const Walk& walk,
                 FunctionRef<void(size_t chunk, Pass)> enter);

// One forward pass of another mode than training through the layers of each chunk, over `memory`, whose views need no
// data. `before(layer, context)` is called before each layer, which is left out where it returns false.
void walk_forward(const model::Model& model, const RunPlan& plan, model::PassMemory memory, const model::Pass& pass,
                  const Walk& walk, FunctionRef<bool(i64 layer, model::PassContext&)> before);

// What the layers and the pipeline of one rank send in one training step, by "axis.collective": of tp, sp and pp. The
// largest calls are noted in `calls`.
std::map<std::string, CommCount> count_messages(const model::Model& model, const RunPlan& plan, MeshCalls& calls);
// The same of an evaluation, its largest calls alone.
void note_evaluation(const model::Model& model, const RunPlan& plan, MeshCalls& calls);

// The rows of a layer, or their gradients, as views of that data.
std::vector<TensorView> views_of(std::span<const model::ParamRow> rows, DType dtype, void* data);

}  // namespace ds::plan
