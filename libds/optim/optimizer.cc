// SPDX-License-Identifier: Apache-2.0
#include "optim/optimizer.h"

namespace ds::optim {

std::vector<StateSet> states_of(const OptimizerConfig&, std::span<const std::span<const model::ParamRow>> units) {
  std::vector<StateSet> states;
  for (const auto& unit : units)
    states.resize(states.size() + unit.size(), state_set({State::ExpAvg, State::ExpAvgSq}));
  return states;
}

}  // namespace ds::optim
