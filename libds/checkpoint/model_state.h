// SPDX-License-Identifier: Apache-2.0
#pragma once
// A state with the parameters of its model, or with the tensors of a published one.

#include <memory>
#include <string>

#include "checkpoint/state_source.h"

namespace ds {

// `state` without the parts that wrappers have added to parameter names (names_of_model) and without layers that
// predict tokens further ahead (ModelConfig::later_predictors), with a warning, and with its experts joined
// (join_experts); unchanged if no config.json of a supported model is found (find_model_config), or nothing differs.
// Throws like join_experts.
std::unique_ptr<StateSource> under_model_names(std::unique_ptr<StateSource> state, const std::string& named);

// `state` with experts under the names of the model's family in published files (part_experts); unchanged if no
// config.json of a supported model is found, or there are no batches of experts.
std::unique_ptr<StateSource> under_published_names(std::unique_ptr<StateSource> state, const std::string& named);

}  // namespace ds
