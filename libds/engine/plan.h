// SPDX-License-Identifier: Apache-2.0
#pragma once
// A run's plan, of all its ranks.

#include "ds/train.h"
#include "report/own_memory.h"
#include "report/planned.h"

namespace ds::engine {

// What kernels and communicators will take on the CPUs of this machine, so many ranks of the world on each node;
// nothing of a GPU's. By the backend that "auto" comes to where /dev/shm has room (connect.cc).
report::TagBytes own_memory(const Config& config, const model::Model& model, const report::RunPlan& plan,
                            int ranks_per_node);
// A rank's plan with it.
struct WholePlan : report::Planned {
  WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node);
};

// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node);
double bubble_fraction(const Config& config);
// Bytes that the `count` ranks first, first + step, ... take, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(const Config& config, const MeshShape& mesh, int first, int count, int step, DeviceKind device,
                      int ranks_per_node);

}  // namespace ds::engine
