// SPDX-License-Identifier: Apache-2.0
#pragma once
// flops_profiler: the operations of rank 0 in a step, by pass (report/op_tally), and their speed.

#include <memory>
#include <string>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

inline constexpr std::string_view kFlopsBegin = "work of rank 0 of ";  // of every report
// `record` has phases where they are known.
std::string flops_text(const StepRecord& record, const report::StepWork& work, i64 num_params, int world_size,
                       bool detailed);

// Reports step flops_profiler.profile_step to output_file, or to Run::tell.
std::unique_ptr<Monitor> make_flops_report(const Config& config, const Run& run);

}  // namespace ds::monitor
