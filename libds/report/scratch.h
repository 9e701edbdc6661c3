// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of a rank hold as worker scratch: the most that any op of a step reserves, for each thread.

#include <optional>

#include "report/dry_run.h"

namespace ds::report {

// Device::scratch_bytes() with so many threads after a training step, or an evaluation where nothing is trained: a
// device that has run nothing but training and evaluation of this plan holds exactly that (tests/unit/scratch_test.cc).
// Whole logits may take more. A plan that only writes text has none here: infer::writing_scratch. backend: whose CPU
// this is; oneDNN's part is asked of oneDNN. Nothing where scratch_ops() knows no such backend: CUDA's kernels reserve
// by the shapes that their own plans choose.
std::optional<i64> scratch_bytes(const model::Model& model, const RunPlan& plan, const OpTable& backend, int threads);

}  // namespace ds::report
