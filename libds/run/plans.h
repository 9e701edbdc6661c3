// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plans of all ranks of a run.

#include <map>
#include <memory>
#include <vector>

#include "ds/train.h"
#include "report/own_memory.h"
#include "report/planned.h"

namespace ds::run {

// The memory that kernels and communicators will take for themselves on the CPUs of this machine, with so many ranks
// per node; zero on a GPU. Assumes the backend that "auto" selects if /dev/shm has room (connect.cc).
report::TagBytes own_memory(const Config& config, const model::Model& model, const report::RunPlan& plan,
                            int ranks_per_node);
report::TagBounds own_bounds(const Config& config, const report::RunPlan& plan, int ranks_per_node);
// The resident memory of a rank's process on a CPU besides that and what `plan` counts. Measured, not exact; zero for a
// rank with a GPU.
struct ProcessBytes {
  i64 own = 0;  // throughout the run: libraries and the heap before the run takes anything
  // At most, temporarily: while a checkpoint is written, or before the run takes its memory. Rank 0 also commits it.
  i64 momentary = 0, momentary_of_first = 0;
  i64 momentary_of(int rank) const noexcept { return rank == 0 ? momentary_of_first : momentary; }
};
ProcessBytes process_bytes(const Config& config, const report::RunPlan& plan, const report::TagBytes& own,
                           int ranks_per_node);
// A rank's plan with all of these.
struct WholePlan : report::Planned {
  WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node,
            const EncodedPrompts* writing = nullptr);
  report::TagBytes own;      // of kernels and communicators
  report::TagBounds bounds;  // of `own`, for a run that takes all of its steps
  report::TagBytes text;     // for writing text
  ProcessBytes process;
  report::TagBytes memory() const noexcept { return report::sum_of(report::sum_of(plan.memory, own), text); }
  i64 total_memory() const noexcept { return plan.total_memory() + report::total_of(own) + report::total_of(text); }
};

// The plans of a run's ranks, each made at its first use and then shared.
class Plans {
 public:
  // `config` outlives it and does not change; likewise `writing`, the prompts to be continued, or null.
  Plans(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node,
        const EncodedPrompts* writing = nullptr)
      : config_(config), mesh_(mesh), device_(device), ranks_per_node_(ranks_per_node), writing_(writing) {}
  const Config& config() const noexcept { return config_; }
  const MeshShape& mesh() const noexcept { return mesh_; }
  DeviceKind device() const noexcept { return device_; }
  std::shared_ptr<const WholePlan> of(int rank);
  // That of the first rank of a stage. The plans of one stage differ by a row of the vocabulary, and in what
  // RunPlan::fullest() compares.
  const WholePlan& of_stage(int stage) { return *of(rank_at(mesh_, {.pp = stage})); }

 private:
  const Config& config_;
  MeshShape mesh_;
  DeviceKind device_;
  int ranks_per_node_;
  const EncodedPrompts* writing_;
  std::map<int, std::shared_ptr<const WholePlan>> plans_;
};

std::vector<int> ranks_of_stage(const MeshShape& mesh, int stage);
// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(Plans& plans);
double bubble_fraction(const Config& config);
// Whether all parameters are frozen.
bool trains_nothing(const report::RunPlan& plan);
// Upper bounds of the bytes that the `count` ranks first, first + step, ... take of the device, and of host memory in
// addition.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(Plans& plans, int first, int count, int step);

}  // namespace ds::run
