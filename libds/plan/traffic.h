// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a plan: those of its last step, their mean and their most where steps differ, and the largest calls.

#include "plan/counted_update.h"
#include "plan/run_plan.h"

namespace ds::plan {

// Fills traffic, mean_traffic, most_traffic, meetings, largest_calls and the bytes of files of `plan`, which is
// complete but for these. `update`: of the plan, and nothing has been counted yet.
void count_traffic(RunPlan& plan, CountedUpdate& update, const Config& config, const model::Model& model);

}  // namespace ds::plan
