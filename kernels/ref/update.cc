// SPDX-License-Identifier: Apache-2.0
// The passes of optimizers in fp64, written from the papers and not from kernels/update_rules.h.

#include <algorithm>
#include <cmath>
#include <vector>

#include "ds/kernels/state_codes.h"
#include "ref/element.h"
#include "ref/ref.h"

namespace ds::ref {
namespace {

struct Element {
  double w, g, s0, s1;
};

void step(Element& e, double decay, const UpdateParams& p) noexcept {
  const double rest1 = p.rest1 >= 0 ? p.rest1 : 1 - p.beta1, lr = static_cast<double>(p.lr),
               eps = static_cast<double>(p.eps);
  const auto moments = [&] {
    e.s0 = p.beta1 * e.s0 + rest1 * e.g;
    e.s1 = p.beta2 * e.s1 + (1 - p.beta2) * e.g * e.g;
    return e.s0 / static_cast<double>(p.bias1) / (std::sqrt(e.s1 / static_cast<double>(p.bias2)) + eps);
  };
  switch (p.rule) {
    case UpdateRule::AdamW: {
      const double old = e.w;
      e.w -= lr * moments();
      e.w -= lr * decay * old;
      break;
    }
    case UpdateRule::AdamL2:
      e.g += decay * e.w;
      e.w -= lr * moments();
      break;
    case UpdateRule::Sgd:
    case UpdateRule::Descend: e.w -= lr * (e.g + decay * e.w); break;
    case UpdateRule::Momentum:
    case UpdateRule::Nesterov:
      e.g += decay * e.w;
      e.s0 = p.beta1 * e.s0 + rest1 * e.g;
      e.w -= lr * (p.rule == UpdateRule::Nesterov ? e.g + p.beta1 * e.s0 : e.s0);
      break;
    case UpdateRule::Lion: {
      const double c = p.beta1 * e.s0 + rest1 * e.g;
      e.w = e.w * (1 - lr * decay) - lr * (c > 0 ? 1.0 : c < 0 ? -1.0 : 0.0);
      e.s0 = p.beta2 * e.s0 + (1 - p.beta2) * e.g;
      break;
    }
    case UpdateRule::Adagrad:
      e.g += decay * e.w;
      e.s0 += e.g * e.g;
      e.w -= lr * e.g / (std::sqrt(e.s0) + eps);
      break;
    case UpdateRule::FrozenAdam: {
      const double old = e.w;
      if (e.s1 > 0)
        e.w -= lr * e.s0 / static_cast<double>(p.bias1) / (std::sqrt(e.s1 / static_cast<double>(p.bias2)) + eps);
      e.w -= lr * decay * old;
      break;
    }
    case UpdateRule::ZeroOneDelta: e.g = e.s1 > 0 ? (e.s0 - e.w) * (std::sqrt(e.s1) + eps) : 0; break;
    case UpdateRule::ZeroOneSync:
      if (e.s1 > 0) e.w = e.s0 - e.g / (std::sqrt(e.s1) + eps);
      e.s0 = e.s1 > 0 ? e.g / lr : 0;
      break;
    case UpdateRule::MomentumGradient: e.g = e.s1 > 0 ? (e.s0 - p.beta1 * e.g) / rest1 : 0; break;
    case UpdateRule::VarianceRatio:
      e.s1 = p.beta2 * e.s1 + (1 - p.beta2) * e.g * e.g;
      e.g = e.s0 > 0 ? (std::sqrt(e.s0) + eps) / (std::sqrt(e.s1) + eps) : 0;
      break;
    case UpdateRule::FrozenLambDirection: e.g = (e.s1 > 0 ? e.s0 / (std::sqrt(e.s1) + eps) : 0) + decay * e.w; break;
    case UpdateRule::OuterDelta: e.g = e.s0 - e.w; break;
    case UpdateRule::OuterMomentum:
    case UpdateRule::OuterNesterov: {
      const double mean = rest1 * e.g;
      e.s1 = p.beta1 * e.s1 + mean;
      e.s0 -= lr * (p.rule == UpdateRule::OuterNesterov ? mean + p.beta1 * e.s1 : e.s1);
      e.w = p.beta2 * e.w + (1 - p.beta2) * e.s0;
      break;
    }
    case UpdateRule::LambDirection: e.g = moments() + decay * e.w; break;
    case UpdateRule::MuonDirection:
    case UpdateRule::NesterovMuonDirection:
      e.s0 = p.beta1 * e.s0 + rest1 * e.g;
      e.g = p.rule == UpdateRule::NesterovMuonDirection ? rest1 * e.g + p.beta1 * e.s0 : e.s0;
      break;
  }
}

// The values of a state's codes, by magnitude, and a search for the nearest one to a number between 0 and 1.
struct Map {
  explicit Map(DType t) : is_signed(t == DType::I8) {
    const int bits = is_signed ? 7 : 8;
    values = {0};
    for (int decade = 0; decade < bits; ++decade) {
      const double top = std::pow(10.0, decade + 1 - bits), width = 0.9 / std::pow(2.0, decade);
      for (int cell = 0; cell < 1 << decade; ++cell) values.push_back(top * (0.1 + width * (cell + 0.5)));
    }
    values.back() = 1;
  }
  size_t nearest(double x) const {
    const auto above = std::lower_bound(values.begin(), values.end(), x);
    if (above == values.end()) return values.size() - 1;
    const auto i = static_cast<size_t>(above - values.begin());
    if (i == 0 || (i == 1 && !is_signed)) return i;  // an unsigned number is zero only if it is exactly zero
    return values[i] - x <= x - values[i - 1] ? i : i - 1;
  }
  bool is_signed;
  std::vector<double> values;
};

double get_state(const TensorView& v, i64 i) {
  if (!is_coded(v.dtype)) return get(v, i);
  static const Map with_sign(DType::I8), without(DType::U8);
  const double scale = static_cast<double>(v.scale[i / kStateBlock]);
  if (v.dtype == DType::U8) return without.values[v.as<u8>()[i]] * scale;
  const int k = v.as<std::int8_t>()[i];
  return (k < 0 ? -1 : 1) * with_sign.values[std::abs(k)] * scale;
}

// Elements [begin, end), which form a block of codes.
void put_state(const TensorView& v, i64 begin, i64 end, const double* x, const UpdateTensor& t, const UpdateParams& p,
               bool high_half) {
  double largest = 0;
  bool finite = true;
  for (i64 i = begin; i < end; ++i) {
    largest = std::max(largest, std::abs(x[i - begin]));
    finite &= std::isfinite(static_cast<float>(x[i - begin]));
  }
  const float scale = !finite ? NAN : largest < 0x1p-100 ? 0 : static_cast<float>(largest);
  if (is_coded(v.dtype)) v.scale[begin / kStateBlock] = scale;
  const Map map(v.dtype);
  for (i64 i = begin; i < end; ++i) {
    const double value = x[i - begin];
    if (v.dtype == DType::BF16) {
      const u32 word = RngKey{p.rng.seed, t.site, p.rng.step}.bits(static_cast<u64>(t.first + i));
      v.as<bf16>()[i] = round_stochastically(static_cast<float>(value), high_half ? word >> 16 : word & 0xFFFF);
    } else if (!is_coded(v.dtype)) {
      put(v, i, value);
    } else {
      const auto k = scale > 0 ? static_cast<int>(map.nearest(std::abs(value) / static_cast<double>(scale))) : 0;
      v.as<u8>()[i] = static_cast<u8>(value < 0 ? -k : k);
    }
  }
}

}  // namespace

void update(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams& p,
            Stream&) noexcept {
  if (!verdict->finite) return;
  for (const UpdateTensor& t : tensors) {
    const float scale = facts_of(p.rule).takes_gradient() ? verdict->grad_scale
                        : t.factor != nullptr             ? *t.factor
                                                          : 1.0f;
    double states[2][kStateBlock] = {};
    for (i64 i = 0, begin = 0; i < t.master.numel(); ++i) {
      Element e{get(t.master, i), get(t.grad, i) * static_cast<double>(scale),
                t.states[0] ? get_state(t.states[0], i) : 0, t.states[1] ? get_state(t.states[1], i) : 0};
      step(e, static_cast<double>(t.weight_decay), p);
      states[0][i - begin] = e.s0;
      states[1][i - begin] = e.s1;
      if (i + 1 == t.master.numel() || i + 1 == begin + kStateBlock) {
        for (int j = 0; j < 2; ++j) {
          if (t.states[j]) put_state(t.states[j], begin, i + 1, states[j], t, p, j == 0);
        }
        begin = i + 1;
      }
      if (facts_of(p.rule).makes_direction()) {
        put(t.grad, i, e.g);
        continue;
      }
      if (p.stochastic && t.master.dtype == DType::BF16) {
        const u32 word = RngKey{p.rng.seed, t.site + kMasterSite, p.rng.step}.bits(static_cast<u64>(t.first + i));
        t.master.as<bf16>()[i] = round_stochastically(static_cast<float>(e.w), word >> 16);
      } else {
        put(t.master, i, e.w);
      }
      if (t.param && t.param.data != t.master.data) put(t.param, i, get(t.master, i));
    }
  }
}

}  // namespace ds::ref
