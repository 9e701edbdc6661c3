// SPDX-License-Identifier: Apache-2.0
#include "config/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/json.h"

namespace ds {
namespace {

bool is_gguf_mixture(const FamilySpec& spec) noexcept { return !spec.experts.gate.empty(); }

bool reads_key(const FamilySpec& spec, std::string_view key) noexcept {
  return std::ranges::any_of(spec.keys, [&](const Key& k) { return k.path == key; }) &&
         std::ranges::find(spec.unread, key) == spec.unread.end();
}

// Llama 3 slows the rotation of each pair of dims by a factor that depends on its wavelength. GGUF has the factors, and
// a config.json the rule: these are its parts, of which all published models have the first two.
struct Llama3Rule {
  double low = 1, high = 4, factor = 8;
  i64 original = 8192;  // positions

  double of(double frequency) const {
    const double length = 2 * std::numbers::pi / frequency, positions = static_cast<double>(original);
    if (length < positions / high) return 1;
    if (length > positions / low) return factor;
    const double smooth = (positions / length - low) / (high - low);
    return 1 / ((1 - smooth) / factor + smooth);
  }
};

class GgufConfig {
 public:
  explicit GgufConfig(const Gguf& file)
      : file_(file), spec_(gguf_family(file)), begin_(std::string(spec_.gguf.architecture) + ".") {}

  std::string make() {
    config_ = {{"architectures", {spec_.architecture}}, {"model_type", spec_.name}};
    add_sizes();
    if (spec_.rotary) add_attention();
    if (is_gguf_mixture(spec_)) add_experts();
    for (const auto& [key, value] : spec_.gguf.implied) config_[std::string(key)] = Json::parse(value);
    config_["tie_word_embeddings"] = file_.find("output.weight") == nullptr;
    for (const char* token : {"bos", "eos"})
      if (const auto id = file_.integer(fmt::format("tokenizer.ggml.{}_token_id", token)))
        config_[fmt::format("{}_token_id", token)] = *id;
    refuse_others();
    return config_.dump();
  }

 private:
  std::string key(std::string_view name) {
    std::string full = begin_ + std::string(name);
    asked_.insert(full);
    return full;
  }
  std::optional<i64> integer(std::string_view name) { return file_.integer(key(name)); }
  std::optional<double> number(std::string_view name) { return file_.number(key(name)); }
  i64 size(std::string_view name) {
    const auto value = integer(name);
    DS_CHECK(value, Errc::Corrupt, "{}: '{}{}' is missing", file_.path(), begin_, name);
    DS_CHECK(*value > 0, Errc::Corrupt, "{}: '{}{}' is {}", file_.path(), begin_, name, *value);
    return *value;
  }
  [[noreturn]] void unsupported(std::string_view name, const std::string& why) const {
    throw Error(Errc::Unavailable, fmt::format("{}: '{}{}' {}", file_.path(), begin_, name, why));
  }
  // A value that must be what the family does anyway.
  template <class T>
  void expect(std::string_view name, std::optional<T> value, T wanted) const {
    if (value && *value != wanted) unsupported(name, fmt::format("is {}; only {} is supported here", *value, wanted));
  }
  void set(std::string_view config_key, auto value) { config_[std::string(config_key)] = value; }
  // A number of type f32, without the digits that it gains as a double.
  static double shown(double x) { return shortest_decimal(static_cast<float>(x)); }

  const GgufTensor& tensor(const std::string& name) const {
    const GgufTensor* const t = file_.find(name);
    DS_CHECK(t != nullptr, Errc::Corrupt, "{}: there is no tensor '{}'", file_.path(), name);
    DS_CHECK(t->shape.size() > 1, Errc::Corrupt, "{}: tensor '{}' is not a matrix", file_.path(), name);
    return *t;
  }

  void add_sizes() {
    const i64 vocabulary = tensor("token_embd.weight").shape.front();
    set("vocab_size", vocabulary);
    expect("vocab_size", integer("vocab_size"), vocabulary);
    set(spec_.hidden, size("embedding_length"));
    set(spec_.layers, size("block_count"));
    set(spec_.heads, size("attention.head_count"));
    const auto lengths = spec_.positions.lengths;
    set(lengths.empty() ? "max_position_embeddings" : lengths.front(), size("context_length"));
    set(spec_.rms_norm ? "intermediate_size" : "n_inner", size("feed_forward_length"));
    const std::string_view norm = spec_.rms_norm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon";
    if (const auto eps = number(norm)) set(spec_.rms_norm ? "rms_norm_eps" : "layer_norm_epsilon", shown(*eps));
  }

  void add_attention() {
    const i64 heads = size("attention.head_count"), hidden = size("embedding_length");
    set("num_key_value_heads", integer("attention.head_count_kv").value_or(heads));
    const i64 head = integer("attention.key_length").value_or(hidden / heads);
    set("head_dim", head);
    expect("attention.value_length", integer("attention.value_length"), head);
    expect("rope.dimension_count", integer("rope.dimension_count"), head);
    set("rope_theta", shown(number("rope.freq_base").value_or(10000)));
    add_scaling(head);
    const auto has_bias = [&](const char* name) { return file_.find(fmt::format("blk.0.{}.bias", name)) != nullptr; };
    if (reads_key(spec_, "attention_bias")) set("attention_bias", has_bias("attn_q"));
    if (reads_key(spec_, "qkv_bias")) set("qkv_bias", has_bias("attn_q"));
    if (reads_key(spec_, "mlp_bias")) set("mlp_bias", has_bias("ffn_gate"));
    const i64 window = integer("attention.sliding_window").value_or(0), length = size("context_length");
    if (window <= 0 || window >= length) return;
    // Without the layers that have it, only a family in which all have it can be read.
    if (!reads_key(spec_, "sliding_window") || reads_key(spec_, "max_window_layers"))
      unsupported("attention.sliding_window", fmt::format("is {}, and which layers have this window is not stated: "
                                                          "read the model's Hugging Face directory instead",
                                                          window));
    set("sliding_window", window);
  }

  void add_scaling(i64 head) {
    const std::optional<double> factor = number("rope.scaling.factor"), linear = number("rope.scale_linear");
    const std::string type =
        file_.text(key("rope.scaling.type")).value_or(factor.value_or(linear.value_or(1)) > 1 ? "linear" : "none");
    const double by = factor.value_or(linear.value_or(1));
    const std::optional<i64> original = integer("rope.scaling.original_context_length");
    Json scaling;
    if (type == "linear") {
      if (by > 1) scaling = {{"rope_type", "linear"}, {"factor", shown(by)}};
    } else if (type == "yarn") {
      DS_CHECK(original && by >= 1, Errc::Corrupt,
               "{}: '{}rope.scaling.type' is \"yarn\", and its factor or its original_context_length is missing",
               file_.path(), begin_);
      scaling = {{"rope_type", "yarn"}, {"factor", shown(by)}, {"original_max_position_embeddings", *original}};
      for (const char* beta : {"beta_fast", "beta_slow"})
        if (const auto value = number(fmt::format("rope.scaling.yarn_{}", beta))) scaling[beta] = shown(*value);
    } else if (type != "none") {
      unsupported("rope.scaling.type", fmt::format("is \"{}\"; none, linear and yarn are supported", type));
    }
    expect("rope.scaling.attn_factor", number("rope.scaling.attn_factor"), 1.0);
    if (const GgufTensor* const factors = file_.find("rope_freqs.weight")) {
      DS_CHECK(scaling.is_null(), Errc::Unavailable,
               "{}: rope_freqs.weight beside a rope.scaling.type of \"{}\" is not supported", file_.path(), type);
      scaling = llama3_scaling(*factors, head);
    }
    if (!scaling.is_null()) config_["rope_scaling"] = std::move(scaling);
  }

  Json llama3_scaling(const GgufTensor& t, i64 head) const {
    constexpr i64 kMost = 1 << 16;
    DS_CHECK(t.type_name() == "F32" && t.numel() == head / 2 && t.numel() <= kMost, Errc::Corrupt,
             "{}: rope_freqs.weight is not {} numbers of F32, one for each pair of rotated dims", file_.path(),
             head / 2);
    std::vector<float> factors(static_cast<size_t>(t.numel()));
    File::open_read(file_.files()[t.file]).read_at(t.offset, factors.data(), std::ssize(factors) * 4);
    Llama3Rule rule;
    rule.factor = factors.empty() ? 1 : *std::ranges::max_element(factors);
    const auto fits = [&] {
      for (size_t i = 0; i < factors.size(); ++i) {
        const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(head);
        const double wanted = rule.of(std::pow(config_["rope_theta"].get<double>(), -exponent));
        if (!(std::abs(factors[i] - wanted) <= 1e-4 * wanted)) return false;
      }
      return true;
    };
    for (rule.original = 16; rule.original <= 1 << 24; rule.original *= 2) {
      if (!fits()) continue;
      return {{"rope_type", "llama3"},
              {"factor", shown(rule.factor)},
              {"low_freq_factor", rule.low},
              {"high_freq_factor", rule.high},
              {"original_max_position_embeddings", rule.original}};
    }
    throw Error(Errc::Unavailable,
                fmt::format("{}: the factors of rope_freqs.weight do not follow Llama 3's rule with low_freq_factor 1 "
                            "and high_freq_factor 4: read the model's Hugging Face directory instead",
                            file_.path()));
  }

  void add_experts() {
    set(reads_key(spec_, "num_local_experts") ? "num_local_experts" : "num_experts", size("expert_count"));
    set("num_experts_per_tok", size("expert_used_count"));
    // Such files have experts in every layer, and those of a layer in one tensor.
    const GgufTensor* const down = file_.find("blk.0.ffn_down_exps.weight");
    DS_CHECK(
        down != nullptr && !down->shape.empty(), Errc::Unavailable,
        "{}: the experts are not joined (there is no tensor blk.0.ffn_down_exps.weight), as they are in files since "
        "April 2024: convert the model again",
        file_.path());
    if (reads_key(spec_, "moe_intermediate_size")) set("moe_intermediate_size", down->shape.back());
    expect("expert_feed_forward_length", integer("expert_feed_forward_length"), down->shape.back());
    if (reads_key(spec_, "shared_expert_intermediate_size")) {
      const i64 shared = tensor("blk.0.ffn_down_shexp.weight").shape.back();
      set("shared_expert_intermediate_size", shared);
      expect("expert_shared_feed_forward_length", integer("expert_shared_feed_forward_length"), shared);
    }
    expect("expert_gating_func", integer("expert_gating_func"), i64{1});  // softmax
    expect("expert_weights_scale", number("expert_weights_scale"), 1.0);
    const bool normalises = spec_.gguf.implied.empty() || spec_.gguf.implied.front().value == "true";
    expect("expert_weights_norm", file_.flag(key("expert_weights_norm")), normalises);
  }

  // A key that is not known may change what the model computes.
  void refuse_others() {
    // They do not, or state what the family does.
    for (const char* name : {"tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "vocab_size"}) key(name);
    expect("attention.causal", file_.flag(key("attention.causal")), true);
    expect("use_parallel_residual", file_.flag(key("use_parallel_residual")), false);
    if (!is_gguf_mixture(spec_)) {
      expect("expert_count", integer("expert_count"), i64{0});
      expect("expert_used_count", integer("expert_used_count"), i64{0});
    }
    if (!spec_.rotary)
      expect("attention.head_count_kv", integer("attention.head_count_kv"), size("attention.head_count"));
    for (const std::string& found : file_.keys()) {
      DS_CHECK(!found.starts_with(begin_) || asked_.contains(found), Errc::Unavailable,
               "{}: '{}' is not known, and may change what the model computes", file_.path(), found);
    }
  }

  const Gguf& file_;
  const FamilySpec& spec_;
  const std::string begin_;  // of the architecture's keys
  Json config_;
  std::set<std::string> asked_;
};

}  // namespace

const FamilySpec& gguf_family(const Gguf& file) {
  const auto name = file.text("general.architecture");
  DS_CHECK(name, Errc::Corrupt, "{}: 'general.architecture' is missing", file.path());
  const bool experts = file.integer(*name + ".expert_count").value_or(0) > 0;
  std::vector<std::string_view> known;
  const FamilySpec* found = nullptr;
  for (const FamilySpec* f : families()) {
    const std::string_view architecture = f->gguf.architecture;
    if (architecture.empty()) continue;
    if (architecture == *name && is_gguf_mixture(*f) == experts) found = f;
    if (std::ranges::find(known, architecture) == known.end()) known.push_back(architecture);
  }
  DS_CHECK(found != nullptr, Errc::Unavailable, "{}: the architecture '{}'{} is not supported ({} are)", file.path(),
           *name, experts ? " with experts" : "", fmt::join(known, ", "));
  return *found;
}

std::string gguf_config(const Gguf& file) { return GgufConfig(file).make(); }

}  // namespace ds
