// SPDX-License-Identifier: Apache-2.0
// Adagrad: one pass, the sum of squared gradients.

#include "optim/kind.h"

namespace ds::optim {

const Kind kAdagrad = {.states = [](const UpdateConfig&) noexcept { return state_set({State::Sum}); },
                       .pass =
                           [](const UpdateConfig& u, double lr, i64) noexcept {
                             return UpdateParams{
                                 .rule = UpdateRule::Adagrad, .lr = static_cast<float>(lr), .eps = u.eps};
                           }};

}  // namespace ds::optim
