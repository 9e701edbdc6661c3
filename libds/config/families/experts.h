// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by the rows of families with experts.

#include <algorithm>
#include <array>
#include <span>

#include "config/families/llama.h"

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
// clang-format on

// The tables of a family, one after the other.
template <const auto&... tables>
constexpr auto with_own() {
  std::array<Key, std::size(kLlamaKeys) + std::size(kSparseKeys) + (std::size(tables) + ...)> all;
  Key* end = std::ranges::copy(kLlamaKeys, all.data()).out;
  end = std::ranges::copy(kSparseKeys, end).out;
  ((end = std::ranges::copy(tables, end).out), ...);
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
