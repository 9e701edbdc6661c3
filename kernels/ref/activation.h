// SPDX-License-Identifier: Apache-2.0
#pragma once
// The activations and their derivatives in fp64.

#include <cmath>
#include <numbers>

#include "ds/kernels/ops.h"

namespace ds::ref {

inline double sigmoid(double x) noexcept { return 1 / (1 + std::exp(-x)); }
// The normal distribution: Phi(x), accurate in the left tail too, and its density.
inline double normal_cdf(double x) noexcept { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
inline double normal_pdf(double x) noexcept {
  return std::exp(-0.5 * x * x) * (0.5 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
}
// GELU's tanh form is x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
inline constexpr double kGeluTanhScale = 2 * 0.79788456080286535588;
inline double gelu_tanh_argument(double x) noexcept { return kGeluTanhScale * (x + 0.044715 * x * x * x); }

inline double activate(Activation f, double x) noexcept {
  switch (f) {
    case Activation::None: return x;
    case Activation::GeluTanh: return x * sigmoid(gelu_tanh_argument(x));
    case Activation::GeluErf: return x * normal_cdf(x);
    case Activation::Silu: return x * sigmoid(x);
  }
  return x;
}

inline double activation_derivative(Activation f, double x) noexcept {
  switch (f) {
    case Activation::None: return 1;
    case Activation::GeluTanh: {
      const double s = sigmoid(gelu_tanh_argument(x));
      return s + x * s * sigmoid(-gelu_tanh_argument(x)) * kGeluTanhScale * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::GeluErf: return normal_cdf(x) + x * normal_pdf(x);
    case Activation::Silu: return sigmoid(x) * (1 + x * sigmoid(-x));
  }
  return 1;
}

}  // namespace ds::ref
