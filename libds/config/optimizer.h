// SPDX-License-Identifier: Apache-2.0
#pragma once
// Optimizers in a configuration: defaults, keys that do not belong to them, groups of parameters. The optimizers
// themselves are rows of config/optimizer_table.h.

#include "config/reader.h"

namespace ds {

// Fills in the defaults of the optimizer, refuses keys of others, and reads optimizer.param_groups.
void resolve_optimizer(OptimizerConfig& optimizer, const ConfigText& text, Reader& r,
                       std::vector<Diagnostic>& diagnostics);

// Refuses what optimizers that average by signs do not work with: higher ZeRO stages, offloaded states, groups that
// average in other updates.
void check_signs(const Config& config, Reader& r);
// The rate of balancing biases, with the model, DiLoCo and offloading.
void check_router_bias(const Config& config, Reader& r);

// optimizer.param_groups with every default filled in.
Json param_groups_json(const OptimizerConfig& optimizer);

}  // namespace ds
