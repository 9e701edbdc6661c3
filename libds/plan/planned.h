// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of the model, and the plan that reads it.

#include "model/models.h"
#include "plan/run_plan.h"

namespace ds::plan {

// The axes of the configuration, which its reader has found to fit the world; dp is what is left.
MeshShape mesh_shape(const Config& config, int world_size);
// The splits of dp that the mesh of a run has: the model's, and behind them those of ZeRO++.
std::vector<DpSplit> mesh_splits(const Config& config, std::vector<DpSplit> of_model);

struct Planned {
  model::Model model;
  RunPlan plan;
  Planned(const Config& config, const MeshShape& mesh, int rank, DeviceKind device);
  // Of another model than the configuration's.
  Planned(const Config& config, model::Model&& model, const MeshShape& mesh, int rank, DeviceKind device);
  Planned(const Planned&) = delete;  // the plan looks at the model
  Planned& operator=(const Planned&) = delete;
};

}  // namespace ds::plan
