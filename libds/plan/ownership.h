// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ownership: which parameters, gradients and states a rank of a plan owns, by which optimizer each is updated, and when
// parameters are gathered.

#include "plan/run_plan.h"

namespace ds::plan {

// Fills shards, groups and what describes parameters (params, saved, diloco and their like) of `plan`, whose stage is
// there. Throws Errc::Config for codes of frozen layers where none is frozen, Errc::Unavailable for too many tiles.
void plan_ownership(RunPlan& plan, const Config& config, const model::Model& model);

}  // namespace ds::plan
