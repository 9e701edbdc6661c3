// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "config/families/moe.h"

namespace ds {
namespace family {
namespace {

Slot counts_slot(void* root) { return CountsSlot{&static_cast<HfConfig*>(root)->moe.num_experts}; }

// clang-format off
constexpr Key kGpt2Own[] = {
    effect("vocab_size", slot_of<&H::m, &M::vocab_size>, kSize),
    effect("n_embd", slot_of<&H::m, &M::hidden>, kSize),
    effect("n_layer", slot_of<&H::m, &M::layers>, {1, 1e5}),
    effect("n_head", slot_of<&H::m, &M::heads>, kSize),
    effect("n_positions", slot_of<&H::m, &M::max_positions>, kSize),
    effect("n_inner", slot_of<&H::m, &M::intermediate>, kSize, kNull),
    effect("activation_function", activation_slot<kPlainActivations>),
    effect("layer_norm_epsilon", slot_of<&H::m, &M::norm_eps>, kAboveZero),
    effect("initializer_range", slot_of<&H::m, &M::initializer_range>),
    effect("embd_pdrop", slot_of<&H::m, &M::embd_dropout>, kDropout, kNull),
    effect("resid_pdrop", slot_of<&H::m, &M::resid_dropout>, kDropout, kNull),
    effect("attn_pdrop", slot_of<&H::m, &M::attn_dropout>, kDropout, kNull),
    effect("scale_attn_weights", slot_of<&H::m, &M::scale_attn_weights>, {}, kNull),
    effect("scale_attn_by_inverse_layer_idx", slot_of<&H::m, &M::scale_attn_by_inverse_layer_idx>, {}, kNull),
    effect("tie_word_embeddings", slot_of<&H::m, &M::tie_embeddings>, {}, kNull),
    fixed("reorder_and_upcast_attn", "[false]"),
    fixed("add_cross_attention", "[false]"),
    alias("hidden_size", "n_embd"), alias("num_hidden_layers", "n_layer"), alias("num_attention_heads", "n_head"),
    alias("max_position_embeddings", "n_positions"),
    silent("n_ctx"), silent("n_special"), silent("predict_special_tokens"), silent("summary_type"), silent("summary_use_proj"), silent("summary_activation"),
    silent("summary_proj_to_labels"), silent("summary_first_dropout"),
    // DeepSpeed's MoE layer in place of MLPs.
    effect("moe.num_experts", counts_slot, {1, 4096}),
    effect("moe.k", slot_of<&H::m, &M::experts, &ExpertsConfig::per_token>, {1, 4096}),
    effect("moe.expert_interval", slot_of<&H::moe, &MoeKeys::expert_interval>, {1, 1e5}),
    effect("moe.loss_coeff", slot_of<&H::m, &M::experts, &ExpertsConfig::balance_loss>, {0, kInfinity}),
    effect("moe.z_loss_coeff", slot_of<&H::m, &M::experts, &ExpertsConfig::z_loss>, {0, kInfinity}),
    effect("moe.use_residual", slot_of<&H::m, &M::experts, &ExpertsConfig::residual>),
    fixed("moe.ep_size", "[1]", "expert_parallel.autoep_size of the run divides experts over ranks"),
    fixed("moe.enable_expert_tensor_parallelism", "[false]", "ranks of tensor_parallel always share the experts, whole ones each"),
    fixed("moe.use_tutel", "[false]"),
};
// clang-format on
constexpr auto kGpt2Keys = [] {
  std::array<Key, std::size(kGpt2Own) + std::size(kGatingKeys)> all;
  std::ranges::copy(kGatingKeys, std::ranges::copy(kGpt2Own, all.data()).out);
  return all;
}();

constexpr std::string_view kGpt2Required[] = {"vocab_size", "n_embd", "n_layer", "n_head"};
constexpr KeyValue kGpt2Neutral[] = {{"position_embedding_type", R"("absolute")"}};
constexpr std::string_view kGpt2Buffers[] = {".attn.bias", ".attn.masked_bias"};
constexpr GgufName kGpt2GgufNames[] = {
    {"token_embd", "transformer.wte"},
    {"position_embd", "transformer.wpe"},
    {"output_norm", "transformer.ln_f"},
    {"output", "lm_head"},
    {"blk.{}.attn_norm", "transformer.h.{}.ln_1"},
    {"blk.{}.attn_qkv", "transformer.h.{}.attn.c_attn"},
    {"blk.{}.attn_output", "transformer.h.{}.attn.c_proj"},
    {"blk.{}.ffn_norm", "transformer.h.{}.ln_2"},
    {"blk.{}.ffn_up", "transformer.h.{}.mlp.c_fc"},
    {"blk.{}.ffn_down", "transformer.h.{}.mlp.c_proj"},
};
constexpr std::string_view kGpt2Lengths[] = {"n_positions", "max_position_embeddings"};

void set_gpt2_defaults(HfConfig& h, ModelSource source) {
  ModelConfig& m = h.m;
  m.vocab_size = 50257;
  m.hidden = 768;
  m.layers = m.heads = 12;
  m.max_positions = 1024;
  m.embd_dropout = m.resid_dropout = m.attn_dropout = source == ModelSource::File ? 0.1f : 0.0f;
  m.experts.per_token = 1;
  m.experts.plain = true;
  m.experts.balance_loss = 0.1f;
  m.experts.capacity.limited = true;
  h.moe.second_expert_sampling = h.moe.use_rts = true;
}

// One number of experts for each layer that has any.
void set_pyramid(HfConfig& h, Reader& r) {
  ExpertsConfig& x = h.m.experts;
  auto next = h.moe.num_experts.begin();
  for (const bool sparse : x.layers) x.counts.push_back(sparse ? *next++ : 0);
  if (x.balance_over == BalanceOver::Layers)
    r.error("moe.loss_over",
            "\"layers\" adds the tokens of experts by their numbers, which all layers must have: take "
            "\"micro_batch\", \"sequence\" or \"global_batch\" with a list of different moe.num_experts",
            Errc::Unavailable);
}

// Defaults are DeepSpeed's: those of its MoE layer, and Megatron-DeepSpeed's for the interval and the loss.
void resolve_moe(HfConfig& h, const Json& object, Reader& r) {
  ModelConfig& m = h.m;
  ExpertsConfig& x = m.experts;
  if (!object.contains("moe") || !object["moe"].is_object()) {
    x = {};
    return;
  }
  constexpr std::string_view kCount = "moe.num_experts", kPerToken = "moe.k", kInterval = "moe.expert_interval";
  if (!r.given(kCount) && !r.broken(kCount)) return r.error(kCount, "is missing");
  if (r.any_broken({kCount, kPerToken, kInterval, "n_layer"})) return;
  const std::vector<i64>& counts = h.moe.num_experts;
  const i64 fewest = std::ranges::min(counts);
  x.count = std::ranges::max(counts);
  if (x.per_token > fewest)
    return r.error(kPerToken, fmt::format("a token cannot choose {} of {} experts", x.per_token, fewest));
  if (h.moe.expert_interval > m.layers) {
    return r.error(kInterval, fmt::format("no layer has experts: the first would be layer {} of {}",
                                          h.moe.expert_interval, m.layers));
  }
  constexpr i64 kWidest = 1 << 24;
  if (x.count * m.intermediate > kWidest) {
    return r.error(kCount, fmt::format("{} experts of size {} are {} wide together (at most {})", x.count,
                                       m.intermediate, x.count * m.intermediate, kWidest));
  }
  x.intermediate = m.intermediate;
  if (x.residual) x.shared = m.intermediate;
  x.router.normalise = x.per_token > 1;
  x.first_choice_loss = x.per_token == 2;
  for (i64 l = 0; l < m.layers; ++l) x.layers.push_back((l + 1) % h.moe.expert_interval == 0);
  if (const i64 sparse = m.layers / h.moe.expert_interval; counts.size() > 1 && std::ssize(counts) != sparse) {
    return r.error(kCount, fmt::format("has {} numbers for {} layers with experts: give one, or one for each",
                                       counts.size(), sparse));
  }
  if (fewest != x.count) set_pyramid(h, r);
  resolve_gating(h, kPerToken, r);
}

void resolve_gpt2(HfConfig& h, const Json& object, ModelSource, Reader& r) {
  // Python takes null for false, which is not the default of these.
  if (is_null(object, "tie_word_embeddings")) h.m.tie_embeddings = false;
  if (is_null(object, "scale_attn_weights")) h.m.scale_attn_weights = false;
  if (h.m.intermediate == 0) h.m.intermediate = 4 * h.m.hidden;
  resolve_moe(h, object, r);
}

}  // namespace
}  // namespace family

extern constinit const FamilySpec kGpt2Family = {
    .family = Family::Gpt2,
    .name = "gpt2",
    .architecture = "GPT2LMHeadModel",
    .block = "Gpt2Block",
    .keys = family::kGpt2Keys,
    .hidden = "n_embd",
    .layers = "n_layer",
    .heads = "n_head",
    .required = family::kGpt2Required,
    .neutral = family::kGpt2Neutral,
    .set_defaults = family::set_gpt2_defaults,
    .resolve = family::resolve_gpt2,
    .prefix = "transformer.",
    .buffers = family::kGpt2Buffers,
    .positions = {"transformer.wpe.weight", family::kGpt2Lengths, ".attn.bias"},
    .experts = {.block = "mlp.deepspeed_moe",
                .experts = "experts.deepspeed_experts",
                .router = "gate.wg.weight",
                .shared = "mlp"},
    .gguf = {.architecture = "gpt2", .transposed = true, .names = family::kGpt2GgufNames},
};

}  // namespace ds
