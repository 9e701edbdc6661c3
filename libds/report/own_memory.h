// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the CPU's kernels and the communicators over host memory take for themselves, beside what a plan has memory for:
// tags "scratch" and "comm".

#include "report/run_plan.h"

namespace ds::report {

// Where a plan runs.
struct Host {
  std::string_view backend;  // of the communicators: "self", "shm", "mpi"; what others take is not known, and 0
  const OpTable& kernels;
  int threads;
};
// `model`: of which `plan` was made, for the CPU.
TagBytes own_memory(const model::Model& model, const RunPlan& plan, const Host& host);

}  // namespace ds::report
