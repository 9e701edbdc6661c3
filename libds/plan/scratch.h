// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that a rank's kernels take for themselves: on a CPU, for each thread, the most that any op of a run
// reserves; on a GPU the most that one op takes.

#include <optional>

#include "ds/kernels/gpu_meter.h"
#include "plan/dry_run.h"

namespace ds::plan {

// Calls ops as a run of config.steps steps calls them, and the evaluation behind it, each with arguments of the same
// shapes, strides, dtypes and null views: every call that reserves scratch once at least. native: Stream::native of the
// calls; host_native: of those on a host beside a GPU.
void walk_run(const Config& config, const model::Model& model, const RunPlan& plan, const OpTable& ops, void* native,
              void* host_native = nullptr);

// The calls of such a run on a GPU with these kernels: GpuMeter::scratch_bytes() is Device::scratch_bytes() after them.
// Not counted: sums of more than 128 ranks over NCCL.
GpuMeter meter_run(const Config& config, const model::Model& model, const RunPlan& plan, const GpuKernels& kernels);

// Device::scratch_bytes() with so many threads after config.steps training steps and an evaluation, or after an
// evaluation where nothing is trained: a device that has run nothing but training and evaluation of this plan holds
// exactly that (tests/unit/scratch_test.cc), but where the plan's sparse gradients have less to send (it holds as much
// at most) and where steps have more lengths than StepLengths::kMost (as much at least). Scratch is no monotone
// function of lengths, so every length that steps have is looked at. Whole logits may take more. A plan that only
// writes text has none here: infer::writing_scratch. backend: whose CPU this is; oneDNN's part is asked of oneDNN.
// Nothing where scratch_ops() knows no such backend.
std::optional<i64> scratch_bytes(const Config& config, const model::Model& model, const RunPlan& plan,
                                 const OpTable& backend, int threads);

}  // namespace ds::plan
