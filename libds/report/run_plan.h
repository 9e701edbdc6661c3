// SPDX-License-Identifier: Apache-2.0
#pragma once
// RunPlan: (config, model, ranks) -> everything about a run that is known before it starts: who owns what, when
// parameters are gathered, how large every buffer is, how many bytes travel. A pure function; the engine allocates and
// communicates by it, and the prediction printed by `ds-train --check` is the same value, so prediction and count can
// differ only by a bug.

#include <array>
#include <map>
#include <string>

#include "comm/communicator.h"
#include "ds/config.h"
#include "zero/gather_plan.h"
#include "zero/grad_store.h"
#include "zero/layout.h"

namespace ds::report {

using TagBytes = std::array<i64, static_cast<size_t>(Tag::Count)>;

struct RunPlan {
  DeviceKind device = DeviceKind::Cpu;  // where it runs
  DType work = DType::F32, wire = DType::F32;
  i64 B = 0, T = 0, micro_batches = 0;                 // of one rank
  std::vector<std::span<const model::ParamRow>> rows;  // per unit; unit = layer
  zero::Layout layout;
  zero::GradOptions grads;
  std::vector<zero::Bucket> buckets;
  zero::GatherPlan train_gathers, eval_gathers;
  i64 rope_elems = 0;       // of the tables of cos and of sin, each
  i64 logits_chunk = 0;     // rows of the logits workspace
  i64 saved_bytes = 0;      // activations kept for backward
  i64 temporary_bytes = 0;  // shared by the layers

  // What one rank allocates, by tag. Worker scratch inside kernels and the library's own small objects come on top.
  TagBytes memory{};
  // The part of it that each rank takes from the communicator, allocation by allocation: its peers read it in place.
  std::vector<i64> shared;
  // What one rank sends in one training step, by "axis.collective"; statistics (a few hundred bytes) come on top.
  std::map<std::string, CommCount> traffic;

  i64 total_memory() const noexcept;  // of the device
};

// The model must outlive the plan. `device`: where it runs, not Auto.
RunPlan make_run_plan(const Config& config, const model::Model& model, int ranks, DeviceKind device = DeviceKind::Cpu);

// The device's numbers of a step that its host reads when the step is done; each is 8-byte aligned.
struct StepScalars {
  i64 max_abs = 0;
  ExactSum sum;
  GradVerdict verdict;
};

}  // namespace ds::report
