// SPDX-License-Identifier: Apache-2.0
// LAMB: moments and the direction of each parameter, the norms of both over the whole parameter, and a step along the
// direction. The correction of the moments' bias stands outside of the ratio, as in DeepSpeed.
//
// 1-bit LAMB is LAMB up to freeze_step, and keeps a running mean of each parameter's ratio. Then gradients stay on
// their ranks, which average the momentum by signs and scales, the second moment no longer changes, and in place of the
// ratio there is that mean, times how far a second moment that goes on, by gradients that the momentum tells of, has
// left the frozen one, where that is most.
//
// DeepSpeed counts elements that never had a gradient as 1 there, so that the factor of an embedding with a token that
// never came cannot fall below 1; they are left out here. It brings all parameters to a common size before their signs
// are taken, since these have one scale there; each parameter has its own here, and that would change nothing.

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "optim/kind.h"
#include "optim/param_norms.h"

namespace ds::optim {
namespace {

// A step along the directions, which have the decay in them.
void descend(const UpdateContext& c, const UpdateConfig& u, i64 bias2_step, TensorView factors) {
  const double correction = u.bias_correction ? std::sqrt(1 - std::pow(u.beta2, static_cast<double>(bias2_step))) /
                                                    (1 - std::pow(u.beta1, static_cast<double>(c.step)))
                                              : 1.0;
  c.states.update({.params = c.pass({.rule = UpdateRule::Descend, .lr = static_cast<float>(c.lr * correction)}),
                   .factors = factors.as<float>(),
                   .decay = false});
}

// Moments, directions, and the ratios of norms, where the ops run.
TensorView directions_and_ratios(const UpdateContext& c, const UpdateConfig& u, const ParamNorms& norms) {
  c.states.update(
      {.params = c.pass({.rule = UpdateRule::LambDirection, .beta1 = u.beta1, .beta2 = u.beta2, .eps = u.eps})});
  norms.begin(c);
  norms.take_largest(c, ParamNorms::kDirections, true);
  norms.reduce_largest(c);
  norms.take_squares(c, ParamNorms::kDirections, true);
  norms.reduce_squares(c);
  return norms.ratios(c, u.min_coeff, u.max_coeff);
}

class Lamb final : public Optimizer {
 public:
  Lamb(const UpdateConfig& u, i64 num_params, void* workspace) : u_(u), norms_(num_params, 2, workspace) {}
  void update(const UpdateContext& c) override {
    const UpdateConfig u = c.at_this_step(u_);
    descend(c, u, c.step, directions_and_ratios(c, u, norms_));
  }

 private:
  UpdateConfig u_;
  ParamNorms norms_;
};

class OneBitLamb final : public Optimizer {
 public:
  OneBitLamb(const UpdateConfig& u, i64 num_params, void* workspace)
      : u_(u),
        norms_(num_params, kRatios + 1, workspace),
        kept_(static_cast<size_t>(num_params * kLambNumbers)),
        factors_(static_cast<size_t>(num_params)),
        largest_(factors_.size()) {}

  void update(const UpdateContext& c) override {
    const UpdateConfig u = c.at_this_step(u_);
    if (c.step > u.freeze_step) return frozen_update(c, u);
    const TensorView ratios = directions_and_ratios(c, u, norms_);
    descend(c, u, c.step, ratios);
    c.download(factors_.data(), ratios.data, ratios.bytes());
    for (size_t k = 0; k < factors_.size(); ++k) {
      if (factors_[k] != 1) mean(k) = u.coeff_beta * mean(k) + (1 - u.coeff_beta) * double{factors_[k]};
      factor(k) = 0;
    }
  }

  std::span<double> numbers() noexcept override { return kept_; }

 private:
  double& mean(size_t k) noexcept { return kept_[kLambNumbers * k]; }
  double& factor(size_t k) noexcept { return kept_[kLambNumbers * k + 1]; }  // the last one; 0 before the freeze

  void frozen_update(const UpdateContext& c, const UpdateConfig& u) {
    if (!factors_.empty() && factor(0) == 0) {  // the first one
      c.average->copy_state(State::ExpAvgSq, State::ExpAvgSqFresh);
      for (size_t k = 0; k < factors_.size(); ++k) factor(k) = 1;
    }
    c.average->exchange_gradient(u.beta1, 1 - u.beta1);
    c.average->average_momentum();
    UpdateParams params{.beta1 = u.beta1, .beta2 = u.beta2, .eps = u.eps};
    const auto pass = [&](UpdateRule rule, bool decay = true) {
      params.rule = rule;
      c.states.update({.params = c.pass(params), .decay = decay});
    };
    pass(UpdateRule::MomentumGradient);
    pass(UpdateRule::VarianceRatio);
    norms_.begin(c);
    norms_.take_largest(c, kRatios);
    pass(UpdateRule::FrozenLambDirection);
    if (u.weight_decay > 0) {  // what the decay is of a direction, by two more passes and no more messages than LAMB's
      norms_.take_largest(c, ParamNorms::kDirections);
      pass(UpdateRule::FrozenLambDirection, false);
      norms_.take_largest(c, kWithoutDecay);
      norms_.reduce_largest(c);
      norms_.take_squares(c, kWithoutDecay);
      pass(UpdateRule::FrozenLambDirection);
      norms_.take_squares(c, ParamNorms::kDirections);
      norms_.reduce_squares(c);
      const TensorView ratios = norms_.ratios(c, 0, 1);
      c.download(factors_.data(), ratios.data, ratios.bytes());
    } else {
      norms_.reduce_largest(c);
      std::ranges::fill(factors_, 1.0f);
    }
    const TensorView largest = norms_.largest(kRatios);
    c.download(largest_.data(), largest.data, largest.bytes());
    for (size_t k = 0; k < factors_.size(); ++k) {
      const double share = double{factors_[k]}, left = double{std::bit_cast<float>(static_cast<u32>(largest_[k]))};
      const double bounded = std::clamp(left * share + 1 - share, u.factor_min, u.factor_max);
      factor(k) = std::clamp(bounded, factor(k) * (1 - u.factor_threshold), factor(k) * (1 + u.factor_threshold));
      factors_[k] = static_cast<float>(mean(k) * factor(k));
    }
    c.upload(norms_.factors().data, factors_.data(), norms_.factors().bytes());
    descend(c, u, u.freeze_step, norms_.factors());
  }

  // Rows of norms_: directions without decay, in the place of masters, and ratios of variances.
  static constexpr i64 kWithoutDecay = ParamNorms::kMasters, kRatios = 2;

  UpdateConfig u_;
  ParamNorms norms_;
  std::vector<double> kept_;
  // Of the host.
  std::vector<float> factors_;
  std::vector<i64> largest_;
};

}  // namespace

const Kind kLamb = {
    .states =
        [](const UpdateConfig&) noexcept {
          return state_set({State::ExpAvg, State::ExpAvgSq});
        },
    .make = [](const UpdateConfig& u, const GroupSize& size, void* workspace) -> std::unique_ptr<Optimizer> {
      return std::make_unique<Lamb>(u, size.num_params, workspace);
    },
    .workspace_bytes = [](const GroupSize& size) noexcept -> i64 {
      return ParamNorms::workspace_bytes(size.num_params, 2);
    }};

const Kind kOneBitLamb = {
    .states =
        [](const UpdateConfig&) noexcept {
          return state_set({State::ExpAvg, State::ExpAvgSq, State::ExpAvgSqFresh});
        },
    .make = [](const UpdateConfig& u, const GroupSize& size, void* workspace) -> std::unique_ptr<Optimizer> {
      return std::make_unique<OneBitLamb>(u, size.num_params, workspace);
    },
    .workspace_bytes = [](const GroupSize& size) noexcept -> i64 {
      return ParamNorms::workspace_bytes(size.num_params, 3);
    }};

}  // namespace ds::optim
