// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a step's layers send: they are run with ops that do nothing and communicators that only count, so what is
// predicted is what they do.

#include "report/run_plan.h"

namespace ds::report {

// By "axis.collective", of one training step of one rank: tp, sp and pp, statistics left out.
std::map<std::string, CommCount> count_messages(const model::Model& model, const RunPlan& plan);

}  // namespace ds::report
