// SPDX-License-Identifier: Apache-2.0
// Models with multi-head latent attention: DeepSeek-V2.

#include <fmt/format.h>

#include "config/families/experts.h"

namespace ds {
namespace family {
namespace {

using L = LatentConfig;

// clang-format off
constexpr Key kLatentKeys[] = {
    effect("q_lora_rank", slot_of<&H::m, &M::latent, &L::query_rank>, kSize, kNull),
    effect("kv_lora_rank", slot_of<&H::m, &M::latent, &L::rank>, kSize),
    effect("qk_nope_head_dim", slot_of<&H::qk_nope_head_dim>, kSize),
    effect("qk_rope_head_dim", slot_of<&H::m, &M::latent, &L::rope_dim>, kSize),
    effect("v_head_dim", slot_of<&H::m, &M::latent, &L::value_dim>, kSize),
    effect("n_routed_experts", slot_of<&H::m, &M::experts, &X::count>, kExperts),
    alias("num_experts", "n_routed_experts"),
    alias("num_local_experts", "n_routed_experts"),
    effect("moe_intermediate_size", slot_of<&H::m, &M::experts, &X::intermediate>, kSize),
    effect("n_shared_experts", slot_of<&H::n_shared_experts>, {0, 64}, kNull),
    effect("first_k_dense_replace", slot_of<&H::first_k_dense_replace>, {0, 1e5}),
    effect("routed_scaling_factor", slot_of<&H::m, &M::experts, &X::router, &RouterParams::scale>, kAboveZero),
    effect("n_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::groups>, {1, 64}, kNull),
    effect("topk_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::chosen_groups>, {1, 64}, kNull),
    fixed("moe_layer_freq", "[1]"),
    silent("qk_head_dim"),  // the sum of two, which transformers writes
};
constexpr Key kDeepseekV2Own[] = {
    effect("topk_method", slot_of<&H::topk_method>),
    fixed("norm_topk_prob", "[false, null]"),
    fixed("scoring_func", R"(["softmax"])"),
};
// clang-format on

constexpr auto kDeepseekV2Keys = with_own<kLatentKeys, kDeepseekV2Own>();
constexpr std::string_view kDeepseekV2Unread[] = {"use_sliding_window", "sliding_window", "max_window_layers",
                                                  "layer_types"};
constexpr KeyValue kDeepseekNeutral[] = {{"decoder_sparse_step", "1"},
                                         {"mlp_only_layers", "[]"},
                                         {"router_jitter_noise", "0"},
                                         {"shared_expert_intermediate_size", "0"}};
constexpr std::string_view kDeepseekRequired[] = {
    "vocab_size",        "hidden_size",      "num_hidden_layers",   "num_attention_heads",
    "intermediate_size", "kv_lora_rank",     "v_head_dim",          "qk_nope_head_dim",
    "qk_rope_head_dim",  "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"};

void set_latent_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  h.m.latent = {.rank = 512, .query_rank = source == ModelSource::File ? 1536 : 0, .rope_dim = 64, .value_dim = 128};
  h.qk_nope_head_dim = 128;
  set_balance_loss(h, source, 0);
}

void set_deepseek_v2_defaults(HfConfig& h, ModelSource source) {
  set_latent_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 102400;
  m.experts.count = 64;
  m.experts.intermediate = 1407;
  h.n_shared_experts = 2;
  h.topk_method = "greedy";
}

// A head of queries and keys has a part that is turned, whose size transformers writes as head_dim, and one that is
// not.
void resolve_latent(HfConfig& h, const Json& object, Reader& r) {
  ModelConfig& m = h.m;
  if (is_null(object, "q_lora_rank")) m.latent.query_rank = 0;
  if (is_null(object, "n_shared_experts")) h.n_shared_experts = 0;
  m.output_bias = m.attention_bias;
  if (r.any_broken({"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"})) return;
  const i64 given = m.head_dim, turned = m.latent.rope_dim;
  m.head_dim = h.qk_nope_head_dim + turned;
  if (given != 0 && given != turned && given != m.head_dim)
    r.error("head_dim",
            fmt::format("is {}, and a head has {} dimensions that are turned (qk_rope_head_dim) and {} others", given,
                        turned, h.qk_nope_head_dim));
  if (const auto sum = object.find("qk_head_dim"); sum != object.end() && !sum->is_null() && *sum != m.head_dim)
    r.error("qk_head_dim",
            fmt::format("is {}, and qk_nope_head_dim {} and qk_rope_head_dim {} are {} together: leave it out",
                        sum->dump(), h.qk_nope_head_dim, turned, m.head_dim));
  if (turned % 2 != 0) r.error("qk_rope_head_dim", fmt::format("turns {} dimensions, which must be even", turned));
  if (m.latent.value_dim > 256)
    r.not_yet("v_head_dim", fmt::format("a value of {} dimensions (at most 256)", m.latent.value_dim));
  if (!r.any_broken({"num_attention_heads", "num_key_value_heads"}) && m.kv_heads != 0 && m.kv_heads != m.heads)
    r.error("num_key_value_heads",
            fmt::format("is {}, and each of the {} heads has keys and values of its own", m.kv_heads, m.heads));
}

void resolve_deepseek_v2(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  resolve_latent(h, object, r);
  RouterParams& router = h.m.experts.router;
  if (!r.given("num_experts_per_tok") && source == ModelSource::File)
    r.error("num_experts_per_tok", "is missing; models of this type have no default");
  if (h.topk_method == "greedy") {
    router.groups = router.chosen_groups = 1;
  } else if (h.topk_method == "noaux_tc") {
    r.error("topk_method", "\"noaux_tc\", DeepSeek-V3's, is not supported in this type", Errc::Unavailable);
  } else if (h.topk_method != "group_limited_greedy") {
    r.error("topk_method", fmt::format("must be \"greedy\" or \"group_limited_greedy\", not \"{}\"", h.topk_method));
  } else if (router.groups <= 1 && (!object.contains("n_group") || is_null(object, "n_group"))) {
    r.error("topk_method", "\"group_limited_greedy\" needs n_group and topk_group");
  }
  resolve_deepseek_experts(h, r);
}

}  // namespace
}  // namespace family

extern constinit const FamilySpec kDeepseekV2Family = family::relative({
    .family = Family::DeepseekV2,
    .name = "deepseek_v2",
    .architecture = "DeepseekV2ForCausalLM",
    .keys = family::kDeepseekV2Keys,
    .unread = family::kDeepseekV2Unread,
    .required = family::kDeepseekRequired,
    .neutral = family::kDeepseekNeutral,
    .set_defaults = family::set_deepseek_v2_defaults,
    .resolve = family::resolve_deepseek_v2,
    .experts = {.block = "mlp", .gate = "gate_proj", .up = "up_proj", .down = "down_proj", .shared = "shared_experts"},
});
}  // namespace ds
