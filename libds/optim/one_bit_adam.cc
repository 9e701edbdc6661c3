// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam: Adam up to freeze_step. Then gradients stay on their ranks, the momentum of each takes its own in, and
// the ranks average these by signs and scales; the second moment no longer changes, and with it the factors of a step.

#include <algorithm>
#include <cmath>

#include "optim/kind.h"

namespace ds::optim {
namespace {

class OneBitAdam final : public Optimizer {
 public:
  explicit OneBitAdam(const UpdateConfig& u) : u_(u) {}

  void update(const UpdateContext& c) override {
    const UpdateConfig u = c.at_this_step(u_);
    UpdateParams params = kAdam.pass(u, c.lr, c.step);
    if (c.step > u.freeze_step) {
      c.average->take_gradient(u.beta1, 1 - u.beta1);
      c.average->average_momentum();
      params.rule = UpdateRule::FrozenAdam;
      if (u.bias_correction)
        params.bias2 = static_cast<float>(1 - std::pow(u.beta2, static_cast<double>(std::max<i64>(u.freeze_step, 1))));
    }
    c.states.update({.params = c.pass(params)});
  }

 private:
  UpdateConfig u_;
};

}  // namespace

const Kind kOneBitAdam = {.states =
                              [](const UpdateConfig&) noexcept {
                                return state_set({State::ExpAvg, State::ExpAvgSq});
                              },
                          .make = [](const UpdateConfig& u, const GroupSize&, void*) -> std::unique_ptr<Optimizer> {
                            return std::make_unique<OneBitAdam>(u);
                          }};

}  // namespace ds::optim
