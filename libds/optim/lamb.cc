// SPDX-License-Identifier: Apache-2.0
// LAMB: moments and the direction of each parameter, the norms of the parameter and of its direction, and a step along
// the direction. The bias correction of the moments is outside of the ratio of norms, as in DeepSpeed.
//
// 1-bit LAMB is LAMB up to freeze_step, and keeps a running mean of each parameter's ratio. After it, ranks keep their
// own gradients and average the momentum by signs and scales, and the second moment is frozen. The ratio is replaced by
// its mean times a factor: the largest quotient of the frozen second moment and a fresh one, which is updated with
// gradients that are computed from the momentum.
//
// DeepSpeed counts elements that never had a gradient as 1 in that maximum, so the factor of an embedding with an
// unused token cannot fall below 1; here they are left out. DeepSpeed scales all parameters to a common size before it
// takes signs, because they share one scale; here each parameter has its own scale, so that would change nothing.

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "optim/kind.h"
#include "optim/param_norms.h"

namespace ds::optim {
namespace {

// A step along the directions, which include the weight decay.
void descend(const UpdateContext& c, const UpdateConfig& u, i64 bias2_step, TensorView factors) {
  const double correction = u.bias_correction ? std::sqrt(1 - std::pow(u.beta2, static_cast<double>(bias2_step))) /
                                                    (1 - std::pow(u.beta1, static_cast<double>(c.step)))
                                              : 1.0;
  c.states.update({.params = c.pass({.rule = UpdateRule::Descend, .lr = static_cast<float>(c.lr * correction)}),
                   .factors = factors.as<float>(),
                   .decay = false});
}

// Updates moments and directions; returns the ratios of norms, in the ops' memory.
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
  // Per parameter: the mean of its ratios, and the factor of the last update.
  static constexpr i64 kNumbers = 2;

  OneBitLamb(const UpdateConfig& u, i64 num_params, void* workspace)
      : u_(u),
        norms_(num_params, kRatios + 1, workspace),
        kept_(static_cast<size_t>(num_params * kNumbers)),
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
  double& mean(size_t k) noexcept { return kept_[kNumbers * k]; }
  double& factor(size_t k) noexcept { return kept_[kNumbers * k + 1]; }  // 0 before the freeze

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
    if (u.weight_decay > 0) {  // norms of directions without it take two more passes, and no more messages than LAMB's
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

  // Rows of norms_: directions without decay, instead of masters, and ratios of variances.
  static constexpr i64 kWithoutDecay = ParamNorms::kMasters, kRatios = 2;

  UpdateConfig u_;
  ParamNorms norms_;
  std::vector<double> kept_;
  // On the host.
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
    },
    .numbers_per_param = OneBitLamb::kNumbers,
    .phase = phase_around_freeze,
    .update_kinds = kinds_around_freeze};

}  // namespace ds::optim
