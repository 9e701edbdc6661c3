// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resolves and checks the keys of `scheduler` together.

#include <span>
#include <string_view>

#include "config/reader.h"

namespace ds {

std::span<const EnumName> scheduler_names() noexcept;
std::string_view scheduler_name(SchedulerType type) noexcept;

// Whether a schedule has a key of scheduler.params.
bool scheduler_takes(SchedulerType type, std::string_view param);

// Checks config.scheduler against its type, the optimizer and the number of steps, and fills in what follows from
// these. config.optimizer is resolved.
void resolve_scheduler(Config& config, Reader& r);

}  // namespace ds
