// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by the rows of families with experts.

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include "config/families/llama.h"
#include "config/families/moe.h"

namespace ds::family {

using X = ExpertsConfig;

inline constexpr Range kExperts = {1, 4096};

// clang-format off
inline constexpr Key kSparseKeys[] = {
    effect("num_experts_per_tok", slot_of<&H::m, &M::experts, &X::per_token>, kExperts),
    effect("output_router_logits", slot_of<&H::output_router_logits>, {}, kNull),
    effect("router_aux_loss_coef", slot_of<&H::router_aux_loss_coef>, {0, kInfinity}),
    effect("router_z_loss_coef", slot_of<&H::m, &M::experts, &X::z_loss>, {0, kInfinity}),
};
// n_routed_experts beside shared ones, after first blocks that are dense: GLM-4.5 and DeepSeek.
inline constexpr Key kRoutedKeys[] = {
    effect("n_routed_experts", slot_of<&H::m, &M::experts, &X::count>, kExperts),
    alias("num_experts", "n_routed_experts"),
    alias("num_local_experts", "n_routed_experts"),
    effect("moe_intermediate_size", slot_of<&H::m, &M::experts, &X::intermediate>, kSize),
    effect("n_shared_experts", slot_of<&H::n_shared_experts>, {0, 64}, kNull),
    effect("first_k_dense_replace", slot_of<&H::first_k_dense_replace>, {0, 1e5}),
    effect("routed_scaling_factor", slot_of<&H::m, &M::experts, &X::router, &RouterParams::scale>, kAboveZero),
};
// DeepSeek-V3's router, and its layers that predict further ahead.
inline constexpr Key kBiasedRouterKeys[] = {
    effect("norm_topk_prob", slot_of<&H::m, &M::experts, &X::router, &RouterParams::normalise>, {}, kNull),
    effect("n_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::groups>, {1, 64}),
    effect("topk_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::chosen_groups>, {1, 64}),
    effect("num_nextn_predict_layers", slot_of<&H::m, &M::later_predictors>, {0, 64}, kNull),
    alias("num_mtp_layers", "num_nextn_predict_layers"),
};
// clang-format on

constexpr bool has_key(std::span<const Key> keys, std::string_view path) {
  return std::ranges::any_of(keys, [&](const Key& k) { return k.path == path; });
}
// The tables of a family, one after the other; its own keys replace Llama's of the same name.
template <const auto&... own>
constexpr auto with_own() {
  constexpr auto is_kept = [](const Key& k) { return !(has_key(own, k.path) || ...); };
  std::array<Key, std::ranges::count_if(kLlamaKeys, is_kept) + std::size(kSparseKeys) + std::size(kGatingKeys) +
                      (std::size(own) + ...)>
      all;
  Key* end = std::ranges::copy_if(kLlamaKeys, all.data(), is_kept).out;
  end = std::ranges::copy(kSparseKeys, end).out;
  end = std::ranges::copy(kGatingKeys, end).out;
  ((end = std::ranges::copy(own, end).out), ...);
  return all;
}

inline constexpr ExpertNames kUsualNames = {"mlp", "gate_proj", "up_proj", "down_proj"};

// transformers adds the balancing loss only where output_router_logits is true. Whoever writes its coefficient into a
// configuration of ours wants it.
void set_balance_loss(HfConfig& h, ModelSource source, float published);
// Losses, and which blocks are sparse. count: the key of the number of experts. size: that of the size of one.
void resolve_experts(HfConfig& h, std::string_view count, std::string_view size, Reader& r);
// The experts that stand beside n_routed_experts, the first blocks, which are dense, and the groups of a router.
void resolve_deepseek_experts(HfConfig& h, Reader& r);

}  // namespace ds::family
