// SPDX-License-Identifier: Apache-2.0
// Relatives of Llama with experts: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, GLM-4.5.

#include <fmt/format.h>

#include <algorithm>

#include "config/families/experts.h"
#include "config/families/moe.h"

namespace ds {
namespace family {
namespace {

// clang-format off
constexpr Key kMixtralOwn[] = {
    effect("num_local_experts", slot_of<&H::m, &M::experts, &X::count>, kExperts),
    alias("num_experts", "num_local_experts"),
    effect("router_jitter_noise", slot_of<&H::m, &M::experts, &X::input_jitter>, kDropout, kNull),
};
constexpr Key kOlmoeOwn[] = {
    effect("num_experts", slot_of<&H::m, &M::experts, &X::count>, kExperts),
    alias("num_local_experts", "num_experts"),
    effect("norm_topk_prob", slot_of<&H::m, &M::experts, &X::router, &RouterParams::normalise>, {}, kNull),
    fixed("clip_qkv", "[null]"),
};
constexpr Key kQwenOwn[] = {
    effect("num_experts", slot_of<&H::m, &M::experts, &X::count>, kExperts),
    alias("num_local_experts", "num_experts"),
    effect("moe_intermediate_size", slot_of<&H::m, &M::experts, &X::intermediate>, kSize),
    effect("norm_topk_prob", slot_of<&H::m, &M::experts, &X::router, &RouterParams::normalise>, {}, kNull),
    effect("decoder_sparse_step", slot_of<&H::decoder_sparse_step>, {1, 1e5}),
    effect("mlp_only_layers", slot_of<&H::mlp_only_layers>, {}, kNull),
    effect("shared_expert_intermediate_size", slot_of<&H::m, &M::experts, &X::shared>, kSize),
    effect("qkv_bias", slot_of<&H::m, &M::attention_bias>, {}, kNull),
};
constexpr Key kGlmOwn[] = {
    effect("use_qk_norm", slot_of<&H::m, &M::qk_norm>, {}, kNull),
    effect("partial_rotary_factor", slot_of<&H::m, &M::rotary_share>, {0, 1, /*open_low=*/true}),
    alias("rope_scaling.partial_rotary_factor", "partial_rotary_factor"),
};
// clang-format on

constexpr auto kMixtralKeys = with_own<kMixtralOwn>();
constexpr auto kOlmoeKeys = with_own<kOlmoeOwn>();
constexpr auto kQwenMoeKeys = with_own<kQwenOwn>();
constexpr auto kGlmKeys = with_own<kRoutedKeys, kBiasedRouterKeys, kGlmOwn>();

constexpr std::string_view kMixtralUnread[] = {"mlp_bias",           "pretraining_tp",    "attention_bias",
                                               "use_sliding_window", "max_window_layers", "layer_types"};
constexpr std::string_view kOlmoeUnread[] = {"mlp_bias",       "pretraining_tp",    "use_sliding_window",
                                             "sliding_window", "max_window_layers", "layer_types"};
constexpr std::string_view kQwen2MoeUnread[] = {"mlp_bias", "pretraining_tp", "attention_bias"};
constexpr std::string_view kQwen3MoeUnread[] = {
    "mlp_bias", "pretraining_tp", "max_window_layers", "layer_types", "shared_expert_intermediate_size", "qkv_bias"};
constexpr std::string_view kGlmUnread[] = {"mlp_bias",       "pretraining_tp",    "use_sliding_window",
                                           "sliding_window", "max_window_layers", "layer_types"};
constexpr KeyValue kMixtralNeutral[] = {
    {"norm_topk_prob", "true"}, {"decoder_sparse_step", "1"}, {"mlp_only_layers", "[]"}};
constexpr KeyValue kOlmoeNeutral[] = {
    {"decoder_sparse_step", "1"}, {"mlp_only_layers", "[]"}, {"router_jitter_noise", "0"}};
constexpr KeyValue kQwen2MoeNeutral[] = {{"attention_bias", "true"}, {"router_jitter_noise", "0"}};
constexpr KeyValue kQwen3MoeNeutral[] = {{"shared_expert_intermediate_size", "0"}, {"router_jitter_noise", "0"}};
constexpr KeyValue kGlmNeutral[] = {{"decoder_sparse_step", "1"},
                                    {"mlp_only_layers", "[]"},
                                    {"shared_expert_intermediate_size", "0"},
                                    {"router_jitter_noise", "0"}};

// llama.cpp knows by the architecture whether the weights of the chosen experts add up to 1.
constexpr KeyValue kPlainWeights[] = {{"norm_topk_prob", "false"}};
constexpr KeyValue kNormalisedWeights[] = {{"norm_topk_prob", "true"}};

constexpr std::string_view kMixtralRequired[] = {"vocab_size",          "hidden_size",       "num_hidden_layers",
                                                 "num_attention_heads", "intermediate_size", "num_local_experts",
                                                 "num_experts_per_tok"};
constexpr std::string_view kOlmoeRequired[] = {"vocab_size",          "hidden_size",       "num_hidden_layers",
                                               "num_attention_heads", "intermediate_size", "num_experts",
                                               "num_experts_per_tok"};
constexpr std::string_view kQwen3MoeRequired[] = {"vocab_size",          "hidden_size",          "num_hidden_layers",
                                                  "num_attention_heads", "intermediate_size",    "num_experts",
                                                  "num_experts_per_tok", "moe_intermediate_size"};
constexpr std::string_view kQwen2MoeRequired[] = {
    "vocab_size",          "hidden_size",           "num_hidden_layers",
    "num_attention_heads", "intermediate_size",     "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"};
constexpr std::string_view kGlmRequired[] = {"vocab_size",          "hidden_size",          "num_hidden_layers",
                                             "num_attention_heads", "intermediate_size",    "n_routed_experts",
                                             "num_experts_per_tok", "moe_intermediate_size"};

}  // namespace

void set_balance_loss(HfConfig& h, ModelSource source, float published) {
  h.output_router_logits = source == ModelSource::Inline;
  h.router_aux_loss_coef = source == ModelSource::File ? published : 0;
}

namespace {

void set_mixtral_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  ModelConfig& m = h.m;
  m.intermediate = 14336;
  m.max_positions = 131072;
  m.norm_eps = 1e-5f;
  m.rope_theta = 1e6f;
  m.experts.count = 8;
  m.experts.per_token = 2;
  m.experts.router.normalise = true;
  set_balance_loss(h, source, 0.001f);
}

void set_olmoe_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 50304;
  m.hidden = m.intermediate = 2048;
  m.layers = m.heads = 16;
  m.max_positions = 4096;
  m.norm_eps = 1e-5f;
  m.whole_qk_norm = true;
  m.experts.count = 64;
  m.experts.per_token = 8;
  set_balance_loss(h, source, 0.01f);
}

void set_qwen_moe_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 151936;
  m.hidden = 2048;
  m.layers = 24;
  m.max_positions = 32768;
  h.sliding_window = 4096;
  set_balance_loss(h, source, 0.001f);
}

void set_qwen2_moe_defaults(HfConfig& h, ModelSource source) {
  set_qwen_moe_defaults(h, source);
  ModelConfig& m = h.m;
  m.intermediate = 5632;
  m.heads = 16;
  m.attention_bias = true;
  m.experts.count = 60;
  m.experts.per_token = 4;
  m.experts.intermediate = 1408;
  m.experts.shared = 5632;
  m.experts.shared_gate = true;
  h.max_window_layers = 28;
}

void set_qwen3_moe_defaults(HfConfig& h, ModelSource source) {
  set_qwen_moe_defaults(h, source);
  ModelConfig& m = h.m;
  m.intermediate = 6144;
  m.heads = 32;
  m.qk_norm = true;
  m.experts.count = 128;
  m.experts.per_token = 8;
  m.experts.intermediate = 768;
}

void set_glm_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 151552;
  m.intermediate = 10944;
  m.layers = 46;
  m.heads = 96;
  m.max_positions = 131072;
  m.norm_eps = 1e-5f;
  m.rotary_share = 0.5f;
  m.experts.count = 128;
  m.experts.per_token = 8;
  m.experts.intermediate = 1408;
  m.experts.router = {.sigmoid = true, .normalise = true, .group_by_two = true};
  m.experts.balancing_bias = true;
  m.later_predictors = source == ModelSource::File ? 1 : 0;
  h.n_shared_experts = h.first_k_dense_replace = 1;
  set_balance_loss(h, source, 0);
}

// transformers: this number where the key is missing, as many as heads where it is null.
void default_kv_heads(HfConfig& h, const Json& object, ModelSource source, i64 number) {
  if (source == ModelSource::File && !object.contains("num_key_value_heads")) h.m.kv_heads = number;
}

}  // namespace

void resolve_experts(HfConfig& h, std::string_view count, std::string_view size, Reader& r) {
  ModelConfig& m = h.m;
  ExpertsConfig& x = m.experts;
  if (h.output_router_logits) x.balance_loss = h.router_aux_loss_coef;
  if (!h.output_router_logits) x.unused_balance_loss = h.router_aux_loss_coef;
  if (!r.any_broken({count, "num_experts_per_tok"}) && x.per_token > x.count)
    r.error("num_experts_per_tok", fmt::format("a token cannot choose {} of {} experts", x.per_token, x.count));
  resolve_gating(h, "num_experts_per_tok", r);
  constexpr i64 kWidest = 1 << 24;
  if (!r.any_broken({count, size}) && x.count * x.intermediate > kWidest)
    r.error(count, fmt::format("{} experts with {} {} are {} wide together (at most {})", x.count, size, x.intermediate,
                               x.count * x.intermediate, kWidest));
  if (r.any_broken({"num_hidden_layers", "decoder_sparse_step", "mlp_only_layers"})) return;
  x.layers.resize(static_cast<size_t>(m.layers));
  for (i64 l = 0; l < m.layers; ++l) x.layers[static_cast<size_t>(l)] = (l + 1) % h.decoder_sparse_step == 0;
  for (const i64 l : h.mlp_only_layers) {
    if (l < 0 || l >= m.layers)
      return r.error("mlp_only_layers", fmt::format("there is no layer {}; they are 0 to {}", l, m.layers - 1));
    x.layers[static_cast<size_t>(l)] = false;
  }
}

void resolve_deepseek_experts(HfConfig& h, Reader& r) {
  resolve_experts(h, "n_routed_experts", "moe_intermediate_size", r);
  ExpertsConfig& x = h.m.experts;
  x.shared = h.n_shared_experts * x.intermediate;
  for (i64 l = 0; l < std::min(h.first_k_dense_replace, std::ssize(x.layers)); ++l)
    x.layers[static_cast<size_t>(l)] = false;
  const RouterParams& router = x.router;
  if (r.any_broken({"n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"})) return;
  const i64 least = router.group_by_two ? 2 : 1;
  if (x.count % router.groups != 0 || x.count < least * router.groups)
    return r.error("n_group", fmt::format("{} experts cannot be {} groups of {}", x.count, router.groups,
                                          least > 1 ? "two experts or more, as many in each" : "as many each"));
  if (router.chosen_groups > router.groups)
    return r.error("topk_group", fmt::format("{} of {} groups cannot be chosen", router.chosen_groups, router.groups));
  if (const i64 there = x.count / router.groups * router.chosen_groups; x.per_token > there)
    r.error("topk_group", fmt::format("the {} groups that are chosen have {} experts, and a token chooses {}",
                                      router.chosen_groups, there, x.per_token));
}

namespace {

void resolve_glm(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  default_kv_heads(h, object, source, 8);
  ModelConfig& m = h.m;
  if (m.head_dim == 0 && !r.any_broken({"hidden_size", "num_attention_heads"})) m.head_dim = m.hidden / m.heads;
  resolve_deepseek_experts(h, r);
}

// The families in which every block is sparse, and intermediate_size is that of an expert.
void resolve_experts_alone(HfConfig& h, std::string_view count, Reader& r) {
  h.m.experts.intermediate = h.m.intermediate;
  resolve_experts(h, count, "intermediate_size", r);
}

void resolve_mixtral(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  default_kv_heads(h, object, source, 8);
  h.use_sliding_window = r.given("sliding_window");
  resolve_experts_alone(h, "num_local_experts", r);
}

void resolve_olmoe(HfConfig& h, const Json&, ModelSource, Reader& r) {
  ModelConfig& m = h.m;
  m.output_bias = m.attention_bias;
  if (r.given("head_dim") && !r.any_broken({"hidden_size", "num_attention_heads"}) && m.heads * m.head_dim != m.hidden)
    r.error("head_dim", fmt::format("{} heads of {} are not the hidden_size of {}, over which queries are normalised",
                                    m.heads, m.head_dim, m.hidden));
  resolve_experts_alone(h, "num_experts", r);
}

void resolve_qwen2_moe(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  default_kv_heads(h, object, source, 16);
  resolve_experts(h, "num_experts", "moe_intermediate_size", r);
  if (!h.layer_types.empty() || !h.use_sliding_window || r.any_broken({"num_hidden_layers", "max_window_layers"}))
    return;
  // Other than in Qwen2, every second one of the layers before max_window_layers.
  for (i64 l = 0; l < h.m.layers; ++l)
    h.layer_types.emplace_back(l % 2 == 0 && l < h.max_window_layers ? "sliding_attention" : "full_attention");
}

void resolve_qwen3_moe(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  default_kv_heads(h, object, source, 4);
  h.m.output_bias = h.m.attention_bias;
  resolve_experts(h, "num_experts", "moe_intermediate_size", r);
}

}  // namespace
}  // namespace family

extern constinit const FamilySpec kMixtralFamily = family::relative({
    .family = Family::Mixtral,
    .name = "mixtral",
    .architecture = "MixtralForCausalLM",
    .keys = family::kMixtralKeys,
    .unread = family::kMixtralUnread,
    .required = family::kMixtralRequired,
    .neutral = family::kMixtralNeutral,
    .set_defaults = family::set_mixtral_defaults,
    .resolve = family::resolve_mixtral,
    .experts = {"block_sparse_moe", "w1", "w3", "w2"},
    .mixture = {.of = Family::Llama},
    .gguf = {.architecture = "llama", .neighbours_turn = true},
});
extern constinit const FamilySpec kOlmoeFamily = family::relative({
    .family = Family::Olmoe,
    .name = "olmoe",
    .architecture = "OlmoeForCausalLM",
    .keys = family::kOlmoeKeys,
    .unread = family::kOlmoeUnread,
    .required = family::kOlmoeRequired,
    .neutral = family::kOlmoeNeutral,
    .set_defaults = family::set_olmoe_defaults,
    .resolve = family::resolve_olmoe,
    .experts = family::kUsualNames,
    .gguf = {.architecture = "olmoe", .implied = family::kPlainWeights},
});
extern constinit const FamilySpec kQwen2MoeFamily = family::relative({
    .family = Family::Qwen2Moe,
    .name = "qwen2_moe",
    .architecture = "Qwen2MoeForCausalLM",
    .keys = family::kQwenMoeKeys,
    .unread = family::kQwen2MoeUnread,
    .required = family::kQwen2MoeRequired,
    .neutral = family::kQwen2MoeNeutral,
    .set_defaults = family::set_qwen2_moe_defaults,
    .resolve = family::resolve_qwen2_moe,
    .experts = family::kUsualNames,
    .mixture = {.of = Family::Qwen2, .shared = true},
    .gguf = {.architecture = "qwen2moe", .implied = family::kPlainWeights},
});
extern constinit const FamilySpec kQwen3MoeFamily = family::relative({
    .family = Family::Qwen3Moe,
    .name = "qwen3_moe",
    .architecture = "Qwen3MoeForCausalLM",
    .keys = family::kQwenMoeKeys,
    .unread = family::kQwen3MoeUnread,
    .required = family::kQwen3MoeRequired,
    .neutral = family::kQwen3MoeNeutral,
    .set_defaults = family::set_qwen3_moe_defaults,
    .resolve = family::resolve_qwen3_moe,
    .experts = family::kUsualNames,
    .mixture = {.of = Family::Qwen3},
    .gguf = {.architecture = "qwen3moe", .implied = family::kNormalisedWeights},
});

extern constinit const FamilySpec kGlm4MoeFamily = family::relative({
    .family = Family::Glm4Moe,
    .name = "glm4_moe",
    .architecture = "Glm4MoeForCausalLM",
    .keys = family::kGlmKeys,
    .unread = family::kGlmUnread,
    .required = family::kGlmRequired,
    .neutral = family::kGlmNeutral,
    .set_defaults = family::set_glm_defaults,
    .resolve = family::resolve_glm,
    .experts = {.block = "mlp", .gate = "gate_proj", .up = "up_proj", .down = "down_proj", .shared = "shared_experts"},
});

}  // namespace ds
