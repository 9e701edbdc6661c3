// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names in a run directory.

#include <optional>
#include <string>
#include <string_view>

#include "ds/kernels/dtype.h"

namespace ds {

inline constexpr const char* kLatestName = "latest";  // a file with the name of the newest committed step
inline constexpr const char* kLatestUniversalName = "latest_universal";  // the same in DeepSpeed's universal format
inline constexpr const char* kMetricsName = "metrics.jsonl";
inline constexpr const char* kLockName = "lock";
inline constexpr const char* kStepPrefix = "step-";
std::string step_name(i64 step);                            // step-00000100
std::optional<i64> parse_step_name(std::string_view name);  // the inverse; nothing for other names

}  // namespace ds
