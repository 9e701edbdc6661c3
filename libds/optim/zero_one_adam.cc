// SPDX-License-Identifier: Apache-2.0
// 0/1 Adam. Up to var_freeze_step gradients are summed, and refresh the second moment, in every k-th update, where k
// doubles with each var_update_scaler refreshes; between these their mean by signs goes into the momentum alone. Then
// each rank steps by its own gradients, and in every k-th update all get the mean, by signs, of what the steps since
// the last one made of the parameters, and the momentum that would have made it; k doubles with each local_step_scaler
// updates, up to local_step_clipper.

#include <algorithm>

#include "optim/kind.h"

namespace ds::optim {

ZeroOneStep zero_one_step(const UpdateConfig& u, i64 step) noexcept {
  if (step <= u.var_freeze_step) {
    // Refreshes of interval k end with a multiple of k, and the next ones are the multiples of 2 k.
    i64 interval = 1, begin = 0;
    for (;;) {
      const i64 end = (begin / interval + u.var_update_scaler) * interval;
      if (step <= end || interval > u.var_freeze_step) break;
      begin = end;
      interval *= 2;
    }
    return step % interval == 0 ? ZeroOneStep::Refresh : ZeroOneStep::Signs;
  }
  const i64 doublings = std::min<i64>((step - 1 - u.var_freeze_step) / u.local_step_scaler, 40);
  const i64 interval = std::min(u.local_step_clipper, i64{1} << doublings);
  return step % interval == 0 ? ZeroOneStep::Sync : ZeroOneStep::Local;
}

namespace {

class ZeroOneAdam final : public Optimizer {
 public:
  explicit ZeroOneAdam(const UpdateConfig& u) : u_(u) {}

  void update(const UpdateContext& c) override {
    const UpdateConfig u = c.at_this_step(u_);
    const ZeroOneStep step = zero_one_step(u, c.step);
    UpdateParams params = kAdam.pass(u, c.lr, c.step);
    if (step == ZeroOneStep::Refresh) return c.states.update({.params = c.pass(params)});

    params.rule = UpdateRule::FrozenAdam;
    if (step == ZeroOneStep::Signs) {
      c.average->take_mean_gradient(u.beta1, 1 - u.beta1);
      return c.states.update({.params = c.pass(params)});
    }
    if (c.step == u.var_freeze_step + 1) c.average->forget_errors();  // they were of gradients
    if (!c.average->remembers()) c.average->remember_parameters();
    c.average->take_gradient(u.beta1, 1 - u.beta1);
    c.states.update({.params = c.pass(params)});
    c.average->rates() += params.lr;
    if (step != ZeroOneStep::Sync || c.average->rates() == 0) return;

    c.average->recall_parameters();
    params.rule = UpdateRule::ZeroOneDelta;
    c.states.update({.params = c.pass(params), .decay = false});
    c.average->average_directions();
    params.rule = UpdateRule::ZeroOneSync;
    params.lr = c.average->rates();
    c.states.update({.params = c.pass(params), .decay = false});
    c.average->remember_parameters();
  }

 private:
  UpdateConfig u_;
};

}  // namespace

const Kind kZeroOneAdam = {.states =
                               [](const UpdateConfig&) noexcept {
                                 return state_set({State::ExpAvg, State::ExpAvgSq});
                               },
                           .make = [](const UpdateConfig& u, const GroupSize&, void*) -> std::unique_ptr<Optimizer> {
                             return std::make_unique<ZeroOneAdam>(u);
                           }};

}  // namespace ds::optim
