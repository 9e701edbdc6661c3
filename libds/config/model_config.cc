// SPDX-License-Identifier: Apache-2.0
// Model configurations under Hugging Face's names. The keys of a family leave head sizes, windows and rotary scaling
// open; they are resolved and checked here, so that the model builder meets only sound sizes.
#include "config/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/check.h"
#include "base/gguf.h"
#include "config/families/keys.h"
#include "config/families/moe.h"
#include "config/gguf_model.h"
#include "config/named_files.h"
#include "config/trainer_output.h"
#include "config/weight_codes.h"

namespace ds {

namespace {

using family::fixed, family::silent;

// clang-format off
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

HfConfig defaults(const FamilySpec& family, ModelSource source) {
  HfConfig h;
  h.m.family = family.family;
  family.set_defaults(h, source);
  return h;
}

void resolve_heads(ModelConfig& m, Reader& r) {
  const FamilySpec& names = spec_of(m.family);
  if (r.any_broken({names.hidden, names.heads, "num_key_value_heads", "head_dim"})) return;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.head_dim == 0) {
    if (m.hidden % m.heads != 0)
      return r.error(names.heads, fmt::format("{} heads do not divide {} {}", m.heads, names.hidden, m.hidden));
    m.head_dim = m.hidden / m.heads;
  }
  const std::string_view at = m.latent.on() ? "qk_nope_head_dim" : r.given("head_dim") ? "head_dim" : names.heads;
  if (m.heads % m.kv_heads != 0)
    r.error("num_key_value_heads", fmt::format("{} key/value heads do not divide {} heads", m.kv_heads, m.heads));
  if (m.head_dim % 2 != 0) r.error(at, fmt::format("a head has {} dimensions, which must be even", m.head_dim));
  if (m.rotary_share < 1 && (m.rotary_dim() < 2 || m.rotary_dim() % 2 != 0))
    r.error("partial_rotary_factor",
            fmt::format("turns {} of the {} dimensions of a head, which must be an even number", m.rotary_dim(),
                        m.head_dim));
  if (m.head_dim > 256) r.not_yet(at, fmt::format("a head of {} dimensions (at most 256)", m.head_dim));
}

// A file may describe such a model, so it is no error.
void warn_without_experts(const ExpertsConfig& x, Reader& r) {
  const bool set = x.balance_loss > 0 || x.z_loss > 0 || x.capacity.limited || x.random();
  if (!set || x.layers.empty() || std::ranges::find(x.layers, true) != x.layers.end()) return;
  constexpr std::string_view kDense[] = {"mlp_only_layers", "first_k_dense_replace", "decoder_sparse_step"};
  const auto key = std::ranges::find_if(kDense, [&](std::string_view k) { return r.given(k); });
  r.warning(key == std::end(kDense) ? "num_hidden_layers" : *key,
            "leaves no block with experts: losses, limits and noise of routers have no effect");
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
  if (m.rope.type == RopeType::Dynamic && m.rotary_dim() == 2)
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
      if (r.given(key) && std::ssize(*list) != m.rotary_dim() / 2)
        r.error(key, fmt::format("has {} numbers; {} / 2 is {}", list->size(),
                                 m.latent.on()        ? "qk_rope_head_dim"
                                 : m.rotary_share < 1 ? "head_dim * partial_rotary_factor"
                                                      : "head_dim",
                                 m.rotary_dim() / 2));
}

void resolve_windows(HfConfig& h, Reader& r) {
  ModelConfig& m = h.m;
  if (r.any_broken({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "num_hidden_layers"}))
    return;
  if (h.use_sliding_window && r.given("sliding_window") && h.sliding_window == 0)
    return r.error("sliding_window", "must be at least 1; null turns windows off");
  const bool windowed = h.use_sliding_window && h.sliding_window > 0;
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

// "gpt2", "llama", ...
std::string all_names() {
  std::vector<std::string> names;
  for (const FamilySpec* f : families()) names.push_back(fmt::format("\"{}\"", f->name));
  return fmt::format("{}", fmt::join(names, ", "));
}

const FamilySpec* read_family(const Json& object, std::string_view key, Reader& r) {
  const auto it = object.find(std::string(key));
  if (it == object.end()) {
    r.error(key, fmt::format("is missing; it is one of {}", all_names()));
    return nullptr;
  }
  for (const FamilySpec* f : families())
    if (*it == f->name) return f;
  if (it->is_string()) {
    r.not_yet(key, fmt::format("a model of type {} (there are {})", it->dump(), all_names()));
  } else {
    r.error(key, fmt::format("must be one of {}", all_names()));
  }
  return nullptr;
}

// Weights as codes, which are decoded when they are read.
void check_weight_codes(const Json& config, Reader& r) {
  constexpr std::string_view kSection = "quantization_config";
  std::vector<std::string> refused;
  const WeightCodes codes = read_weight_codes(config, refused);
  for (const std::string& what : refused) r.not_yet(kSection, what);
  if (!codes.unknown.empty())
    r.warning(kSection, fmt::format("unknown members, which are ignored: {}", fmt::join(codes.unknown, ", ")));
}

// Keys that say something about experts, which another key would turn on.
constexpr std::string_view kOfExperts[] = {"num_experts_per_tok",
                                           "norm_topk_prob",
                                           "router_aux_loss_coef",
                                           "router_z_loss_coef",
                                           "router_jitter_noise",
                                           "decoder_sparse_step",
                                           "mlp_only_layers",
                                           "moe_intermediate_size",
                                           "first_k_dense_replace",
                                           "n_group",
                                           "topk_group",
                                           "routed_scaling_factor",
                                           "topk_method",
                                           "scoring_func",
                                           "moe_layer_freq"};

// Whether a key that a model of this family does not read turns nothing on, by its name in the other families.
bool asks_for_nothing(const FamilySpec& family, const Json& object, std::string_view name, const Json& value) {
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
  if (name == "pretraining_tp") return value == 0 || value == 1;
  if (name == "num_nextn_predict_layers" || name == "num_mtp_layers") return value == 0;
  if (std::ranges::find(family.keys, "num_experts_per_tok", &Key::path) == family.keys.end()) {
    if (std::ranges::find(kOfExperts, name) != std::end(kOfExperts)) return true;
    if (name.ends_with("_experts") || name == "shared_expert_intermediate_size") return value == 0;
  }
  for (const KeyValue& neutral : family.neutral)
    if (name == neutral.key) return value == Json::parse(neutral.value);
  return value == 0 && (name.find("dropout") != name.npos || name.ends_with("pdrop"));
}

// In the config.json of a program's model: the family whose names its keys have.
constexpr std::string_view kProgramModel = "libds_program_model";

}  // namespace

std::vector<Key> model_keys(Family family, ModelSource source) {
  std::vector<Key> keys = {silent(source == ModelSource::Inline ? "type" : "model_type")};
  if (source == ModelSource::Inline) keys.push_back(silent("model_type"));
  const std::span<const Key> own = spec_of(family).keys;
  const std::span<const std::string_view> unread = spec_of(family).unread;
  std::ranges::copy_if(own, std::back_inserter(keys),
                       [&](const Key& k) { return std::ranges::find(unread, k.path) == unread.end(); });
  // A family may say more about a key of transformers' base class.
  std::copy_if(std::begin(kBookkeeping), std::end(kBookkeeping), std::back_inserter(keys), [&](const Key& k) {
    return std::none_of(own.begin(), own.end(), [&](const Key& o) { return o.path == k.path; });
  });
  return keys;
}

// Why a model of this type has no such key, although others do; empty: none has.
std::string types_that_have(std::string_view name, const FamilySpec& own, ModelSource source) {
  std::vector<std::string> others;
  for (const FamilySpec* f : families()) {
    const std::vector<Key> keys = model_keys(f->family, source);
    if (std::ranges::any_of(keys, [&](const Key& k) { return k.path.substr(0, k.path.find('.')) == name; }))
      others.push_back(fmt::format("\"{}\"", f->name));
  }
  if (others.empty()) return "";
  return fmt::format("no model of type \"{}\" has it, but those of type {} do", own.name, fmt::join(others, " and "));
}

ModelConfig read_model(const Json& object, ModelSource source, const ConfigText& text, const std::string& prefix,
                       std::vector<Diagnostic>& diagnostics) {
  const bool is_inline = source == ModelSource::Inline;
  Reader probe({}, nullptr, text, prefix, diagnostics);
  const bool other_name = is_inline && !object.contains("type") && object.contains("model_type");
  const FamilySpec* const family = read_family(object, is_inline && !other_name ? "type" : "model_type", probe);
  if (family == nullptr) return {};

  HfConfig h = defaults(*family, source);
  std::vector<Key> keys = model_keys(family->family, source);
  const bool has_codes = !is_inline && codes_method(object) != CodesMethod::None, is_plain = quantizes_nothing(object);
  const std::string other = is_inline || is_plain ? "" : other_method(object);
  if (has_codes || (!is_inline && is_plain) || !other.empty())
    *std::ranges::find(keys, "quantization_config", &Key::path) = silent("quantization_config");
  Reader r(keys, &h, text, prefix, diagnostics);
  // transformers, too, keeps what its model of this type does not read: fine-tuning tools leave their marks there.
  // A key of another family is a mistake all the same, unless its value asks for nothing.
  if (!is_inline) {
    std::set<std::string_view> of_others, marks;
    for (const FamilySpec* f : families()) {
      for (const Key& k : f->keys) {
        if (k.path == "use_qk_norm") continue;  // published for Qwen3, too, which does not read it
        const size_t dot = k.path.find('.');    // a silent member says nothing of its section
        (k.kind == KeyKind::Silent && dot == k.path.npos ? marks : of_others).insert(k.path.substr(0, dot));
      }
    }
    const auto is_neutral = [&, of_others, marks](std::string_view name, const Json& value) {
      return marks.contains(name) || (of_others.contains(name) && asks_for_nothing(*family, object, name, value));
    };
    r.pass_over_unknown(of_others, is_neutral);
  }
  r.explain_unknown([&](std::string_view name) { return types_that_have(name, *family, source); });
  r.read(object);

  for (const std::string_view key : family->required)
    if (is_inline && !r.given(key) && !r.broken(key)) r.error(key, "is missing");
  // Python takes null for false, which is not the default of dropout.
  for (const Key& k : keys) {
    const bool is_dropout = k.kind == KeyKind::Effect && k.range.open_high;
    if (const auto it = object.find(std::string(k.path));
        is_dropout && it != object.end() && (it->is_null() || *it == false))
      *std::get<float*>(k.slot(&h)) = 0;
  }
  // The old spelling of no window: null.
  if (object.contains("sliding_window") && object["sliding_window"].is_null()) h.sliding_window = 0;
  if (has_codes) check_weight_codes(object, r);
  if (!other.empty()) r.not_yet("quantization_config", other);
  family->resolve(h, object, source, r);
  if (is_inline && r.given("output_router_logits") && !h.output_router_logits && h.router_aux_loss_coef > 0)
    r.warning("router_aux_loss_coef", "has no effect, since output_router_logits is false");
  warn_without_experts(h.m.experts, r);
  resolve_heads(h.m, r);
  resolve_rope(h.m, r);
  resolve_windows(h, r);
  return h.m;
}

namespace {

// The config.json that describes the model of a GGUF file.
std::variant<std::string, Diagnostic> read_stored_config(const std::string& path) {
  try {
    return gguf_config(Gguf(path));
  } catch (const Error& e) {
    std::string_view why = e.what();
    if (const std::string begin = path + ": "; why.starts_with(begin)) why.remove_prefix(begin.size());
    return Diagnostic{.code = e.code(), .source = path, .message = std::string(why)};
  }
}

}  // namespace

ModelConfig read_model_file(const std::string& dir_or_file, std::vector<Diagnostic>& diagnostics) {
  std::error_code ignored;
  const std::filesystem::path path(dir_or_file);
  const std::string file = std::filesystem::is_directory(path, ignored) ? (path / "config.json").string() : dir_or_file;
  if (const std::string why = why_not_input({"", file}); !why.empty()) {
    diagnostics.push_back({.source = file, .message = why});
    return {};
  }
  const bool is_stored = is_gguf(file);
  const std::variant<std::string, Diagnostic> content = is_stored ? read_stored_config(file) : read_config_text(file);
  if (const auto* failed = std::get_if<Diagnostic>(&content)) {
    diagnostics.push_back(*failed);
    diagnostics.back().message += trainer_hint(dir_or_file);
    return {};
  }
  const size_t before = diagnostics.size();
  const ConfigText text(std::get<std::string>(content), file, diagnostics);
  if (diagnostics.size() > before) return {};
  ModelConfig model = read_model(text.root(), ModelSource::File, text, "", diagnostics);
  for (Diagnostic& d : std::span(diagnostics).subspan(before))
    if (is_stored) d.line = d.column = 0;  // nobody has written this text
  return model;
}

std::optional<ModelConfig> known_model(const Json& config, std::string& why) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->size() != 1 || !(*names)[0].is_string())
    return std::nullopt;
  if (std::ranges::none_of(families(), [&](const FamilySpec* f) { return (*names)[0] == f->architecture; }))
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
  if (std::ranges::any_of(families(), [&](const FamilySpec* spec) { return spec->name == name; }))
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
  HfConfig h = defaults(spec_of(model.family), ModelSource::File);
  h.m = model;
  if (model.sliding_window > 0) {
    h.use_sliding_window = true;
    h.sliding_window = model.sliding_window;
    for (bool sliding : model.sliding_layers) h.layer_types.push_back(sliding ? "sliding_attention" : "full_attention");
    h.max_window_layers =
        std::find(model.sliding_layers.begin(), model.sliding_layers.end(), true) - model.sliding_layers.begin();
  }
  const ExpertsConfig& experts = model.experts;
  h.output_router_logits = experts.balance_loss > 0;
  h.router_aux_loss_coef = h.output_router_logits ? experts.balance_loss : experts.unused_balance_loss;
  for (i64 l = 0; l < std::ssize(experts.layers); ++l)
    if (!experts.sparse(l)) h.mlp_only_layers.push_back(l);
  h.first_k_dense_replace = std::ranges::find(experts.layers, true) - experts.layers.begin();
  h.n_shared_experts = experts.shared / std::max<i64>(experts.intermediate, 1);
  h.topk_method = experts.router.groups > 1 ? "group_limited_greedy" : "greedy";
  if (model.latent.on()) {
    h.qk_nope_head_dim = model.head_dim - model.latent.rope_dim;
    h.m.head_dim = model.latent.rope_dim;  // as transformers writes it
  }
  h.m.later_predictors = 0;  // weights of ours have none
  family::restore_gating(h);
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
    if (key == "mscale_all_dim" && model.latent.on()) return t == Yarn && rope.mscale_all_dim > 0;
    if (key == "mscale" || key == "mscale_all_dim") return t == Yarn && rope.mscale > 0 && rope.mscale_all_dim > 0;
    if (key == "short_factor" || key == "long_factor") return t == LongRope;
    return t == Yarn;
  };
  Json out = {{"model_type", type_name(model)}};
  if (model.source) out[kProgramModel] = family_name(model.family);
  for (const Key& k : model_keys(model.family, ModelSource::File)) {
    if (k.kind != KeyKind::Effect || (k.path == "layer_types" && h.layer_types.empty())) continue;
    if (k.path == "router_z_loss_coef" && experts.z_loss == 0) continue;  // transformers has no such key
    Json value = slot_json(k.slot(&h));
    if (k.path == "pad_token_id" && model.pad_token_id < 0) value = nullptr;
    if (k.path == "sliding_window" && h.sliding_window == 0) value = nullptr;
    if (k.path == "q_lora_rank" && model.latent.query_rank == 0) value = nullptr;
    if (const size_t dot = k.path.find('.'); dot == k.path.npos) {
      out[std::string(k.path)] = std::move(value);
    } else if (k.path.starts_with("moe.")) {
      if (family::writes_gating(h, k.path)) out["moe"][std::string(k.path.substr(dot + 1))] = std::move(value);
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
  // Capacities, noise and losses of routers are a run's own.
  const auto without_gating = [](Json model) {
    const auto moe = model.find("moe");
    if (moe == model.end() || !moe->is_object()) return model;
    Json kept = Json::object();
    for (const char* const key : {"num_experts", "k", "expert_interval", "use_residual"})
      if (moe->contains(key)) kept[key] = moe->at(key);
    if (kept.empty()) {
      model.erase("moe");
    } else {
      *moe = std::move(kept);
    }
    return model;
  };
  const Json there = without_gating(now.source ? saved : json(*before)), here = without_gating(json(now));
  const auto at = [](const Json& model, const std::string& key) {
    return model.contains(key) ? model.at(key).dump() : std::string("not set");
  };
  std::set<std::string> keys;
  for (const Json* side : {&there, &here}) {
    for (const auto& [key, value] : side->items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const bool own = key.find("dropout") != key.npos || key.ends_with("pdrop") || key == "initializer_range" ||
                     key.ends_with("token_id") || key == "output_router_logits" || key.starts_with("router_") ||
                     (key == "max_position_embeddings" && now.rope.type != RopeType::Dynamic);
    DS_CHECK(own || at(there, key) == at(here, key), Errc::Mismatch,
             "{}: a checkpoint of another model: model.{} is {} there and {} here", step_dir, key, at(there, key),
             at(here, key));
  }
}

void forget_published_form(Json& config) {
  if (codes_method(config) != CodesMethod::None) config.erase("quantization_config");
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"}) {
    if (config.contains(key)) config[key] = 0;
  }
}

Json publish_model(const Json& published, const ModelConfig& model) {
  Json out = published;
  forget_published_form(out);
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
  if (!model.source) out["architectures"] = {spec_of(model.family).architecture};
  out.update(model_json(model));
  for (const auto& [key, value] : spec_of(model.family).constant) out[std::string(key)] = Json::parse(value);
  return out.dump(2) + "\n";
}

}  // namespace ds
