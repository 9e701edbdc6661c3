// SPDX-License-Identifier: Apache-2.0
// SGD, with momentum if there is any; the first gradient enters the momentum undampened, as in PyTorch.

#include "optim/kind.h"

namespace ds::optim {

const Kind kSgd = {.states =
                       [](const UpdateConfig& u) noexcept {
                         return u.momentum == 0 ? StateSet{} : state_set({State::MomentumBuffer});
                       },
                   .pass =
                       [](const UpdateConfig& u, double lr, i64 step) noexcept {
                         return UpdateParams{.rule = u.momentum == 0 ? UpdateRule::Sgd
                                                     : u.nesterov    ? UpdateRule::Nesterov
                                                                     : UpdateRule::Momentum,
                                             .beta1 = u.momentum,
                                             .rest1 = step == 1 ? 1 : 1 - u.dampening,
                                             .lr = static_cast<float>(lr)};
                       }};

}  // namespace ds::optim
