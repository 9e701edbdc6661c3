// SPDX-License-Identifier: Apache-2.0
#pragma once
// A run's plan, of all its ranks.

#include "ds/train.h"
#include "report/own_memory.h"
#include "report/planned.h"

namespace ds::engine {

// What kernels and communicators will take on the CPUs of this machine, so many ranks of the world on each node;
// nothing of a GPU's. By the backend that "auto" comes to where /dev/shm has room (connect.cc).
report::TagBytes own_memory(const Config& config, const model::Model& model, const report::RunPlan& plan,
                            int ranks_per_node);
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
  WholePlan(const Config& config, const MeshShape& mesh, int rank, DeviceKind device, int ranks_per_node);
  ProcessBytes process;
};

// Stage by stage, as RunPrediction has it.
std::vector<StagePlan> plan_stages(const Config& config, const MeshShape& mesh, DeviceKind device, int ranks_per_node);
double bubble_fraction(const Config& config);
// Bytes that the `count` ranks first, first + step, ... take at most, of the device and of host memory beside it.
struct NodeBytes {
  i64 device = 0, host = 0;
};
NodeBytes plan_memory(const Config& config, const MeshShape& mesh, int first, int count, int step, DeviceKind device,
                      int ranks_per_node);

}  // namespace ds::engine
