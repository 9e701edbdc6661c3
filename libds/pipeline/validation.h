// SPDX-License-Identifier: Apache-2.0
#pragma once
// The place of Validate in the schedules of a post-validated step: the latest one at which stages are without waiting
// for each other, and without a message in flight.

#include <vector>

#include "pipeline/schedule.h"

namespace ds::pipeline {

// Adds Validate to the schedules of all stages.
void add_validation(std::vector<std::vector<Instr>>& schedules, const Placement& placement);

}  // namespace ds::pipeline
