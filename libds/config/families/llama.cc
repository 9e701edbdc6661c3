// SPDX-License-Identifier: Apache-2.0
#include "config/families/llama.h"

namespace ds {
namespace family {

void set_llama_defaults(HfConfig& h, ModelSource) {
  ModelConfig& m = h.m;
  m.vocab_size = 32000;
  m.hidden = 4096;
  m.layers = m.heads = 32;
  m.intermediate = 11008;
  m.max_positions = 2048;
  m.norm_eps = 1e-6f;
  m.activation = Activation::Silu;
  m.tie_embeddings = m.attention_bias = m.output_bias = m.mlp_bias = false;
}

namespace {

constexpr std::string_view kLlamaUnread[] = {"use_sliding_window", "sliding_window", "max_window_layers",
                                             "layer_types"};
constexpr std::string_view kQwen2Unread[] = {"mlp_bias", "pretraining_tp", "attention_bias"};
constexpr std::string_view kQwen3Unread[] = {"mlp_bias", "pretraining_tp"};
constexpr KeyValue kQwen2Neutral[] = {{"attention_bias", "true"}};

void set_qwen2_defaults(HfConfig& h, ModelSource source) {
  set_llama_defaults(h, source);
  ModelConfig& m = h.m;
  m.vocab_size = 151936;
  m.intermediate = 22016;
  m.max_positions = 32768;
  m.attention_bias = true;
  h.sliding_window = 4096;
  h.max_window_layers = 28;
}

void set_qwen3_defaults(HfConfig& h, ModelSource source) {
  set_qwen2_defaults(h, source);
  h.m.attention_bias = false;
  h.m.qk_norm = true;
  if (source == ModelSource::File) h.m.head_dim = 128;  // belongs to its published sizes
}

void resolve_llama(HfConfig& h, const Json&, ModelSource, Reader&) { h.m.output_bias = h.m.attention_bias; }

void resolve_qwen2(HfConfig& h, const Json& object, ModelSource source, Reader&) {
  // transformers: a number where the key is missing, as many as heads where it is null.
  if (source == ModelSource::File && !object.contains("num_key_value_heads")) h.m.kv_heads = 32;
}

void resolve_qwen3(HfConfig& h, const Json& object, ModelSource source, Reader& r) {
  resolve_qwen2(h, object, source, r);
  h.m.output_bias = h.m.attention_bias;
}

}  // namespace
}  // namespace family

extern constinit const FamilySpec kLlamaFamily = family::relative({
    .family = Family::Llama,
    .name = "llama",
    .architecture = "LlamaForCausalLM",
    .unread = family::kLlamaUnread,
    .set_defaults = family::set_llama_defaults,
    .resolve = family::resolve_llama,
    .gguf = {.architecture = "llama", .neighbours_turn = true},
});
extern constinit const FamilySpec kQwen2Family = family::relative({
    .family = Family::Qwen2,
    .name = "qwen2",
    .architecture = "Qwen2ForCausalLM",
    .unread = family::kQwen2Unread,
    .neutral = family::kQwen2Neutral,
    .set_defaults = family::set_qwen2_defaults,
    .resolve = family::resolve_qwen2,
    .gguf = {.architecture = "qwen2"},
});
extern constinit const FamilySpec kQwen3Family = family::relative({
    .family = Family::Qwen3,
    .name = "qwen3",
    .architecture = "Qwen3ForCausalLM",
    .unread = family::kQwen3Unread,
    .set_defaults = family::set_qwen3_defaults,
    .resolve = family::resolve_qwen3,
    .gguf = {.architecture = "qwen3"},
});

}  // namespace ds
