// SPDX-License-Identifier: Apache-2.0
#pragma once
// A run's plan, of one rank and of all: the model of a rank and the RunPlan that reads it.

#include "ds/train.h"
#include "model/models.h"
#include "report/run_plan.h"

namespace ds::engine {

struct Planned {
  model::Model model;
  report::RunPlan plan;
  Planned(const Config& config, const MeshShape& mesh, int rank, DeviceKind device);
};

// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(const Config& config, const MeshShape& mesh, DeviceKind device);
double bubble_fraction(const Config& config);
// Bytes that the `count` ranks first, first + step, ... take, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(const Config& config, const MeshShape& mesh, int first, int count, int step, DeviceKind device);

}  // namespace ds::engine
