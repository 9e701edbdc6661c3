// SPDX-License-Identifier: Apache-2.0
#pragma once
// A state whose parameters have the names that its model gives them.

#include <memory>
#include <string>

#include "checkpoint/state_source.h"

namespace ds {

// `state` without what wrappers have put into the names of its parameters (names_of_model), which a warning says; as it
// is where no config.json of a model of the zoo is known (find_model_config), or nothing is to be removed.
std::unique_ptr<StateSource> under_model_names(std::unique_ptr<StateSource> state, const std::string& named);

}  // namespace ds
