// SPDX-License-Identifier: Apache-2.0
#pragma once
// A run's plan, of all its ranks.

#include <map>
#include <memory>
#include <vector>

#include "ds/train.h"
#include "report/own_memory.h"
#include "report/planned.h"

namespace ds::run {

// What kernels and communicators will take on the CPUs of this machine, so many ranks of the world on each node;
// nothing of a GPU's. By the backend that "auto" comes to where /dev/shm has room (connect.cc).
report::TagBytes own_memory(const Config& config, const model::Model& model, const report::RunPlan& plan,
                            int ranks_per_node);
report::TagBounds own_bounds(const Config& config, const report::RunPlan& plan, int ranks_per_node);
// What the process of a rank on a CPU has resident beside that and what `plan` counts. Measured, not exact; nothing of
// a rank with a GPU.
struct ProcessBytes {
  i64 own = 0;  // all the time: what libraries and the heap have before the run takes anything
  // At most, for a moment: while a checkpoint is written, or before the run takes its memory; rank 0 commits it, too.
  i64 momentary = 0, momentary_of_first = 0;
  i64 momentary_of(int rank) const noexcept { return rank == 0 ? momentary_of_first : momentary; }
};
ProcessBytes process_bytes(const Config& config, const report::RunPlan& plan, const report::TagBytes& own,
                           int ranks_per_node);
// A rank's plan with all that.
struct WholePlan : report::Planned {
  WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node,
            const EncodedPrompts* writing = nullptr);
  report::TagBytes own;      // of kernels and communicators
  report::TagBounds bounds;  // of `own`, of a run that takes all of its steps
  report::TagBytes text;     // of what is written
  ProcessBytes process;
  report::TagBytes memory() const noexcept { return report::sum_of(report::sum_of(plan.memory, own), text); }
  i64 total_memory() const noexcept { return plan.total_memory() + report::total_of(own) + report::total_of(text); }
};

// The plans of a run's ranks, each made when somebody asks for it first: all that look at a run share them.
class Plans {
 public:
  // `config` outlives it, and stays what it is, as does `writing`, what is to be written, or null.
  Plans(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node,
        const EncodedPrompts* writing = nullptr)
      : config_(config), mesh_(mesh), device_(device), ranks_per_node_(ranks_per_node), writing_(writing) {}
  const Config& config() const noexcept { return config_; }
  const MeshShape& mesh() const noexcept { return mesh_; }
  DeviceKind device() const noexcept { return device_; }
  std::shared_ptr<const WholePlan> of(int rank);
  // Of its first rank. Those of one stage differ by a row of the vocabulary, and in what RunPlan::fullest looks at.
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
// All of its parameters are frozen.
bool trains_nothing(const report::RunPlan& plan);
// Bytes that the `count` ranks first, first + step, ... take at most, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(Plans& plans, int first, int count, int step);

}  // namespace ds::run
