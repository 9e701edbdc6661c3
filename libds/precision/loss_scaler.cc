// SPDX-License-Identifier: Apache-2.0
#include "precision/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace ds {

LossScaler::LossScaler(const Fp16Config& config) : config_(config), dynamic_(config.enabled && config.loss_scale == 0) {
  // Smaller scales are not normal fp32 numbers.
  config_.min_loss_scale = std::max(config_.min_loss_scale, 0x1p-126);
  if (dynamic_) {
    state_.scale = std::ldexp(1.0, narrow<int>(config.initial_scale_power));
    state_.hysteresis = config.hysteresis;
  } else if (config.enabled) {
    state_.scale = config.loss_scale;
  }
}

void LossScaler::update(bool overflow) {
  State& s = state_;
  if (dynamic_ && overflow) {
    if (config_.hysteresis == 1 || s.hysteresis == 1) {
      DS_CHECK(
          s.scale > config_.min_loss_scale, Errc::Numeric,
          "gradients overflow fp16 although the loss scale is at its minimum {} (fp16.min_loss_scale): the run has "
          "diverged; lower the learning rate, or train in bf16",
          config_.min_loss_scale);
      s.scale = std::max(s.scale / 2, config_.min_loss_scale);
    } else {
      --s.hysteresis;
    }
  } else if (dynamic_) {
    if (config_.consecutive_hysteresis) s.hysteresis = config_.hysteresis;
    const i64 good = s.iteration - s.last_overflow - 1;  // since the last overflow, without this iteration
    if (good > 0 && good % config_.loss_scale_window == 0) {
      s.hysteresis = config_.hysteresis;
      s.scale *= 2;
    }
  }
  if (overflow) s.last_overflow = s.iteration;
  ++s.iteration;
}

void LossScaler::restore(const State& state) {
  DS_CHECK(std::isfinite(state.scale) && state.scale > 0 && state.iteration >= 0 && state.last_overflow >= -1 &&
               state.last_overflow < state.iteration && state.hysteresis >= 1,
           Errc::Mismatch, "not a state of the loss scaler: scale {}, iteration {}, last overflow {}, hysteresis {}",
           state.scale, state.iteration, state.last_overflow, state.hysteresis);
  const double constant = state_.scale;
  state_ = state;
  if (!dynamic_) state_.scale = constant;
}

}  // namespace ds
