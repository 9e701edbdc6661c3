// SPDX-License-Identifier: Apache-2.0
#include "config/families/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace ds::family {
namespace {

constexpr std::string_view kDrop = "moe.drop_tokens", kPolicy = "moe.drop_policy", kRts = "moe.use_rts",
                           kNoise = "moe.noisy_gate_policy", kSecond = "moe.top2_2nd_expert_sampling",
                           kJitter = "router_jitter_noise", kLossOver = "moe.loss_over",
                           kRouterDtype = "moe.router_dtype";
constexpr std::string_view kOfCapacity[] = {"moe.capacity_factor", "moe.eval_capacity_factor", "moe.min_capacity",
                                            kPolicy, kRts};

}  // namespace

void resolve_gating(HfConfig& h, std::string_view per_token, Reader& r) {
  ExpertsConfig& x = h.m.experts;
  const i64 k = x.per_token;
  if (r.any_broken({per_token, kDrop, kPolicy, kRts, kNoise, kSecond, kJitter})) return;
  if (!x.capacity.limited) {
    for (const std::string_view key : kOfCapacity) {
      if (r.given(key)) r.warning(key, fmt::format("has no effect unless {} is true", kDrop));
    }
  }
  if (r.given(kLossOver) && x.balance_loss == 0) r.warning(kLossOver, "has no effect: no loss balances the experts");
  if (r.given(kRts) && h.moe.use_rts && k > 1)
    r.warning(kRts, fmt::format("has no effect with {} {}; {} \"random\" drops at random then", per_token, k, kPolicy));
  if (!r.given(kPolicy)) {
    const bool random = k == 1 && h.moe.use_rts;
    x.capacity.policy = random                    ? DropPolicy::Random
                        : x.plain && k < 3        ? DropPolicy::Position  // as DeepSpeed's gates of one and two
                        : k == 1 && r.given(kRts) ? DropPolicy::Position
                                                  : DropPolicy::Probs;
  } else if (r.given(kRts) && k == 1 && h.moe.use_rts != (x.capacity.policy == DropPolicy::Random)) {
    r.error(kRts, fmt::format("contradicts {}", kPolicy));
  }

  x.router_jitter = h.moe.noisy_gate_policy == NoisyGate::Jitter;
  if (x.router_jitter && x.input_jitter > 0)
    r.error(kNoise, fmt::format("{} already multiplies the router's input by noise: set one of them", kJitter));
  const bool sampled = h.moe.noisy_gate_policy == NoisyGate::RSample;
  if (sampled && k != 1) {
    r.error(kNoise, fmt::format("\"RSample\" is for {} 1, not {}; {} is for 2", per_token, k, kSecond));
  }
  if (r.given(kSecond) && h.moe.second_expert_sampling && k != 2)
    r.warning(kSecond, fmt::format("has no effect with {} {}", per_token, k));
  x.noisy_choice = k == 1 ? sampled : k == 2 && h.moe.second_expert_sampling;
  if (x.noisy_choice && (x.balancing_bias || x.router.groups > 1))
    r.error(k == 1 ? kNoise : kSecond, "a router with balancing biases or groups of experts chooses without noise");
}

void restore_gating(HfConfig& h) {
  const ExpertsConfig& x = h.m.experts;
  const bool one = x.per_token == 1;
  h.moe.use_rts = one && x.capacity.policy == DropPolicy::Random;
  h.moe.noisy_gate_policy = x.router_jitter         ? NoisyGate::Jitter
                            : one && x.noisy_choice ? NoisyGate::RSample
                                                    : NoisyGate::None;
  h.moe.second_expert_sampling = !one && x.noisy_choice;
  h.moe.num_experts.assign(1, x.count);
  if (!x.counts.empty()) {
    h.moe.num_experts.clear();
    std::ranges::copy_if(x.counts, std::back_inserter(h.moe.num_experts), [](i64 n) { return n > 0; });
  }
  h.moe.expert_interval = 1;
  for (size_t l = 0; l < x.layers.size() && !x.layers[l]; ++l) ++h.moe.expert_interval;
}

bool writes_gating(const HfConfig& h, std::string_view path) {
  const ExpertsConfig& x = h.m.experts;
  if (x.count == 0) return false;
  if (path == kRts) return false;  // the policy states it
  for (const std::string_view key : kOfCapacity)
    if (path == key) return x.capacity.limited;
  if (path == kNoise) return h.moe.noisy_gate_policy != NoisyGate::None;
  if (path == kSecond) return x.plain ? x.per_token == 2 : x.noisy_choice;
  if (path == kRouterDtype) return x.router_dtype != RouterDtype::Fp32;
  return x.plain || (path == kDrop && x.capacity.limited);
}

}  // namespace ds::family
