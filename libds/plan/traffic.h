// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a plan: those of its last step, their mean and their most where steps differ, and the largest calls.

#include "plan/counted_update.h"
#include "plan/run_plan.h"

namespace ds::plan {

// Fills TrafficCount of `plan`, of which only MemoryCount is missing beside it. `update`: of the plan, and nothing has
// been counted with it yet.
void count_traffic(RunPlan& plan, CountedUpdate& update, const Config& config, const model::Model& model);

}  // namespace ds::plan
