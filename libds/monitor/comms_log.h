// SPDX-License-Identifier: Apache-2.0
#pragma once
// comms_logger: what rank 0 sent, operation by operation, when the run has ended, and at every printed step where it is
// verbose.

#include <functional>
#include <memory>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

std::unique_ptr<Monitor> make_comms_log(const CommsLoggerConfig& config, i64 steps_per_print,
                                        std::function<void(std::string_view)> tell);

}  // namespace ds::monitor
