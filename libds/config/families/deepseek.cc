// SPDX-License-Identifier: Apache-2.0
// Models with multi-head latent attention: DeepSeek-V2, DeepSeek-V3.

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
    fixed("moe_layer_freq", "[1]"),
    silent("qk_head_dim"),  // the sum of two, which transformers writes
    // How the published models were trained.
    silent("aux_loss_alpha"),
    silent("seq_aux"),
    silent("ep_size"),
};
constexpr Key kDeepseekV2Own[] = {
    effect("n_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::groups>, {1, 64}, kNull),
    effect("topk_group", slot_of<&H::m, &M::experts, &X::router, &RouterParams::chosen_groups>, {1, 64}, kNull),
    effect("topk_method", slot_of<&H::topk_method>),
    fixed("norm_topk_prob", "[false, null]"),
    fixed("scoring_func", R"(["softmax"])"),
};
constexpr Key kDeepseekV3Own[] = {
    effect("rope_interleave", slot_of<&H::m, &M::latent, &L::interleaved>, {}, kNull),
    fixed("topk_method", R"(["noaux_tc"])"),
    fixed("scoring_func", R"(["sigmoid"])"),
};
// clang-format on

constexpr auto kDeepseekV2Keys = with_own<kLatentKeys, kRoutedKeys, kDeepseekV2Own>();
constexpr auto kDeepseekV3Keys = with_own<kLatentKeys, kRoutedKeys, kBiasedRouterKeys, kDeepseekV3Own>();
constexpr std::string_view kDeepseekV2Unread[] = {"use_sliding_window", "sliding_window", "max_window_layers",
                                                  "layer_types"};
constexpr std::string_view kDeepseekV3Unread[] = {"use_sliding_window", "sliding_window", "max_window_layers",
                                                  "layer_types", "mlp_bias"};
constexpr KeyValue kDeepseekNeutral[] = {{"decoder_sparse_step", "1"},
                                         {"mlp_only_layers", "[]"},
                                         {"router_jitter_noise", "0"},
                                         {"shared_expert_intermediate_size", "0"},
                                         {"rope_interleave", "true"}};
// transformers does not read these, and other programs know the router by them.
constexpr KeyValue kDeepseekV3Constant[] = {{"topk_method", R"("noaux_tc")"}, {"scoring_func", R"("sigmoid")"}};
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

void set_deepseek_v3_defaults(HfConfig& h, ModelSource source) {
  set_latent_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 129280;
  m.hidden = 7168;
  m.intermediate = 18432;
  m.layers = 61;
  m.heads = 128;
  m.max_positions = 4096;
  m.experts.count = 256;
  m.experts.per_token = 8;
  m.experts.intermediate = 2048;
  m.experts.router = {.sigmoid = true, .normalise = true, .scale = 2.5f, .group_by_two = true};
  m.experts.balancing_bias = true;
  h.n_shared_experts = 1;
  if (source == ModelSource::Inline) return;
  m.experts.router.groups = 8;
  m.experts.router.chosen_groups = 4;
  m.later_predictors = 1;
  h.first_k_dense_replace = 3;
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
    r.error("topk_method", "\"noaux_tc\" is the method of models of type \"deepseek_v3\"; this type has none of it",
            Errc::Unavailable);
  } else if (h.topk_method != "group_limited_greedy") {
    r.error("topk_method", fmt::format("must be \"greedy\" or \"group_limited_greedy\", not \"{}\"", h.topk_method));
  } else if (router.groups <= 1 && (!object.contains("n_group") || is_null(object, "n_group"))) {
    r.error("topk_method", "\"group_limited_greedy\" needs n_group and topk_group");
  }
  resolve_deepseek_experts(h, r);
}

void resolve_deepseek_v3(HfConfig& h, const Json& object, ModelSource, Reader& r) {
  resolve_latent(h, object, r);
  if (is_null(object, "rope_interleave")) h.m.latent.interleaved = false;
  resolve_deepseek_experts(h, r);
}

constexpr ExpertNames kDeepseekNames = {
    .block = "mlp", .gate = "gate_proj", .up = "up_proj", .down = "down_proj", .shared = "shared_experts"};

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
    .experts = family::kDeepseekNames,
});
extern constinit const FamilySpec kDeepseekV3Family = family::relative({
    .family = Family::DeepseekV3,
    .name = "deepseek_v3",
    .architecture = "DeepseekV3ForCausalLM",
    .keys = family::kDeepseekV3Keys,
    .unread = family::kDeepseekV3Unread,
    .required = family::kDeepseekRequired,
    .neutral = family::kDeepseekNeutral,
    .constant = family::kDeepseekV3Constant,
    .set_defaults = family::set_deepseek_v3_defaults,
    .resolve = family::resolve_deepseek_v3,
    .experts = family::kDeepseekNames,
});
}  // namespace ds
