// SPDX-License-Identifier: Apache-2.0
#pragma once
// The pipeline stage of a rank: its layer calls in order, and the memory that they take for activations.

#include "plan/run_plan.h"

namespace ds::plan {

// Fills StageCalls, which layers the stage has, and where inputs of layers are kept. `cuts`: of pipeline::cuts_of(), or
// empty. Throws what pipeline::make_schedule() and partition() do, and Errc::Unavailable for inputs kept away from the
// device that stay there breadth first.
void plan_stage(RunPlan& plan, const Config& config, const model::Model& model, std::vector<i64> cuts);

// Fills the activations of the stage, for passes of the plan's lengths; `model` is of that length.
void plan_passes(RunPlan& plan, const Config& config, const model::Model& model);

// The activations of a chunk for one micro-batch, laid out in the planner's memory, by layer. The calls that count that
// memory are the same that give it out. input_grad: where the gradient of the chunk's input goes, which the stage
// before waits for.
std::vector<model::LayerActs> plan_acts(const model::Model& model, const ChunkPlan& chunk, const RunPlan& plan,
                                        model::ActivationPlanner& planner, model::Mode mode, const PassShape& shape,
                                        TensorView input_grad = {});

}  // namespace ds::plan
