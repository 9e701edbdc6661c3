// SPDX-License-Identifier: Apache-2.0
#pragma once
// The plans of all ranks of a run.

#include <map>
#include <memory>
#include <vector>

#include "ds/train.h"
#include "plan/own_memory.h"
#include "plan/planned.h"

namespace ds::run {

// Memory of kernels and communicators on the CPUs of this machine, with so many ranks of the world on each node, by the
// backend that "auto" comes to where /dev/shm has room (connect.cc); or memory of the kernels of a GPU.
plan::TagBytes own_memory(const Config& config, const model::Model& model, const plan::RunPlan& plan,
                          int ranks_per_node, const GpuKernels& gpu);
plan::TagBounds own_bounds(const Config& config, const plan::RunPlan& plan, int ranks_per_node);
// Resident memory of the process of a rank on a CPU beside that and what `plan` counts. Measured, not exact; nothing of
// a rank with a GPU.
struct ProcessBytes {
  i64 own = 0;  // throughout the run: libraries and the heap before the run takes anything
  // At most, temporarily: while a checkpoint is written, or before the run takes its memory. Rank 0 also commits it.
  i64 momentary = 0, momentary_of_first = 0;
  i64 momentary_of(int rank) const noexcept { return rank == 0 ? momentary_of_first : momentary; }
};
ProcessBytes process_bytes(const Config& config, const plan::RunPlan& plan, const plan::TagBytes& own,
                           int ranks_per_node);
// A rank's file in a save, and the pieces of all ranks of its stage and part of tp.
struct SaveSizes {
  i64 bytes = 0, datasets = 0;
  i64 largest = 0, decoded = 0;  // bytes of a dataset; of one whose state is decoded first
  i64 cuts = 0;                  // at most so many pieces of parameters beyond one of each
};
SaveSizes save_sizes(const plan::RunPlan& plan);
// A rank's plan with all that.
struct WholePlan : plan::Planned {
  WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node,
            const GpuKernels& gpu, const std::optional<SessionSizes>& session = {});
  plan::TagBytes own;      // of kernels and communicators
  plan::TagBounds bounds;  // of `own`, of a run that takes all of its steps
  plan::TagBytes text;     // of what is written, with all of a draft
  i64 draft_bytes = 0;     // of these, of the draft
  ProcessBytes process;
  plan::TagBytes memory() const noexcept { return plan::sum_of(plan::sum_of(plan.memory.by_tag, own), text); }
  i64 total_memory() const noexcept { return plan.total_memory() + plan::total_of(own) + plan::total_of(text); }
  void add_draft(const WholePlan& draft);
};

// The plans of a run's ranks, each made at its first use and then shared.
class Plans {
 public:
  // `config` and `draft` outlive it and do not change; session: of inference, if any; draft: beside it, or null. gpu:
  // of the device, if it is one.
  Plans(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node, const GpuKernels& gpu,
        const std::optional<SessionSizes>& session = {}, const DraftModel* draft = nullptr);
  const Config& config() const noexcept { return config_; }
  const MeshShape& mesh() const noexcept { return mesh_; }
  DeviceKind device() const noexcept { return device_; }
  std::shared_ptr<const WholePlan> of(int rank);
  // The draft's, the same on all ranks; null: there is none.
  const std::shared_ptr<const WholePlan>& draft() const noexcept { return draft_; }
  // That of the first rank of a stage. The plans of one stage differ by a row of the vocabulary, and in what
  // RunPlan::fullest() compares.
  const WholePlan& of_stage(int stage) { return *of(rank_at(mesh_, {.pp = stage})); }

 private:
  const Config& config_;
  MeshShape mesh_;
  DeviceKind device_;
  int ranks_per_node_;
  GpuKernels gpu_;
  std::optional<SessionSizes> session_;
  std::shared_ptr<const WholePlan> draft_;
  std::map<int, std::shared_ptr<const WholePlan>> plans_;
};

std::vector<int> ranks_of_stage(const MeshShape& mesh, int stage);
// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(Plans& plans);
double bubble_fraction(const Config& config, const model::Model& model);
// All of its parameters are frozen.
bool trains_nothing(const plan::RunPlan& plan);
// Bytes that the `count` ranks first, first + step, ... take at most, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(Plans& plans, int first, int count, int step);

}  // namespace ds::run
