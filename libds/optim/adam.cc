// SPDX-License-Identifier: Apache-2.0
// AdamW and Adam: one pass. The powers of the betas are taken in fp64, of the number of updates applied.

#include <cmath>

#include "optim/kind.h"

namespace ds::optim {
namespace {

class Adam final : public OnePass {
 public:
  Adam(const UpdateConfig& u, GroupTensors group) : OnePass(std::move(group)), u_(u) {}

 private:
  UpdateParams params(double lr, i64 step) const override {
    const double t = static_cast<double>(step);
    return {.rule = u_.adam_w_mode ? UpdateRule::AdamW : UpdateRule::AdamL2,
            .beta1 = u_.beta1,
            .beta2 = u_.beta2,
            .lr = static_cast<float>(lr),
            .eps = u_.eps,
            .bias1 = u_.bias_correction ? static_cast<float>(1 - std::pow(u_.beta1, t)) : 1.0f,
            .bias2 = u_.bias_correction ? static_cast<float>(1 - std::pow(u_.beta2, t)) : 1.0f};
  }
  UpdateConfig u_;
};

}  // namespace

const Kind kAdam = {.states =
                        [](const UpdateConfig&) noexcept {
                          return state_set({State::ExpAvg, State::ExpAvgSq});
                        },
                    .make = [](const UpdateConfig& u, GroupTensors group, void*) -> std::unique_ptr<Optimizer> {
                      return std::make_unique<Adam>(u, std::move(group));
                    }};

}  // namespace ds::optim
