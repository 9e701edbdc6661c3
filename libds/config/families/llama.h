// SPDX-License-Identifier: Apache-2.0
#pragma once
// Shared by the rows of Llama and its relatives.

#include "config/families/keys.h"

namespace ds::family {

// clang-format off
inline constexpr Key kLlamaKeys[] = {
    effect("vocab_size", slot_of<&H::m, &M::vocab_size>, kSize),
    effect("hidden_size", slot_of<&H::m, &M::hidden>, kSize),
    effect("intermediate_size", slot_of<&H::m, &M::intermediate>, kSize),
    effect("num_hidden_layers", slot_of<&H::m, &M::layers>, {1, 1e5}),
    effect("num_attention_heads", slot_of<&H::m, &M::heads>, kSize),
    effect("num_key_value_heads", slot_of<&H::m, &M::kv_heads>, kSize, kNull),
    effect("head_dim", slot_of<&H::m, &M::head_dim>, kSize, kNull),
    effect("hidden_act", activation_slot<kGatedActivations>),
    effect("max_position_embeddings", slot_of<&H::m, &M::max_positions>, kSize),
    effect("initializer_range", slot_of<&H::m, &M::initializer_range>),
    effect("rms_norm_eps", slot_of<&H::m, &M::norm_eps>, kAboveZero),
    effect("rope_theta", slot_of<&H::m, &M::rope_theta>, kAboveZero),
    effect("rope_scaling.rope_type", slot_of<&H::m, &M::rope, &R::type>, {}, kNull),
    alias("rope_scaling.type", "rope_scaling.rope_type"),
    effect("rope_scaling.factor", slot_of<&H::m, &M::rope, &R::factor>, {1, kInfinity}, kNull),
    effect("rope_scaling.low_freq_factor", slot_of<&H::m, &M::rope, &R::low_freq_factor>, kAboveZero, kNull),
    effect("rope_scaling.high_freq_factor", slot_of<&H::m, &M::rope, &R::high_freq_factor>, kAboveZero, kNull),
    effect("rope_scaling.original_max_position_embeddings", slot_of<&H::m, &M::rope, &R::original_max_positions>, kSize, kNull),
    effect("rope_scaling.attention_factor", slot_of<&H::m, &M::rope, &R::attention_factor>, kAboveZero, kNull),
    effect("rope_scaling.beta_fast", slot_of<&H::m, &M::rope, &R::beta_fast>, kAboveZero, kNull),
    effect("rope_scaling.beta_slow", slot_of<&H::m, &M::rope, &R::beta_slow>, kAboveZero, kNull),
    effect("rope_scaling.mscale", slot_of<&H::m, &M::rope, &R::mscale>, {}, kNull),
    effect("rope_scaling.mscale_all_dim", slot_of<&H::m, &M::rope, &R::mscale_all_dim>, {}, kNull),
    effect("rope_scaling.truncate", slot_of<&H::m, &M::rope, &R::truncate>, {}, kNull),
    effect("rope_scaling.short_factor", slot_of<&H::m, &M::rope, &R::short_factor>, kAboveZero, kNull),
    effect("rope_scaling.long_factor", slot_of<&H::m, &M::rope, &R::long_factor>, kAboveZero, kNull),
    alias("rope_parameters", "rope_scaling"),
    alias("original_max_position_embeddings", "rope_scaling.original_max_position_embeddings"),
    alias("rope_scaling.rope_theta", "rope_theta"),
    fixed("rope_scaling.partial_rotary_factor", "[1]"),
    effect("tie_word_embeddings", slot_of<&H::m, &M::tie_embeddings>, {}, kNull),
    effect("attention_bias", slot_of<&H::m, &M::attention_bias>, {}, kNull),
    effect("mlp_bias", slot_of<&H::m, &M::mlp_bias>, {}, kNull),
    effect("attention_dropout", slot_of<&H::m, &M::attn_dropout>, kDropout, kNull),
    effect("use_sliding_window", slot_of<&H::use_sliding_window>, {}, kNull),
    effect("sliding_window", slot_of<&H::sliding_window>, {0, 1 << 24}, kNull),
    effect("max_window_layers", slot_of<&H::max_window_layers>, {}, kNull),
    effect("layer_types", slot_of<&H::layer_types>, {}, kNull),
    fixed("pretraining_tp", "[0, 1]"),
    fixed("partial_rotary_factor", "[1]"),
    fixed("use_mrope", "[false]"),
    silent("rope_interleaved"), silent("is_llama_config"), silent("max_sequence_length"),
};
// clang-format on

inline constexpr std::string_view kLlamaRequired[] = {"vocab_size", "hidden_size", "num_hidden_layers",
                                                      "num_attention_heads", "intermediate_size"};
inline constexpr std::string_view kLlamaBuffers[] = {".rotary_emb.inv_freq"};
inline constexpr GgufName kLlamaGgufNames[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
    {"blk.{}.attn_norm", "model.layers.{}.input_layernorm"},
    {"blk.{}.attn_q", "model.layers.{}.self_attn.q_proj"},
    {"blk.{}.attn_k", "model.layers.{}.self_attn.k_proj"},
    {"blk.{}.attn_v", "model.layers.{}.self_attn.v_proj"},
    {"blk.{}.attn_output", "model.layers.{}.self_attn.o_proj"},
    {"blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm"},
    {"blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm"},
    {"blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"},
    {"blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj"},
    {"blk.{}.ffn_up", "model.layers.{}.mlp.up_proj"},
    {"blk.{}.ffn_down", "model.layers.{}.mlp.down_proj"},
};

void set_llama_defaults(HfConfig& h, ModelSource source);

// A relative of Llama, whose rows differ in the rest.
constexpr FamilySpec relative(FamilySpec spec) {
  spec.block = "LlamaBlock";
  spec.rotary = spec.rms_norm = true;
  if (spec.keys.empty()) spec.keys = kLlamaKeys;
  spec.hidden = "hidden_size";
  spec.layers = "num_hidden_layers";
  spec.heads = "num_attention_heads";
  if (spec.required.empty()) spec.required = kLlamaRequired;
  spec.prefix = "model.";
  spec.buffers = kLlamaBuffers;
  spec.gguf.names = kLlamaGgufNames;
  return spec;
}

}  // namespace ds::family
