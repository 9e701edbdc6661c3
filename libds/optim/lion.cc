// SPDX-License-Identifier: Apache-2.0
// Lion: one pass, one state.

#include "optim/kind.h"

namespace ds::optim {
namespace {

class Lion final : public OnePass {
 public:
  Lion(const UpdateConfig& u, GroupTensors group) : OnePass(std::move(group)), u_(u) {}

 private:
  UpdateParams params(double lr, i64) const override {
    return {.rule = UpdateRule::Lion, .beta1 = u_.beta1, .beta2 = u_.beta2, .lr = static_cast<float>(lr)};
  }
  UpdateConfig u_;
};

}  // namespace

const Kind kLion = {.states = [](const UpdateConfig&) noexcept { return state_set({State::ExpAvg}); },
                    .make = [](const UpdateConfig& u, GroupTensors group, void*) -> std::unique_ptr<Optimizer> {
                      return std::make_unique<Lion>(u, std::move(group));
                    }};

}  // namespace ds::optim
