// SPDX-License-Identifier: Apache-2.0
#pragma once
// A state with the parameter names of its model.

#include <memory>
#include <string>

#include "checkpoint/state_source.h"

namespace ds {

// `state` without the parts that wrappers have added to parameter names (names_of_model), with a warning; unchanged if
// no config.json of a supported model is found (find_model_config), or there is nothing to remove.
std::unique_ptr<StateSource> under_model_names(std::unique_ptr<StateSource> state, const std::string& named);

}  // namespace ds
