// SPDX-License-Identifier: Apache-2.0
// The passes of optimizers in fp64, written from the papers and not from kernels/update_rules.h.

#include <cmath>

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
    case UpdateRule::LambDirection: e.g = moments() + decay * e.w; break;
    case UpdateRule::MuonDirection:
    case UpdateRule::NesterovMuonDirection:
      e.s0 = p.beta1 * e.s0 + rest1 * e.g;
      e.g = p.rule == UpdateRule::NesterovMuonDirection ? rest1 * e.g + p.beta1 * e.s0 : e.s0;
      break;
  }
}

bool makes_direction(UpdateRule rule) noexcept {
  return rule == UpdateRule::LambDirection || rule == UpdateRule::MuonDirection ||
         rule == UpdateRule::NesterovMuonDirection;
}

}  // namespace

void update(std::span<const UpdateTensor> tensors, const GradVerdict* verdict, const UpdateParams& p,
            Stream&) noexcept {
  if (!verdict->finite) return;
  for (const UpdateTensor& t : tensors) {
    const float scale = p.rule != UpdateRule::Descend ? verdict->grad_scale : t.factor != nullptr ? *t.factor : 1.0f;
    for (i64 i = 0; i < t.master.numel(); ++i) {
      Element e{get(t.master, i), get(t.grad, i) * static_cast<double>(scale), t.states[0] ? get(t.states[0], i) : 0,
                t.states[1] ? get(t.states[1], i) : 0};
      step(e, static_cast<double>(t.weight_decay), p);
      if (t.states[0]) put(t.states[0], i, e.s0);
      if (t.states[1]) put(t.states[1], i, e.s1);
      if (makes_direction(p.rule)) {
        put(t.grad, i, e.g);
        continue;
      }
      put(t.master, i, e.w);
      if (t.param) put(t.param, i, get(t.master, i));
    }
  }
}

}  // namespace ds::ref
