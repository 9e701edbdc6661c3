// SPDX-License-Identifier: Apache-2.0
#pragma once
// A run's plan, of all its ranks.

#include "ds/train.h"
#include "report/planned.h"

namespace ds::engine {

// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(const Config& config, const MeshShape& mesh, DeviceKind device);
double bubble_fraction(const Config& config);
// Bytes that the `count` ranks first, first + step, ... take, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(const Config& config, const MeshShape& mesh, int first, int count, int step, DeviceKind device);

}  // namespace ds::engine
