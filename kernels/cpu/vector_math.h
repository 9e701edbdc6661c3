// SPDX-License-Identifier: Apache-2.0
#pragma once
// Activations and their derivatives on vectors, all by one exponential and one quotient: GELU's tanh form is x
// sigmoid(2u), which unlike (1 + tanh u)/2 keeps its relative accuracy for negative x.

#include "cpu/simd.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

inline Vec sigmoid(Vec x) noexcept { return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x)); }

// sigmoid(x) and sigmoid(-x), both without cancellation or overflow.
struct SigmoidPair {
  Vec plus, minus;
};
inline SigmoidPair sigmoid_pair(Vec x) noexcept {
  const Vec e = exp(zero() - abs(x));
  const Vec large = broadcast(1.0f) / (broadcast(1.0f) + e);
  const Vec small = e * large;
  const Mask negative = less(x, zero());
  return {select(negative, small, large), select(negative, large, small)};
}

// 2u of GELU's tanh form: 2 sqrt(2/pi) (x + 0.044715 x^3).
inline Vec gelu_tanh_argument(Vec x) noexcept {
  constexpr float kScale = 1.5957691216057307f;
  return x * fma(x * x, broadcast(kScale * 0.044715f), broadcast(kScale));
}

// The normal distribution: Phi(x) and its density.
struct Normal {
  Vec cdf, pdf;
};
inline Normal normal(Vec x) noexcept {
  // Phi(-t) = e^(-t^2/2) s P(s) with s = 1/(1 + 0.35 t), t >= 0: a degree-9 fit with relative error 2e-8 up to t = 14,
  // where the exponential underflows in fp32.
  const Vec t = abs(x);
  const Vec e = exp(broadcast(-0.5f) * t * t);
  const Vec s = broadcast(1.0f) / fma(broadcast(0.35f), t, broadcast(1.0f));
  Vec p = broadcast(0.0036299643f);
  p = fma(p, s, broadcast(-0.048267748f));
  p = fma(p, s, broadcast(0.18737242f));
  p = fma(p, s, broadcast(-0.311254025f));
  p = fma(p, s, broadcast(0.20319358f));
  p = fma(p, s, broadcast(-0.045442134f));
  p = fma(p, s, broadcast(0.11273524f));
  p = fma(p, s, broadcast(0.118398905f));
  p = fma(p, s, broadcast(0.1400197f));
  p = fma(p, s, broadcast(0.139614075f));
  const Vec tail = e * (p * s);
  return {select(less(x, zero()), tail, broadcast(1.0f) - tail), e * broadcast(0.3989422804f)};
}

template <Activation kind>
inline Vec activate(Vec x) noexcept {
  if constexpr (kind == Activation::GeluTanh) return x * sigmoid(gelu_tanh_argument(x));
  if constexpr (kind == Activation::GeluErf) return x * normal(x).cdf;
  if constexpr (kind == Activation::Silu) return x * sigmoid(x);
  return x;
}

template <Activation kind>
inline Vec activation_derivative(Vec x) noexcept {
  if constexpr (kind == Activation::GeluTanh) {
    // Beyond 16 the derivative is 0 or 1 in fp32, and x^2 stays finite. NaN passes (see exp).
    const Vec clamped = min(broadcast(16.0f), max(broadcast(-16.0f), x));
    const SigmoidPair s = sigmoid_pair(gelu_tanh_argument(clamped));
    const Vec slope = fma(clamped * clamped, broadcast(3 * 0.0713548162726f), broadcast(1.5957691216057307f));
    return fma(clamped * slope, s.plus * s.minus, s.plus);
  }
  if constexpr (kind == Activation::GeluErf) {
    const Normal n = normal(x);
    return fma(x, n.pdf, n.cdf);
  }
  if constexpr (kind == Activation::Silu) {
    const SigmoidPair s = sigmoid_pair(x);
    return fma(x * s.plus, s.minus, s.plus);
  }
  return broadcast(1.0f);
}

// Calls f.template operator()<kind>() for the activation named at run time.
template <class F>
inline void with_activation(Activation kind, F&& f) noexcept {
  switch (kind) {
    case Activation::None: f.template operator()<Activation::None>(); break;
    case Activation::GeluTanh: f.template operator()<Activation::GeluTanh>(); break;
    case Activation::GeluErf: f.template operator()<Activation::GeluErf>(); break;
    case Activation::Silu: f.template operator()<Activation::Silu>(); break;
  }
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
