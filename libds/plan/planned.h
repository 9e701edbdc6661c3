// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's part of the model, and the plan that refers to it.

#include "model/models.h"
#include "plan/run_plan.h"

namespace ds::plan {

struct Planned {
  model::Model model;
  RunPlan plan;
  Planned(const Config& config, const MeshShape& mesh, int rank, DeviceKind device);
  // With another model than the configuration's.
  Planned(const Config& config, model::Model&& model, const MeshShape& mesh, int rank, DeviceKind device);
  Planned(const Planned&) = delete;  // the plan refers to the model
  Planned& operator=(const Planned&) = delete;
};

}  // namespace ds::plan
