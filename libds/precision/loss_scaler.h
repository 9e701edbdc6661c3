// SPDX-License-Identifier: Apache-2.0
#pragma once
// Loss scaling for fp16: DeepSpeed's dynamic scaling, or a constant.
//
// Order within a step: read scale() before backward, unscale the gradients with the same value, then call update().
// (DeepSpeed updates first and unscales with the new scale, which halves the gradients of every step that grows it.)

#include "ds/config.h"

namespace ds {

class LossScaler {
 public:
  struct State {
    double scale = 1;
    i64 iteration = 0;       // updates so far
    i64 last_overflow = -1;  // iteration of the last overflow
    i64 hysteresis = 1;      // overflows until the scale halves
    friend bool operator==(const State&, const State&) = default;
  };

  // Disabled (fp32, bf16): the constant 1. loss_scale > 0: that constant. loss_scale 0: dynamic.
  explicit LossScaler(const Fp16Config& config);

  double scale() const noexcept { return state_.scale; }
  bool dynamic() const noexcept { return dynamic_; }

  // Call once per step with the verdict, which is the same on every rank. Throws Errc::Numeric, without changing
  // anything, on an overflow at the minimum scale.
  void update(bool overflow);

  const State& state() const noexcept { return state_; }
  // Restores from a checkpoint; a constant scaler keeps its configured scale. Throws Errc::Mismatch for a state that
  // this scaler cannot reach.
  void restore(const State& state);

 private:
  Fp16Config config_;
  bool dynamic_;
  State state_;
};

}  // namespace ds
