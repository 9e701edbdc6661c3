// SPDX-License-Identifier: Apache-2.0
// Lion: one pass, one state.

#include "optim/kind.h"

namespace ds::optim {

const Kind kLion = {
    .states = [](const UpdateConfig&) noexcept { return state_set({State::ExpAvg}); },
    .pass =
        [](const UpdateConfig& u, double lr, i64) noexcept {
          return UpdateParams{
              .rule = UpdateRule::Lion, .beta1 = u.beta1, .beta2 = u.beta2, .lr = static_cast<float>(lr)};
        }};

}  // namespace ds::optim
