// SPDX-License-Identifier: Apache-2.0
// SGD, with momentum if there is any; the first gradient enters the momentum undampened, as in PyTorch.

#include "optim/kind.h"

namespace ds::optim {
namespace {

class Sgd final : public OnePass {
 public:
  Sgd(const UpdateConfig& u, GroupTensors group) : OnePass(std::move(group)), u_(u) {}

 private:
  UpdateParams params(double lr, i64 step) const override {
    return {.rule = u_.momentum == 0 ? UpdateRule::Sgd
                    : u_.nesterov    ? UpdateRule::Nesterov
                                     : UpdateRule::Momentum,
            .beta1 = u_.momentum,
            .rest1 = step == 1 ? 1 : 1 - u_.dampening,
            .lr = static_cast<float>(lr)};
  }
  UpdateConfig u_;
};

}  // namespace

const Kind kSgd = {.states =
                       [](const UpdateConfig& u) noexcept {
                         return u.momentum == 0 ? StateSet{} : state_set({State::MomentumBuffer});
                       },
                   .make = [](const UpdateConfig& u, GroupTensors group, void*) -> std::unique_ptr<Optimizer> {
                     return std::make_unique<Sgd>(u, std::move(group));
                   }};

}  // namespace ds::optim
