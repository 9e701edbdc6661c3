// SPDX-License-Identifier: Apache-2.0
#pragma once
// wall_clock_breakdown: a line with the times of phases at every printed step.

#include <functional>
#include <memory>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

// Means over the steps since the last line.
std::unique_ptr<Monitor> make_phase_log(i64 steps_per_print, std::function<void(std::string_view)> tell);

}  // namespace ds::monitor
