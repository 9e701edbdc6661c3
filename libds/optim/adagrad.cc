// SPDX-License-Identifier: Apache-2.0
// Adagrad: one pass, the sum of squared gradients.

#include "optim/kind.h"

namespace ds::optim {
namespace {

class Adagrad final : public OnePass {
 public:
  Adagrad(const UpdateConfig& u, GroupTensors group) : OnePass(std::move(group)), u_(u) {}

 private:
  UpdateParams params(double lr, i64) const override {
    return {.rule = UpdateRule::Adagrad, .lr = static_cast<float>(lr), .eps = u_.eps};
  }
  UpdateConfig u_;
};

}  // namespace

const Kind kAdagrad = {.states = [](const UpdateConfig&) noexcept { return state_set({State::Sum}); },
                       .make = [](const UpdateConfig& u, GroupTensors group, void*) -> std::unique_ptr<Optimizer> {
                         return std::make_unique<Adagrad>(u, std::move(group));
                       }};

}  // namespace ds::optim
