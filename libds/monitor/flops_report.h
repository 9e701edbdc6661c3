// SPDX-License-Identifier: Apache-2.0
#pragma once
// flops_profiler: what rank 0 computes in a step, by pass and by operation (plan/op_tally), and how fast it did.

#include <memory>
#include <string>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

inline constexpr std::string_view kFlopsBegin = "work of rank 0 of ";  // of every report
// `record` has phases where they are known.
std::string flops_text(const StepRecord& record, const plan::StepWork& work, i64 num_params, int world_size,
                       bool detailed);

// Reports step flops_profiler.profile_step to output_file, or to Run::tell.
std::unique_ptr<Monitor> make_flops_report(const Config& config, const Run& run);

}  // namespace ds::monitor
