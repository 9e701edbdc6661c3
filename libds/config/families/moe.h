// SPDX-License-Identifier: Apache-2.0
#pragma once
// The section `moe` of a model: routers, capacity and noise of its experts, under the names of DeepSpeed's MoE layer.

#include "config/families/keys.h"

namespace ds::family {

inline constexpr Range kFactor = {0, 1e6, /*open_low=*/true};
inline constexpr Range kLeastCapacity = {0, 1 << 24};

// clang-format off
inline constexpr Key kGatingKeys[] = {
    effect("moe.router_dtype", slot_of<&H::m, &M::experts, &ExpertsConfig::router_dtype>),
    effect("moe.loss_over", slot_of<&H::m, &M::experts, &ExpertsConfig::balance_over>),
    effect("moe.drop_tokens", slot_of<&H::m, &M::experts, &ExpertsConfig::capacity, &ExpertCapacity::limited>),
    effect("moe.capacity_factor", slot_of<&H::m, &M::experts, &ExpertsConfig::capacity, &ExpertCapacity::factor>, kFactor),
    effect("moe.eval_capacity_factor", slot_of<&H::m, &M::experts, &ExpertsConfig::capacity, &ExpertCapacity::eval_factor>, kFactor),
    effect("moe.min_capacity", slot_of<&H::m, &M::experts, &ExpertsConfig::capacity, &ExpertCapacity::least>, kLeastCapacity),
    effect("moe.drop_policy", slot_of<&H::m, &M::experts, &ExpertsConfig::capacity, &ExpertCapacity::policy>),
    effect("moe.use_rts", slot_of<&H::moe, &MoeKeys::use_rts>),
    effect("moe.noisy_gate_policy", slot_of<&H::moe, &MoeKeys::noisy_gate_policy>, {}, kNull),
    effect("moe.top2_2nd_expert_sampling", slot_of<&H::moe, &MoeKeys::second_expert_sampling>),
};
// clang-format on

// Applies the rules of these keys for k experts of a token, when the others have been resolved. experts: the name of k.
void resolve_gating(HfConfig& h, std::string_view per_token, Reader& r);
// The reverse, for the keys that are no members: their values in a file.
void restore_gating(HfConfig& h);
// Whether a key of the section belongs into the file of this model.
bool writes_gating(const HfConfig& h, std::string_view path);

}  // namespace ds::family
