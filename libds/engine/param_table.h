// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parameters of a run as checkpoints know them, and what the run's optimizers keep of each.

#include "checkpoint/checkpoint.h"
#include "plan/run_plan.h"

namespace ds::engine {

struct ParamTable {
  std::vector<ParamEntry> params;          // the model's in order, then tied names
  std::vector<ParamOptimizer> optimizers;  // by entry of params; empty where nothing is trained
  std::string optimizer;                   // CheckpointMeta::optimizer
};
ParamTable make_param_table(const Config& config, const model::Model& model, const plan::RunPlan& plan);

}  // namespace ds::engine
