// SPDX-License-Identifier: Apache-2.0
#pragma once
// flops_profiler: what rank 0 computes in a step, by pass and by operation (report/op_tally), and how fast it did.

#include <memory>
#include <string>

#include "monitor/monitor.h"

namespace ds::monitor {

// `record` has phases where they are known.
std::string flops_text(const StepRecord& record, const report::StepWork& work, i64 num_params, int world_size,
                       bool detailed);

// Of step flops_profiler.profile_step: into output_file, or told.
std::unique_ptr<Monitor> make_flops_report(const Config& config, const Run& run);

}  // namespace ds::monitor
