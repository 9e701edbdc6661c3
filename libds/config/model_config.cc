// SPDX-License-Identifier: Apache-2.0
// Model configurations under Hugging Face's names. One table per family; what the keys of a family leave open (head
// sizes, windows, rotary scaling) is resolved and checked here, so that the model builder meets only sound sizes.
#include "config/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/check.h"
#include "config/named_files.h"
#include "config/trainer_output.h"

namespace ds {

template <>
inline constexpr std::array kEnumNames<RopeType> = {EnumName{"default", u8(RopeType::Default)},
                                                    EnumName{"linear", u8(RopeType::Linear)},
                                                    EnumName{"dynamic", u8(RopeType::Dynamic)},
                                                    EnumName{"llama3", u8(RopeType::Llama3)},
                                                    EnumName{"yarn", u8(RopeType::Yarn)},
                                                    EnumName{"longrope", u8(RopeType::LongRope)},
                                                    EnumName{"proportional"},
                                                    EnumName{"mrope"}};

namespace {

// The contents of config.json before they are resolved: 0 and empty stand for a missing key.
struct HfConfig {
  ModelConfig m;
  bool use_sliding_window = false;
  i64 sliding_window = 0;
  i64 max_window_layers = 0;
  std::vector<std::string> layer_types;
};

constexpr EnumName kPlainActivations[] = {{"gelu_new", u8(Activation::GeluTanh)},
                                          {"gelu_pytorch_tanh", u8(Activation::GeluTanh)},
                                          {"gelu", u8(Activation::GeluErf)},
                                          {"silu", u8(Activation::Silu)},
                                          {"swish", u8(Activation::Silu)},
                                          {"relu"},
                                          {"gelu_fast"},
                                          {"gelu_python"},
                                          {"quick_gelu"},
                                          {"tanh"}};
constexpr EnumName kGatedActivations[] = {{"silu", u8(Activation::Silu)},
                                          {"swish", u8(Activation::Silu)},
                                          {"gelu"},
                                          {"gelu_new"},
                                          {"gelu_pytorch_tanh"},
                                          {"relu"}};

template <const auto& names>
Slot activation_slot(void* root) {
  return EnumSlot{reinterpret_cast<u8*>(&static_cast<HfConfig*>(root)->m.activation), names};
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Range kSize = {1, 1 << 24};
constexpr Range kDropout = {0, 1, false, /*open_high=*/true};
constexpr Range kAboveZero = {0, kInfinity, /*open_low=*/true};

constexpr Key effect(std::string_view path, Slot (*slot)(void*), Range range = {}, bool takes_null = false) {
  return {.path = path, .slot = slot, .range = range, .takes_null = takes_null};
}
constexpr Key fixed(std::string_view path, std::string_view values) {
  return {.path = path, .kind = KeyKind::NotYet, .values = values};
}
constexpr Key alias(std::string_view path, std::string_view target) {
  return {.path = path, .kind = KeyKind::Alias, .name = target};
}
constexpr Key silent(std::string_view path) { return {.path = path, .kind = KeyKind::Silent}; }

constexpr bool kNull = true;
using H = HfConfig;
using M = ModelConfig;
using R = RopeScaling;

// clang-format off
constexpr Key kGpt2Keys[] = {
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
};

constexpr Key kLlamaKeys[] = {
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
    effect("sliding_window", slot_of<&H::sliding_window>, kSize, kNull),
    effect("max_window_layers", slot_of<&H::max_window_layers>, {}, kNull),
    effect("layer_types", slot_of<&H::layer_types>, {}, kNull),
    fixed("pretraining_tp", "[0, 1]"),
    fixed("partial_rotary_factor", "[1]"),
    fixed("use_mrope", "[false]"),
    silent("rope_interleaved"), silent("is_llama_config"), silent("max_sequence_length"),
};

constexpr Key kBertKeys[] = {
    effect("vocab_size", slot_of<&H::m, &M::vocab_size>, kSize),
    effect("hidden_size", slot_of<&H::m, &M::hidden>, kSize),
    effect("num_hidden_layers", slot_of<&H::m, &M::layers>, {1, 1e5}),
    effect("num_attention_heads", slot_of<&H::m, &M::heads>, kSize),
    effect("intermediate_size", slot_of<&H::m, &M::intermediate>, kSize),
    effect("hidden_act", activation_slot<kPlainActivations>),
    effect("hidden_dropout_prob", slot_of<&H::m, &M::resid_dropout>, kDropout, kNull),
    effect("attention_probs_dropout_prob", slot_of<&H::m, &M::attn_dropout>, kDropout, kNull),
    effect("max_position_embeddings", slot_of<&H::m, &M::max_positions>, kSize),
    effect("type_vocab_size", slot_of<&H::m, &M::token_types>, kSize),
    effect("initializer_range", slot_of<&H::m, &M::initializer_range>),
    effect("layer_norm_eps", slot_of<&H::m, &M::norm_eps>, kAboveZero),
    effect("pad_token_id", slot_of<&H::m, &M::pad_token_id>, {0, 1 << 24}, kNull),
    fixed("position_embedding_type", R"(["absolute"])"),
    fixed("tie_word_embeddings", "[true]"),
    fixed("is_decoder", "[false]"),
    fixed("add_cross_attention", "[false]"),
    fixed("is_causal", "[false]"), fixed("use_bidirectional_attention", "[true]"),
    // Keys of heads that are not built: Hugging Face's classifiers, and the pooler of Google's own files.
    silent("classifier_dropout"), silent("directionality"), silent("pooler_fc_size"), silent("pooler_num_attention_heads"),
    silent("pooler_num_fc_layers"), silent("pooler_size_per_head"), silent("pooler_type"),
};

// Written by transformers' base class: labels, tokens, generation, provenance. None changes the weights or the logits.
constexpr Key kBookkeeping[] = {
    silent("architectures"), silent("transformers_version"), silent("torch_dtype"), silent("dtype"), silent("use_cache"),
    silent("bos_token_id"), silent("eos_token_id"), silent("pad_token_id"), silent("sep_token_id"), silent("cls_token_id"),
    silent("mask_token_id"), silent("unk_token_id"), silent("decoder_start_token_id"), silent("forced_bos_token_id"),
    silent("forced_eos_token_id"), silent("_name_or_path"), silent("name_or_path"), silent("_attn_implementation_autoset"),
    silent("attn_implementation"), silent("_attn_implementation"), silent("task_specific_params"), silent("tokenizer_class"),
    silent("prefix"), silent("return_dict"), silent("return_dict_in_generate"), silent("output_attentions"),
    silent("output_hidden_states"), silent("output_scores"), silent("torchscript"), silent("use_bfloat16"),
    silent("tf_legacy_loss"), silent("problem_type"), silent("finetuning_task"), silent("id2label"), silent("label2id"),
    silent("num_labels"), silent("_num_labels"), silent("output_past"), silent("gradient_checkpointing"), silent("auto_map"), silent("_commit_hash"),
    silent("max_length"), silent("min_length"), silent("do_sample"), silent("early_stopping"), silent("num_beams"),
    silent("num_beam_groups"), silent("diversity_penalty"), silent("temperature"), silent("top_k"), silent("top_p"),
    silent("typical_p"), silent("repetition_penalty"), silent("length_penalty"), silent("no_repeat_ngram_size"),
    silent("encoder_no_repeat_ngram_size"), silent("bad_words_ids"), silent("num_return_sequences"),
    silent("exponential_decay_length_penalty"), silent("suppress_tokens"), silent("begin_suppress_tokens"),
    silent("remove_invalid_values"), silent("keys_to_ignore_at_inference"),
    fixed("is_decoder", "[false, true]"), fixed("is_encoder_decoder", "[false]"), fixed("tie_encoder_decoder", "[false]"),
    fixed("cross_attention_hidden_size", "[null]"), fixed("chunk_size_feed_forward", "[0]"), fixed("pruned_heads", "[{}]"),
    fixed("quantization_config", "[null, false, {}]"), fixed("quantization", "[null, false, {}]"),
    fixed("is_causal", "[true]"), fixed("use_bidirectional_attention", "[false]"),
};
// clang-format on

// Hugging Face's defaults.
HfConfig defaults(Family family, ModelSource source) {
  HfConfig h;
  ModelConfig& m = h.m;
  m.family = family;
  if (family == Family::Gpt2) {
    m.vocab_size = 50257;
    m.hidden = 768;
    m.layers = m.heads = 12;
    m.max_positions = 1024;
    m.embd_dropout = m.resid_dropout = m.attn_dropout = source == ModelSource::File ? 0.1f : 0.0f;
    return h;
  }
  if (family == Family::Bert) {
    m.vocab_size = 30522;
    m.hidden = 768;
    m.layers = m.heads = 12;
    m.intermediate = 3072;
    m.max_positions = 512;
    m.token_types = 2;
    m.norm_eps = 1e-12f;
    m.activation = Activation::GeluErf;
    m.resid_dropout = m.attn_dropout = source == ModelSource::File ? 0.1f : 0.0f;
    return h;
  }
  const bool llama = family == Family::Llama;
  m.vocab_size = llama ? 32000 : 151936;
  m.hidden = 4096;
  m.layers = m.heads = 32;
  m.intermediate = llama ? 11008 : 22016;
  m.max_positions = llama ? 2048 : 32768;
  if (family == Family::Qwen3) m.head_dim = 128;
  m.norm_eps = 1e-6f;
  m.activation = Activation::Silu;
  m.tie_embeddings = m.output_bias = m.mlp_bias = false;
  m.attention_bias = family == Family::Qwen2;
  m.qk_norm = family == Family::Qwen3;
  h.sliding_window = 4096;
  h.max_window_layers = 28;
  return h;
}

struct SizeNames {
  std::string_view hidden, layers, heads, positions;
};
constexpr SizeNames names_of(Family family) {
  return family == Family::Gpt2
             ? SizeNames{"n_embd", "n_layer", "n_head", "n_positions"}
             : SizeNames{"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"};
}

void resolve_heads(ModelConfig& m, Reader& r) {
  const SizeNames names = names_of(m.family);
  if (r.any_broken({names.hidden, names.heads, "num_key_value_heads", "head_dim"})) return;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.head_dim == 0) {
    if (m.hidden % m.heads != 0)
      return r.error(names.heads, fmt::format("{} heads do not divide {} {}", m.heads, names.hidden, m.hidden));
    m.head_dim = m.hidden / m.heads;
  }
  const std::string_view at = r.given("head_dim") ? "head_dim" : names.heads;
  if (m.heads % m.kv_heads != 0)
    r.error("num_key_value_heads", fmt::format("{} key/value heads do not divide {} heads", m.kv_heads, m.heads));
  if (m.head_dim % 2 != 0) r.error(at, fmt::format("a head has {} dimensions, which must be even", m.head_dim));
  if (m.head_dim > 256) r.not_yet(at, fmt::format("a head of {} dimensions (at most 256)", m.head_dim));
}

void resolve_rope(ModelConfig& m, Reader& r) {
  struct Use {
    std::string_view key;
    std::initializer_list<RopeType> types;
    bool required;
  };
  using enum RopeType;
  static const Use uses[] = {
      {"factor", {Linear, RopeType::Dynamic, Llama3, Yarn, LongRope}, true},
      {"low_freq_factor", {Llama3}, true},
      {"high_freq_factor", {Llama3}, true},
      {"original_max_position_embeddings", {Llama3, Yarn, LongRope}, false},
      {"attention_factor", {Yarn, LongRope}, false},
      {"beta_fast", {Yarn}, false},
      {"beta_slow", {Yarn}, false},
      {"mscale", {Yarn}, false},
      {"mscale_all_dim", {Yarn}, false},
      {"truncate", {Yarn}, false},
      {"short_factor", {LongRope}, true},
      {"long_factor", {LongRope}, true},
  };
  if (r.any_broken({"rope_scaling", "rope_scaling.rope_type"})) return;
  const std::string_view type = enum_name(kEnumNames<RopeType>, static_cast<u8>(m.rope.type));
  for (const Use& u : uses) {
    const std::string path = json_member("rope_scaling", u.key);
    const bool wanted = std::find(u.types.begin(), u.types.end(), m.rope.type) != u.types.end();
    const bool derived = m.rope.type == LongRope && u.key == "factor";
    if (wanted && u.required && !derived && !r.given(path) && !r.broken(path))
      r.error(path, fmt::format("is missing; rotary scaling \"{}\" needs it", type));
    if (!wanted && r.given(path)) r.warning(path, fmt::format("has no effect with rotary scaling \"{}\"", type));
  }
  if (m.rope.type == Llama3 && m.rope.high_freq_factor <= m.rope.low_freq_factor)
    r.error("rope_scaling.high_freq_factor", "must be greater than low_freq_factor");
  if (m.rope.type == Yarn && m.rope.beta_fast <= m.rope.beta_slow)
    r.error("rope_scaling.beta_fast", "must be greater than beta_slow");
  if (m.rope.type == RopeType::Dynamic && m.head_dim == 2)
    r.error("rope_scaling.rope_type", "\"dynamic\" is not defined for heads of 2 dimensions");
  if (m.rope.type == LongRope) {
    const i64 original = m.rope.original_max_positions > 0 ? m.rope.original_max_positions : m.max_positions;
    if (original < 2) r.error("rope_scaling.original_max_position_embeddings", "must be at least 2 with \"longrope\"");
    if (!r.given("rope_scaling.factor"))
      m.rope.factor = std::max(1.0f, static_cast<float>(m.max_positions) / static_cast<float>(original));
  }
  if (m.rope.type == LongRope && m.head_dim > 0)
    for (const auto& [key, list] : {std::pair{"rope_scaling.short_factor", &m.rope.short_factor},
                                    std::pair{"rope_scaling.long_factor", &m.rope.long_factor}})
      if (r.given(key) && std::ssize(*list) != m.head_dim / 2)
        r.error(key, fmt::format("has {} numbers; head_dim / 2 is {}", list->size(), m.head_dim / 2));
}

void resolve_windows(HfConfig& h, Reader& r) {
  ModelConfig& m = h.m;
  if (r.any_broken({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "num_hidden_layers"}))
    return;
  const bool windowed =
      (m.family == Family::Qwen2 || m.family == Family::Qwen3) && h.use_sliding_window && h.sliding_window > 0;
  if (!h.layer_types.empty() && std::ssize(h.layer_types) != m.layers)
    return r.error("layer_types", fmt::format("has {} entries for {} layers", h.layer_types.size(), m.layers));
  for (const std::string& t : h.layer_types)
    if (t != "full_attention" && t != "sliding_attention")
      return r.not_yet("layer_types", fmt::format("a layer of type \"{}\"", t));
  std::vector<bool> sliding(static_cast<size_t>(m.layers));
  for (size_t i = 0; i < sliding.size(); ++i)
    sliding[i] = h.layer_types.empty() ? windowed && static_cast<i64>(i) >= h.max_window_layers
                                       : h.layer_types[i] == "sliding_attention";
  if (std::find(sliding.begin(), sliding.end(), true) == sliding.end()) return;
  if (!windowed) return r.error("layer_types", "has sliding layers, but use_sliding_window or sliding_window is off");
  m.sliding_window = h.sliding_window;
  m.sliding_layers = std::move(sliding);
}

constexpr std::array<std::pair<std::string_view, Family>, 5> kFamilies = {{{"gpt2", Family::Gpt2},
                                                                           {"llama", Family::Llama},
                                                                           {"qwen2", Family::Qwen2},
                                                                           {"qwen3", Family::Qwen3},
                                                                           {"bert", Family::Bert}}};
constexpr std::array<std::string_view, 5> kArchitectures = {"GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM",
                                                            "Qwen3ForCausalLM", "BertForMaskedLM"};
constexpr std::string_view kFamilyNames = R"("gpt2", "llama", "qwen2", "qwen3", "bert")";

std::optional<Family> read_family(const Json& object, std::string_view key, Reader& r) {
  const auto it = object.find(std::string(key));
  if (it == object.end()) {
    r.error(key, fmt::format("is missing; it is one of {}", kFamilyNames));
    return std::nullopt;
  }
  for (const auto& [name, family] : kFamilies)
    if (*it == name) return family;
  if (it->is_string()) {
    r.not_yet(key, fmt::format("a model of type {} (there are {})", it->dump(), kFamilyNames));
  } else {
    r.error(key, fmt::format("must be one of {}", kFamilyNames));
  }
  return std::nullopt;
}

// A section whose method is "none", or bitsandbytes' where both of its switches are off: what is left of a merge.
bool quantizes_nothing(const Json& object) {
  const auto it = object.find("quantization_config");
  if (it == object.end() || !it->is_object()) return false;
  const Json method = it->value("quant_method", Json("bitsandbytes"));
  if (method == "none") {
    return std::ranges::all_of(it->items(), [](const auto& member) {
      return member.key() == "quant_method" || member.value().is_null() || member.value() == false;
    });
  }
  const bool has_switch = it->contains("load_in_4bit") || it->contains("load_in_8bit");
  return method == "bitsandbytes" && has_switch && it->value("load_in_4bit", Json(false)) == false &&
         it->value("load_in_8bit", Json(false)) == false;
}

// Whether a key that a model of this family does not read turns nothing on, by its name in the other families.
bool asks_for_nothing(Family family, const Json& object, std::string_view name, const Json& value) {
  if (value.is_null() || value == false) return true;
  const auto off = [&](const char* key) {
    const auto it = object.find(key);
    return it != object.end() && (it->is_null() || *it == false);
  };
  if (name == "sliding_window") return off("use_sliding_window");
  if (name == "scale_attn_weights") return value == true;  // which every family does
  if (name == "max_window_layers") return true;            // of windows that another key turns on
  if (name == "layer_types")
    return value.is_array() && std::ranges::all_of(value, [](const Json& type) { return type == "full_attention"; });
  if (name == "attention_bias") return family == Family::Qwen2 && value == true;
  if (name == "pretraining_tp") return value == 0 || value == 1;
  if (name == "position_embedding_type") return family == Family::Gpt2 && value == "absolute";
  return value == 0 && (name.find("dropout") != name.npos || name.ends_with("pdrop"));
}

// In the config.json of a program's model: the family whose names its keys have.
constexpr std::string_view kProgramModel = "libds_program_model";

}  // namespace

std::string_view family_name(Family family) noexcept { return kFamilies[static_cast<size_t>(family)].first; }

std::vector<Key> model_keys(Family family, ModelSource source) {
  std::vector<Key> keys = {silent(source == ModelSource::Inline ? "type" : "model_type")};
  if (source == ModelSource::Inline) keys.push_back(silent("model_type"));
  std::span<const Key> own = kLlamaKeys;
  if (family == Family::Gpt2) own = kGpt2Keys;
  if (family == Family::Bert) own = kBertKeys;
  const auto foreign = [&](const Key& k) {
    const bool windowed = family == Family::Qwen2 || family == Family::Qwen3;
    if (k.path == "mlp_bias" || k.path == "pretraining_tp") return family != Family::Llama;
    if (k.path == "attention_bias") return family == Family::Qwen2;
    if (k.path == "use_sliding_window" || k.path == "sliding_window" || k.path == "max_window_layers" ||
        k.path == "layer_types")
      return !windowed;
    return false;
  };
  std::copy_if(own.begin(), own.end(), std::back_inserter(keys), [&](const Key& k) { return !foreign(k); });
  // A family may say more about a key of transformers' base class.
  std::copy_if(std::begin(kBookkeeping), std::end(kBookkeeping), std::back_inserter(keys), [&](const Key& k) {
    return std::none_of(own.begin(), own.end(), [&](const Key& o) { return o.path == k.path; });
  });
  return keys;
}

// Why a model of this type has no such key, although others do; empty: none has.
std::string types_that_have(std::string_view name, Family own, ModelSource source) {
  std::vector<std::string> others;
  for (const auto& [type, family] : kFamilies) {
    const std::vector<Key> keys = model_keys(family, source);
    if (std::ranges::any_of(keys, [&](const Key& k) { return k.path.substr(0, k.path.find('.')) == name; }))
      others.push_back(fmt::format("\"{}\"", type));
  }
  if (others.empty()) return "";
  return fmt::format("no model of type \"{}\" has it, but those of type {} do", family_name(own),
                     fmt::join(others, " and "));
}

ModelConfig read_model(const Json& object, ModelSource source, const ConfigText& text, const std::string& prefix,
                       std::vector<Diagnostic>& diagnostics) {
  const bool is_inline = source == ModelSource::Inline;
  Reader probe({}, nullptr, text, prefix, diagnostics);
  const bool other_name = is_inline && !object.contains("type") && object.contains("model_type");
  const std::optional<Family> family = read_family(object, is_inline && !other_name ? "type" : "model_type", probe);
  if (!family) return {};

  HfConfig h = defaults(*family, source);
  std::vector<Key> keys = model_keys(*family, source);
  if (!is_inline && quantizes_nothing(object))
    *std::ranges::find(keys, "quantization_config", &Key::path) = silent("quantization_config");
  Reader r(keys, &h, text, prefix, diagnostics);
  // transformers, too, keeps what its model of this type does not read: fine-tuning tools leave their marks there.
  // A key of another family is a mistake all the same, unless its value asks for nothing.
  if (!is_inline) {
    std::set<std::string_view> of_others, marks;
    for (const std::span<const Key> table :
         {std::span<const Key>(kGpt2Keys), std::span<const Key>(kLlamaKeys), std::span<const Key>(kBertKeys)}) {
      for (const Key& k : table) {
        (k.kind == KeyKind::Silent ? marks : of_others).insert(k.path.substr(0, k.path.find('.')));
      }
    }
    const auto is_neutral = [&, of_others, marks](std::string_view name, const Json& value) {
      return marks.contains(name) || (of_others.contains(name) && asks_for_nothing(*family, object, name, value));
    };
    r.pass_over_unknown(of_others, is_neutral);
  }
  r.explain_unknown([&](std::string_view name) { return types_that_have(name, *family, source); });
  r.read(object);

  const SizeNames names = names_of(*family);
  if (is_inline) {
    for (std::string_view key : {std::string_view("vocab_size"), names.hidden, names.layers, names.heads})
      if (!r.given(key) && !r.broken(key)) r.error(key, "is missing");
    if (*family != Family::Gpt2 && !r.given("intermediate_size") && !r.broken("intermediate_size"))
      r.error("intermediate_size", "is missing");
    // Qwen3's default of 128 belongs to its published sizes.
    if (!r.given("head_dim") && !r.broken("head_dim")) h.m.head_dim = 0;
  }
  // transformers: a number where the key is missing, as many as heads where it is null.
  if (!is_inline && (*family == Family::Qwen2 || *family == Family::Qwen3) && !object.contains("num_key_value_heads"))
    h.m.kv_heads = 32;
  // Python takes null for false, which is not the default of these.
  const auto is_null = [&](const char* key) { return object.contains(key) && object[key].is_null(); };
  if (is_null("tie_word_embeddings") && *family == Family::Gpt2) h.m.tie_embeddings = false;
  if (is_null("scale_attn_weights")) h.m.scale_attn_weights = false;
  for (const Key& k : keys) {
    const bool is_dropout = k.kind == KeyKind::Effect && k.range.open_high;
    if (const auto it = object.find(std::string(k.path));
        is_dropout && it != object.end() && (it->is_null() || *it == false))
      *std::get<float*>(k.slot(&h)) = 0;
  }
  // The old spelling of no window: null.
  if (object.contains("sliding_window") && object["sliding_window"].is_null()) h.sliding_window = 0;
  if (*family == Family::Gpt2 && h.m.intermediate == 0) h.m.intermediate = 4 * h.m.hidden;
  if (*family == Family::Llama || *family == Family::Qwen3) h.m.output_bias = h.m.attention_bias;
  if (*family == Family::Bert) {
    h.m.embd_dropout = h.m.resid_dropout;
    if (object.contains("pad_token_id") && object["pad_token_id"].is_null()) h.m.pad_token_id = -1;
    if (h.m.pad_token_id >= h.m.vocab_size && !r.broken("vocab_size"))
      r.error("pad_token_id", fmt::format("{} is outside the vocabulary of {}", h.m.pad_token_id, h.m.vocab_size));
  }
  resolve_heads(h.m, r);
  resolve_rope(h.m, r);
  resolve_windows(h, r);
  return h.m;
}

ModelConfig read_model_file(const std::string& dir_or_file, std::vector<Diagnostic>& diagnostics) {
  std::error_code ignored;
  const std::filesystem::path path(dir_or_file);
  const std::string file = std::filesystem::is_directory(path, ignored) ? (path / "config.json").string() : dir_or_file;
  if (const std::string why = why_not_input({"", file}); !why.empty()) {
    diagnostics.push_back({.source = file, .message = why});
    return {};
  }
  const std::variant<std::string, Diagnostic> content = read_config_text(file);
  if (const auto* failed = std::get_if<Diagnostic>(&content)) {
    diagnostics.push_back(*failed);
    diagnostics.back().message += trainer_hint(dir_or_file);
    return {};
  }
  const size_t before = diagnostics.size();
  const ConfigText text(std::get<std::string>(content), file, diagnostics);
  if (diagnostics.size() > before) return {};
  return read_model(text.root(), ModelSource::File, text, "", diagnostics);
}

std::optional<ModelConfig> known_model(const Json& config, std::string& why) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->size() != 1 || !(*names)[0].is_string())
    return std::nullopt;
  if (std::ranges::find(kArchitectures, (*names)[0].get_ref<const std::string&>()) == kArchitectures.end())
    return std::nullopt;
  std::vector<Diagnostic> diagnostics;
  const ConfigText text(config.dump(), "config.json", diagnostics);
  ModelConfig model = read_model(text.root(), ModelSource::File, text, "", diagnostics);
  const auto bad = std::ranges::find(diagnostics, Severity::Error, &Diagnostic::severity);
  if (bad == diagnostics.end()) return model;
  why = to_string(*bad);
  return std::nullopt;
}

ModelConfig load_model_config(const std::string& dir_or_file) {
  ConfigResult result;
  result.config.model = read_model_file(dir_or_file, result.diagnostics);
  if (!result.ok()) throw Error(result.code(), result.message());
  return result.config.model;
}

std::string program_model(const Json& config) {
  const bool is_one = config.is_object() && config.contains(kProgramModel);
  const auto type = is_one ? config.find("model_type") : config.end();
  return is_one && type != config.end() && type->is_string() ? type->get<std::string>() : "";
}

std::string type_name(const ModelConfig& model) {
  return model.source ? model.source->identity() : std::string(family_name(model.family));
}

std::string program_model_problem(const ModelConfig& m) {
  const std::string name = m.source->identity();
  const bool plain = std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
  if (name.empty() || name.size() > 64 || !plain)
    return fmt::format("the identity of the program's model must be 1 to 64 of [a-zA-Z0-9._-], not \"{}\"", name);
  if (std::ranges::find(kFamilies, std::string_view(name), [](const auto& f) { return f.first; }) !=
      std::end(kFamilies))
    return fmt::format("the program's model is called \"{}\", which is the type of another model", name);
  constexpr i64 kMost = 1 << 24;
  for (const auto& [size, member] : {std::pair{m.layers, "layers"},
                                     {m.hidden, "hidden"},
                                     {m.vocab_size, "vocab_size"},
                                     {m.max_positions, "max_positions"},
                                     {m.heads, "heads"},
                                     {m.kv_heads, "kv_heads"},
                                     {m.head_dim, "head_dim"},
                                     {m.intermediate, "intermediate"}}) {
    if (size < 1 || size > kMost)
      return fmt::format("{} of the program's model \"{}\" must be 1 to {}, not {}", member, name, kMost, size);
  }
  if (m.heads % m.kv_heads != 0)
    return fmt::format("kv_heads {} of the program's model \"{}\" does not divide its heads {}", m.kv_heads, name,
                       m.heads);
  if (m.sliding_window > 0 && std::ssize(m.sliding_layers) != m.layers)
    return fmt::format("sliding_layers of the program's model \"{}\" has {} entries for {} layers", name,
                       m.sliding_layers.size(), m.layers);
  return {};
}

Json model_json(const ModelConfig& model) {
  HfConfig h = defaults(model.family, ModelSource::File);
  h.m = model;
  if (model.sliding_window > 0) {
    h.use_sliding_window = true;
    h.sliding_window = model.sliding_window;
    for (bool sliding : model.sliding_layers) h.layer_types.push_back(sliding ? "sliding_attention" : "full_attention");
    h.max_window_layers =
        std::find(model.sliding_layers.begin(), model.sliding_layers.end(), true) - model.sliding_layers.begin();
  }
  const RopeScaling& rope = model.rope;
  // Keys that its type does not read are left out, so that they neither warn nor mislead.
  const auto rope_key_read = [&](std::string_view key) {
    using enum RopeType;
    const RopeType t = rope.type;
    if (key == "rope_type" || key == "factor") return true;
    if (key == "low_freq_factor" || key == "high_freq_factor") return t == Llama3;
    if (key == "original_max_position_embeddings")
      return (t == Llama3 || t == Yarn || t == LongRope) && rope.original_max_positions > 0;
    if (key == "attention_factor") return (t == Yarn || t == LongRope) && rope.attention_factor > 0;
    if (key == "mscale" || key == "mscale_all_dim") return t == Yarn && rope.mscale > 0 && rope.mscale_all_dim > 0;
    if (key == "short_factor" || key == "long_factor") return t == LongRope;
    return t == Yarn;
  };
  Json out = {{"model_type", type_name(model)}};
  if (model.source) out[kProgramModel] = family_name(model.family);
  for (const Key& k : model_keys(model.family, ModelSource::File)) {
    if (k.kind != KeyKind::Effect || (k.path == "layer_types" && h.layer_types.empty())) continue;
    Json value = slot_json(k.slot(&h));
    if (k.path == "pad_token_id" && model.pad_token_id < 0) value = nullptr;
    if (const size_t dot = k.path.find('.'); dot == k.path.npos) {
      out[std::string(k.path)] = std::move(value);
    } else if (rope.type != RopeType::Default && rope_key_read(k.path.substr(dot + 1))) {
      out["rope_scaling"][std::string(k.path.substr(dot + 1))] = std::move(value);
    }
  }
  return out;
}

void check_same_model(const Json& saved, const ModelConfig& now, const std::string& step_dir) {
  const std::string there_is = program_model(saved), here_is = now.source ? now.source->identity() : "";
  const auto said = [](const std::string& identity) {
    return identity.empty() ? "none that a program brings" : fmt::format("\"{}\"", identity);
  };
  DS_CHECK(there_is == here_is, Errc::Mismatch,
           "{}: a checkpoint of another model: the model there is {}, and the model here is {}", step_dir,
           said(there_is), said(here_is));
  std::string why;
  const std::optional<ModelConfig> before = now.source ? now : known_model(saved, why);
  DS_CHECK(before || why.empty(), Errc::Mismatch, "{}: a checkpoint of another model: {}", step_dir, why);
  if (!before) return;
  // Rotations go by the length that was trained, which may be said in two ways.
  const auto json = [](ModelConfig m) {
    const bool trained =
        m.rope.type == RopeType::Llama3 || m.rope.type == RopeType::Yarn || m.rope.type == RopeType::LongRope;
    if (trained && m.rope.original_max_positions == 0) m.rope.original_max_positions = m.max_positions;
    return model_json(m);
  };
  const Json there = now.source ? saved : json(*before), here = json(now);
  const auto at = [](const Json& model, const std::string& key) {
    return model.contains(key) ? model.at(key).dump() : std::string("not set");
  };
  std::set<std::string> keys;
  for (const Json* side : {&there, &here}) {
    for (const auto& [key, value] : side->items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const bool own = key.find("dropout") != key.npos || key.ends_with("pdrop") || key == "initializer_range" ||
                     key.ends_with("token_id") ||
                     (key == "max_position_embeddings" && now.rope.type != RopeType::Dynamic);
    DS_CHECK(own || at(there, key) == at(here, key), Errc::Mismatch,
             "{}: a checkpoint of another model: model.{} is {} there and {} here", step_dir, key, at(there, key),
             at(here, key));
  }
}

Json publish_model(const Json& published, const ModelConfig& model) {
  Json out = published;
  const std::vector<Key> keys = model_keys(model.family, ModelSource::File);
  for (const Key& k : keys) {
    if (k.kind == KeyKind::Alias && k.path.find('.') == k.path.npos) out.erase(std::string(k.path));
  }
  out.update(Json::parse(model_config_json(model)));
  // Members of the section that reading passed over are written back.
  const auto rope = out.find("rope_scaling");
  if (rope == out.end() || !rope->is_object()) return out;
  for (const char* section : {"rope_scaling", "rope_parameters"}) {
    if (!published.contains(section) || !published[section].is_object()) continue;
    for (const auto& [name, value] : published[section].items()) {
      if (std::ranges::find(keys, json_member("rope_scaling", name), &Key::path) == keys.end()) (*rope)[name] = value;
    }
  }
  return out;
}

std::string model_config_json(const ModelConfig& model) {
  Json out = Json::object();
  if (!model.source) out["architectures"] = {kArchitectures[static_cast<size_t>(model.family)]};
  out.update(model_json(model));
  if (model.family == Family::Bert) out["position_embedding_type"] = "absolute";
  return out.dump(2) + "\n";
}

}  // namespace ds
