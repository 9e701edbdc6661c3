// SPDX-License-Identifier: Apache-2.0
#pragma once
// Activation functions of one float and their derivatives, all by one exponential and one quotient: GELU's tanh form is
// x sigmoid(2u), which unlike (1 + tanh u)/2 keeps its relative accuracy for negative x.

#include "cuda/simt.h"

namespace ds::cuda {

// e^-105 is 0 and e^105 infinite; nothing in between is either. NaN gives a number, since all callers multiply by x.
DS_DEVICE float exponential(float x) {
  const float clamped = std::fmin(std::fmax(x, -105.0f), 105.0f);
  // x log2(e) = whole + rest; rest is the rounding error of the product and of log2(e).
  const float whole = clamped * 1.44269502f;
  const float rest = std::fma(clamped, 1.92596303e-8f, std::fma(clamped, 1.44269502f, -whole));
  return fast_exp2(whole) * std::fma(rest, 0.693147182f, 1.0f);
}

DS_DEVICE float sigmoid(float x) { return fast_rcp(1.0f + exponential(-x)); }

// sigmoid(x) and sigmoid(-x), both without cancellation or overflow.
struct SigmoidPair {
  float plus, minus;
};
DS_DEVICE SigmoidPair sigmoid_pair(float x) {
  const float e = exponential(-std::fabs(x));
  const float large = fast_rcp(1.0f + e), small = e * large;
  return {x < 0 ? small : large, x < 0 ? large : small};
}

// 2u of GELU's tanh form: 2 sqrt(2/pi) (x + 0.044715 x^3).
inline constexpr float kGeluScale = 1.5957691216057307f, kGeluCubic = kGeluScale * 0.044715f;
DS_DEVICE float gelu_tanh_argument(float x) { return x * std::fma(x * x, kGeluCubic, kGeluScale); }

// The normal distribution: Phi(x) and its density.
struct Normal {
  float cdf, pdf;
};
DS_DEVICE Normal normal(float x) {
  // Phi(-t) = e^(-t^2/2) s P(s) with s = 1/(1 + 0.35 t), t >= 0: a degree-9 fit with relative error 2e-8 up to t = 14,
  // where the exponential underflows in fp32.
  const float t = std::fabs(x), e = exponential(-0.5f * t * t), s = fast_rcp(std::fma(0.35f, t, 1.0f));
  constexpr float kFit[] = {0.0036299643f, -0.048267748f, 0.18737242f,  -0.311254025f, 0.20319358f,
                            -0.045442134f, 0.11273524f,   0.118398905f, 0.1400197f,    0.139614075f};
  float p = kFit[0];
  DS_UNROLL for (int i = 1; i < 10; ++i) p = std::fma(p, s, kFit[i]);
  const float tail = e * (p * s);
  return {x < 0 ? tail : 1.0f - tail, e * 0.3989422804f};
}

template <Activation kind>
DS_DEVICE float activate(float x) {
  if constexpr (kind == Activation::GeluTanh) return x * sigmoid(gelu_tanh_argument(x));
  if constexpr (kind == Activation::GeluErf) return x * normal(x).cdf;
  if constexpr (kind == Activation::Silu) return x * sigmoid(x);
  if constexpr (kind == Activation::None) return x;
}

template <Activation kind>
DS_DEVICE float derivative(float x) {
  if constexpr (kind == Activation::GeluTanh) {
    // Beyond 16 the derivative is 0 or 1 in fp32, and x^2 stays finite. NaN passes, unlike with fmin.
    const float c = x < -16.0f ? -16.0f : x > 16.0f ? 16.0f : x;
    const SigmoidPair s = sigmoid_pair(gelu_tanh_argument(c));
    return std::fma(c * std::fma(c * c, 3 * kGeluCubic, kGeluScale), s.plus * s.minus, s.plus);
  }
  if constexpr (kind == Activation::GeluErf) {
    const Normal n = normal(x);
    return std::fma(x, n.pdf, n.cdf);
  }
  if constexpr (kind == Activation::Silu) {
    const SigmoidPair s = sigmoid_pair(x);
    return std::fma(x * s.plus, s.minus, s.plus);
  }
}

// The same, chosen at run time.
DS_DEVICE float activate(Activation f, float x) {
  switch (f) {
    case Activation::None: return x;
    case Activation::GeluTanh: return activate<Activation::GeluTanh>(x);
    case Activation::GeluErf: return activate<Activation::GeluErf>(x);
    case Activation::Silu: return activate<Activation::Silu>(x);
  }
  return x;
}

}  // namespace ds::cuda
