// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an optimizer keeps of each parameter.

#include <vector>

#include "ds/config.h"
#include "ds/state.h"
#include "model/layer.h"

namespace ds::optim {

// By number of parameter of the model, of this rank's units or not.
std::vector<StateSet> states_of(const OptimizerConfig& optimizer,
                                std::span<const std::span<const model::ParamRow>> units);

}  // namespace ds::optim
