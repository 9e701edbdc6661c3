// SPDX-License-Identifier: Apache-2.0
#pragma once
// Optimizers as configurations have them: which keys each one takes, its defaults, and groups of parameters.

#include "config/reader.h"

namespace ds {

// As configurations write it.
std::string_view optimizer_name(OptimizerType type);

// Whether the optimizer of that type takes optimizer.params.`key`.
bool optimizer_takes(OptimizerType type, std::string_view key);

// Defaults by type; keys that the type does not take; optimizer.param_groups.
void resolve_optimizer(OptimizerConfig& optimizer, const ConfigText& text, Reader& r,
                       std::vector<Diagnostic>& diagnostics);

// What 1-bit and 0/1 Adam ask of the rest: ZeRO stage 0 (or 1), states on the device, the same updates everywhere.
void check_signs(const Config& config, Reader& r);

// optimizer.param_groups, resolved: each group with all that it has.
Json param_groups_json(const OptimizerConfig& optimizer);

}  // namespace ds
