// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bytes of a plan by tag.

#include "plan/counted_update.h"
#include "plan/run_plan.h"

namespace ds::plan {

// Fills MemoryCount of `plan`, which is complete but for that. `update`: of the plan, after its last step has been
// counted. saves_beside: a copy of what this rank saves is kept for saves in the background.
void count_memory(RunPlan& plan, CountedUpdate& update, bool saves_beside);

}  // namespace ds::plan
