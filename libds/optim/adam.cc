// SPDX-License-Identifier: Apache-2.0
// AdamW and Adam: one pass. The powers of the betas are taken in fp64, of the number of updates applied.

#include <cmath>

#include "optim/kind.h"

namespace ds::optim {

const Kind kAdam = {.states =
                        [](const UpdateConfig&) noexcept {
                          return state_set({State::ExpAvg, State::ExpAvgSq});
                        },
                    .pass =
                        [](const UpdateConfig& u, double lr, i64 step) noexcept {
                          const double t = static_cast<double>(step);
                          return UpdateParams{
                              .rule = u.adam_w_mode ? UpdateRule::AdamW : UpdateRule::AdamL2,
                              .beta1 = u.beta1,
                              .beta2 = u.beta2,
                              .lr = static_cast<float>(lr),
                              .eps = u.eps,
                              .bias1 = u.bias_correction ? static_cast<float>(1 - std::pow(u.beta1, t)) : 1.0f,
                              .bias2 = u.bias_correction ? static_cast<float>(1 - std::pow(u.beta2, t)) : 1.0f};
                        }};

}  // namespace ds::optim
