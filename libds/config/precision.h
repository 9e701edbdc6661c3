// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resolves the keys of number types together: fp16, bf16, data_types, communication_data_type.

#include <string_view>

#include "config/reader.h"

namespace ds {

// Chooses the work type, and what follows from it where nothing is said. config.optimizer and zero_optimization.stage
// are resolved.
void resolve_precision(Config& config, Reader& r);

// Refuses optimizers and tiers that cannot work in 16 bits. All of config but data is resolved.
void check_precision(const Config& config, Reader& r);

}  // namespace ds
