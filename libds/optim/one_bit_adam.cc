// SPDX-License-Identifier: Apache-2.0
// 1-bit Adam: Adam up to freeze_step. After it, ranks keep their own gradients, update their momentum with them, and
// average the momentums by signs and scales. The second moment is frozen, and its bias correction with it.

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

Phase phase_around_freeze(const UpdateConfig& u, i64 step) noexcept {
  if (step <= u.freeze_step) return {};
  return {.local_gradients = true, .errors_of = "momentum"};
}

std::vector<UpdateKind> kinds_around_freeze(const UpdateConfig& u, i64 updates) {
  if (updates <= u.freeze_step) return {{1, updates}};
  // The first update after the freeze gathers momentums that ZeRO has cut in slices.
  std::vector<UpdateKind> kinds = {{1, u.freeze_step}, {u.freeze_step + 1, 1}};
  if (const i64 rest = updates - u.freeze_step - 1; rest > 0) kinds.push_back({u.freeze_step + 2, rest});
  return kinds;
}

const Kind kOneBitAdam = {.states =
                              [](const UpdateConfig&) noexcept {
                                return state_set({State::ExpAvg, State::ExpAvgSq});
                              },
                          .make = [](const UpdateConfig& u, const GroupSize&, void*) -> std::unique_ptr<Optimizer> {
                            return std::make_unique<OneBitAdam>(u);
                          },
                          .phase = phase_around_freeze,
                          .update_kinds = kinds_around_freeze};

}  // namespace ds::optim
