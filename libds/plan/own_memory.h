// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that kernels, and communicators over the memory of CPUs, take for themselves, on top of a plan's: tags
// "scratch" and "comm".

#include "ds/kernels/gpu_meter.h"
#include "ds/units.h"
#include "plan/run_plan.h"

namespace ds::plan {

// The process in which a plan runs.
struct Host {
  std::string_view backend;  // of the communicators: "self", "shm", "mpi"; others count as 0, since that is not known
  const OpTable& kernels;
  int threads;
  GpuKernels gpu = {};  // of a plan for a GPU, which takes nothing from the rest
};
using TagBounds = std::array<Bound, static_cast<size_t>(Tag::Count)>;

// A prediction for some ranks, and how their counts relate to it.
struct BoundedBytes {
  i64 bytes = 0;
  Bound bound = Bound::Exact;
};
// The number that stands for the ranks of both: the larger one, "at most" where they differ.
BoundedBytes most_of(const BoundedBytes& a, const BoundedBytes& b) noexcept;

// `plan`: made of `config` and `model`.
TagBytes own_memory(const Config& config, const model::Model& model, const RunPlan& plan, const Host& host);
// How a run's counts relate to own_memory(). whole_run: the run takes all of its steps; part of a run whose steps
// differ may never reach those that take most.
TagBounds own_bounds(const Config& config, const RunPlan& plan, const Host& host, bool whole_run);

}  // namespace ds::plan
