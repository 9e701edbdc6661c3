// SPDX-License-Identifier: Apache-2.0
#pragma once
// comms_logger: a table of the operations of rank 0, printed at the end of the run and, if verbose, at every printed
// step.

#include <functional>
#include <memory>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

std::unique_ptr<Monitor> make_comms_log(const CommsLoggerConfig& config, i64 steps_per_print,
                                        std::function<void(std::string_view)> tell);

}  // namespace ds::monitor
