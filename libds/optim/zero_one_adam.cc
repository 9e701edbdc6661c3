// SPDX-License-Identifier: Apache-2.0
// 0/1 Adam. Up to var_freeze_step, every k-th update sums gradients and refreshes the second moment, where k doubles
// after each var_update_scaler refreshes; the updates between average gradients by signs, for the momentum alone. After
// var_freeze_step each rank takes steps by its own gradients. Every k-th of these averages by signs the changes that
// the steps since the last average made to the parameters, and sets the momentum that would have made the mean change;
// k doubles after each local_step_scaler updates, up to local_step_clipper.

#include <algorithm>
#include <limits>
#include <map>

#include "optim/kind.h"

namespace ds::optim {

namespace {

// Updates after `begin` up to `end`; ranks meet in each whose number is a multiple of `interval`.
struct Block {
  i64 begin = 0, end = 0, interval = 1;
  bool refreshes = false;
  bool meets(i64 step) const noexcept { return step % interval == 0; }
  ZeroOneStep step_of(bool met) const noexcept {
    return refreshes ? (met ? ZeroOneStep::Refresh : ZeroOneStep::Signs)
                     : (met ? ZeroOneStep::Sync : ZeroOneStep::Local);
  }
};

Block block_of(const UpdateConfig& u, i64 step) noexcept {
  if (step <= u.var_freeze_step) {
    // Refreshes of interval k end with a multiple of k, and the next ones are the multiples of 2 k.
    Block b{.refreshes = true};
    for (;;) {
      b.end = (b.begin / b.interval + u.var_update_scaler) * b.interval;
      if (step <= b.end || b.interval > u.var_freeze_step) break;
      b.begin = b.end;
      b.interval *= 2;
    }
    b.end = step <= b.end ? std::min(b.end, u.var_freeze_step) : u.var_freeze_step;
    return b;
  }
  const i64 doublings = std::min<i64>((step - 1 - u.var_freeze_step) / u.local_step_scaler, 40),
            begin = u.var_freeze_step + doublings * u.local_step_scaler,
            interval = std::min(u.local_step_clipper, i64{1} << doublings);
  const bool last = interval == u.local_step_clipper || doublings == 40;
  return {.begin = begin,
          .end = last ? std::numeric_limits<i64>::max() : begin + u.local_step_scaler,
          .interval = interval};
}

}  // namespace

ZeroOneStep zero_one_step(const UpdateConfig& u, i64 step) noexcept {
  const Block b = block_of(u, step);
  return b.step_of(b.meets(step));
}

std::vector<UpdateKind> zero_one_kinds(const UpdateConfig& u, i64 updates) {
  std::map<ZeroOneStep, UpdateKind> kinds;
  const auto add = [&](ZeroOneStep step, i64 number, i64 times) {
    if (times > 0) kinds.try_emplace(step, UpdateKind{number, 0}).first->second.times += times;
  };
  for (i64 begin = 0; begin < updates;) {
    const Block b = block_of(u, begin + 1);
    const i64 end = std::min(b.end, updates), met = end / b.interval - begin / b.interval;
    add(b.step_of(true), (begin / b.interval + 1) * b.interval, met);
    add(b.step_of(false), begin + (b.meets(begin + 1) ? 2 : 1), end - begin - met);
    begin = end;
  }
  std::vector<UpdateKind> all;
  for (const auto& [step, kind] : kinds) all.push_back(kind);
  return all;
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
    c.average->add_rate(params.lr);
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

Phase phase_of(const UpdateConfig& u, i64 step) noexcept {
  const ZeroOneStep what = zero_one_step(u, step);
  const bool any_signs = step > std::min(u.var_update_scaler, u.var_freeze_step);
  return {.local_gradients = what != ZeroOneStep::Refresh,
          .local_params = what == ZeroOneStep::Local,
          .errors_of = !any_signs                  ? ""
                       : step <= u.var_freeze_step ? "gradient"
                                                   : "parameter"};
}

}  // namespace

const Kind kZeroOneAdam = {.states =
                               [](const UpdateConfig&) noexcept {
                                 return state_set({State::ExpAvg, State::ExpAvgSq});
                               },
                           .make = [](const UpdateConfig& u, const GroupSize&, void*) -> std::unique_ptr<Optimizer> {
                             return std::make_unique<ZeroOneAdam>(u);
                           },
                           .phase = phase_of,
                           .update_kinds = zero_one_kinds};

}  // namespace ds::optim
