// SPDX-License-Identifier: Apache-2.0
#pragma once
// The arithmetic of optimizers, element by element, shared by all back ends, which load and store (dtypes, instruction
// sets, threads). A new rule is a struct here, a line of with_rule(), and a row of kUpdateRules in ds/kernels/ops.h. V
// is a vector of fp32 lanes or one float; each operation is rounded for itself, so that all back ends agree bit for
// bit.
//   w      the fp32 parameter
//   g      its gradient, unscaled and clipped
//   s      its states, in the order of UpdateTensor::states
//   decay  weight decay
// A rule that makes a direction (RuleFacts) writes it to g and leaves w unchanged: the rest of the update needs the
// whole parameter (LAMB's norms, Muon's matrix), and Descend then steps along the direction.

#include <cmath>

#include "ds/kernels/ops.h"

namespace ds::update_rules {

// UpdateParams as rules use them, each rounded once.
template <class V>
struct Constants {
  V beta1, rest1, beta2, rest2, bias1, bias2, eps, lr;
};

// `splat` makes a V of a float.
template <class V, class Splat>
Constants<V> constants_of(const UpdateParams& p, Splat splat) noexcept {
  return {splat(static_cast<float>(p.beta1)),
          splat(static_cast<float>(p.rest1 >= 0 ? p.rest1 : 1 - p.beta1)),
          splat(static_cast<float>(p.beta2)),
          splat(static_cast<float>(1 - p.beta2)),
          splat(p.bias1),
          splat(p.bias2),
          splat(p.eps),
          splat(p.lr)};
}

DS_HOST_DEVICE inline float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }

// A step, before it is divided.
template <class V>
struct Quotient {
  V above, below;
};

// Both moments take g in; returns the step that they make.
template <class V>
DS_HOST_DEVICE Quotient<V> step_of_moments(const V& g, V* s, const Constants<V>& k) {
  using std::sqrt;
  s[0] = k.beta1 * s[0] + k.rest1 * g;
  s[1] = k.beta2 * s[1] + k.rest2 * g * g;
  return {s[0] / k.bias1, sqrt(s[1] / k.bias2) + k.eps};
}

// Kingma, Ba: "Adam" (L2: the decay is a part of the gradient); Loshchilov, Hutter: "Decoupled Weight Decay
// Regularization". It has two parts, between which a back end may do something else: what becomes of the states, and
// what the step that they make does to the parameter.
template <bool decoupled>
struct Adam {
  template <class V>
  DS_HOST_DEVICE static Quotient<V> change_states(const V& w, const V& g, V* s, V decay, const Constants<V>& k) {
    if constexpr (decoupled) return step_of_moments(g, s, k);
    return step_of_moments(g + decay * w, s, k);
  }
  template <class V>
  DS_HOST_DEVICE static void change_parameter(V& w, const Quotient<V>& step, V decay, const Constants<V>& k) {
    V update = step.above / step.below;
    if constexpr (decoupled) update = update + decay * w;
    w = w - k.lr * update;
  }
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    change_parameter(w, change_states(w, g, s, decay, k), decay, k);
  }
};

struct Sgd {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V*, V decay, const Constants<V>& k) {
    w = w - k.lr * (g + decay * w);
  }
};

// Sutskever, Martens, Dahl, Hinton: "On the importance of initialization and momentum", as PyTorch writes it.
template <bool nesterov>
struct Momentum {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    g = g + decay * w;
    s[0] = k.beta1 * s[0] + k.rest1 * g;
    V update = s[0];
    if constexpr (nesterov) update = g + k.beta1 * s[0];
    w = w - k.lr * update;
  }
};

// Chen et al.: "Symbolic Discovery of Optimization Algorithms". The sign of 0 is 0.
struct Lion {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    const V update = sign(k.beta1 * s[0] + k.rest1 * g) + decay * w;
    s[0] = k.beta2 * s[0] + k.rest2 * g;
    w = w - k.lr * update;
  }
};

// Duchi, Hazan, Singer: "Adaptive Subgradient Methods".
struct Adagrad {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    using std::sqrt;
    g = g + decay * w;
    s[0] = s[0] + g * g;
    w = w - k.lr * (g / (sqrt(s[0]) + k.eps));
  }
};

// Tang et al.: "1-bit Adam", when the second moment no longer changes: along a momentum that has been averaged already.
// A parameter without any gradient so far moves by its decay alone: a sign cannot express 0, and would be divided by
// eps.
struct FrozenAdam {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V&, V* s, V decay, const Constants<V>& k) {
    using std::sqrt;
    const V step = sign(s[1]) * s[0] / k.bias1;
    w = w - k.lr * (step / (sqrt(s[1] / k.bias2) + k.eps) + decay * w);
  }
};

// Lu et al.: "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam": by how much a rank's own
// steps have moved the parameter since all had the same one, s[0], in the units of a momentum; and what becomes of it
// by the ranks' mean of that, with the momentum that would have done it in steps whose rates add up to lr.
struct ZeroOneDelta {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V, const Constants<V>& k) {
    using std::sqrt;
    g = sign(s[1]) * (s[0] - w) * (sqrt(s[1]) + k.eps);
  }
};
struct ZeroOneSync {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V, const Constants<V>& k) {
    using std::sqrt;
    const V moves = sign(s[1]), mean = moves * g;
    w = moves * s[0] + (w - moves * w) - mean / (sqrt(s[1]) + k.eps);  // to the bit where it moves: of no rank's w
    s[0] = mean / k.lr;
  }
};

// You et al.: "Large Batch Optimization for Deep Learning", up to the ratio of the norms.
struct LambDirection {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    const Quotient<V> step = step_of_moments(g, s, k);
    g = step.above / step.below + decay * w;
  }
};

// Li et al.: "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed", when
// the second moment no longer changes. The gradient that has made s[0] of what it was, which is in the place of g, for
// ranks do not sum gradients; by how much a second moment that takes such gradients in, s[1], has left the frozen one,
// s[0]; and the direction. What never had a gradient stays out of it, as in FrozenAdam.
struct MomentumGradient {
  template <class V>
  DS_HOST_DEVICE static void apply(V&, V& g, V* s, V, const Constants<V>& k) {
    g = sign(s[1]) * (s[0] - k.beta1 * g) / k.rest1;
  }
};
struct VarianceRatio {
  template <class V>
  DS_HOST_DEVICE static void apply(V&, V& g, V* s, V, const Constants<V>& k) {
    using std::sqrt;
    s[1] = k.beta2 * s[1] + k.rest2 * g * g;
    g = sign(s[0]) * (sqrt(s[0]) + k.eps) / (sqrt(s[1]) + k.eps);
  }
};
struct FrozenLambDirection {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V decay, const Constants<V>& k) {
    using std::sqrt;
    g = sign(s[1]) * s[0] / (sqrt(s[1]) + k.eps) + decay * w;
  }
};

// Jordan et al.: "Muon: An optimizer for hidden layers in neural networks", up to the orthogonalisation.
template <bool nesterov>
struct MuonDirection {
  template <class V>
  DS_HOST_DEVICE static void apply(V&, V& g, V* s, V, const Constants<V>& k) {
    s[0] = k.beta1 * s[0] + k.rest1 * g;
    if constexpr (nesterov) {
      g = k.rest1 * g + k.beta1 * s[0];
    } else {
      g = s[0];
    }
  }
};

// Douillard et al.: "DiLoCo: Distributed Low-Communication Training of Language Models". What a worker's steps have
// done to the parameter since all had the same one, s[0]; and the step from there by the sum of that over workers, of
// which each has the share rest1: the momentum is torch.optim.SGD's. Of the parameter that the worker has now the share
// beta2 stays (Douillard et al.: "Streaming DiLoCo with overlapping communication", 2025).
struct OuterDelta {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V, const Constants<V>&) {
    g = s[0] - w;
  }
};
template <bool nesterov>
struct OuterStep {
  template <class V>
  DS_HOST_DEVICE static void apply(V& w, V& g, V* s, V, const Constants<V>& k) {
    const V mean = k.rest1 * g;
    s[1] = k.beta1 * s[1] + mean;
    if constexpr (nesterov) {
      s[0] = s[0] - k.lr * (mean + k.beta1 * s[1]);
    } else {
      s[0] = s[0] - k.lr * s[1];
    }
    w = k.beta2 * w + k.rest2 * s[0];
  }
};

// A step along a direction, which UpdateTensor::factor multiplies.
struct Descend : Sgd {};

// A rule as back ends instantiate it: its arithmetic with its row of kUpdateRules.
template <UpdateRule kRule, class Arithmetic>
struct Rule : Arithmetic {
  static constexpr int kStates = facts_of(kRule).num_states;
  static constexpr bool kDirection = facts_of(kRule).makes_direction();
};

// Calls f(Rule<rule, its arithmetic>{}).
template <class F>
void with_rule(UpdateRule rule, F&& f) noexcept {
  switch (rule) {
    case UpdateRule::AdamW: return f(Rule<UpdateRule::AdamW, Adam<true>>{});
    case UpdateRule::AdamL2: return f(Rule<UpdateRule::AdamL2, Adam<false>>{});
    case UpdateRule::Sgd: return f(Rule<UpdateRule::Sgd, Sgd>{});
    case UpdateRule::Momentum: return f(Rule<UpdateRule::Momentum, Momentum<false>>{});
    case UpdateRule::Nesterov: return f(Rule<UpdateRule::Nesterov, Momentum<true>>{});
    case UpdateRule::Lion: return f(Rule<UpdateRule::Lion, Lion>{});
    case UpdateRule::Adagrad: return f(Rule<UpdateRule::Adagrad, Adagrad>{});
    case UpdateRule::LambDirection: return f(Rule<UpdateRule::LambDirection, LambDirection>{});
    case UpdateRule::MuonDirection: return f(Rule<UpdateRule::MuonDirection, MuonDirection<false>>{});
    case UpdateRule::NesterovMuonDirection: return f(Rule<UpdateRule::NesterovMuonDirection, MuonDirection<true>>{});
    case UpdateRule::FrozenAdam: return f(Rule<UpdateRule::FrozenAdam, FrozenAdam>{});
    case UpdateRule::ZeroOneDelta: return f(Rule<UpdateRule::ZeroOneDelta, ZeroOneDelta>{});
    case UpdateRule::ZeroOneSync: return f(Rule<UpdateRule::ZeroOneSync, ZeroOneSync>{});
    case UpdateRule::MomentumGradient: return f(Rule<UpdateRule::MomentumGradient, MomentumGradient>{});
    case UpdateRule::VarianceRatio: return f(Rule<UpdateRule::VarianceRatio, VarianceRatio>{});
    case UpdateRule::FrozenLambDirection: return f(Rule<UpdateRule::FrozenLambDirection, FrozenLambDirection>{});
    case UpdateRule::OuterDelta: return f(Rule<UpdateRule::OuterDelta, OuterDelta>{});
    case UpdateRule::OuterMomentum: return f(Rule<UpdateRule::OuterMomentum, OuterStep<false>>{});
    case UpdateRule::OuterNesterov: return f(Rule<UpdateRule::OuterNesterov, OuterStep<true>>{});
    case UpdateRule::Descend: return f(Rule<UpdateRule::Descend, Descend>{});
  }
}

}  // namespace ds::update_rules
