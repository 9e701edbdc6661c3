// SPDX-License-Identifier: Apache-2.0
#include "config/weight_codes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "base/utf8.h"
#include "config/family.h"

namespace ds {
namespace {

constexpr const char* kCodesSection = "quantization_config";

// A member with the values that are supported, as a JSON list; empty: any.
struct CodesMember {
  std::string_view key, values;
};

constexpr CodesMember kFp8Members[] = {
    {"quant_method", ""},
    {"modules_to_not_convert", ""},
    {"ignored_layers", ""},
    {"fmt", R"(["e4m3"])"},
    {"weight_block_size", "[[128, 128]]"},
    {"activation_scheme", R"(["dynamic", null])"},
    {"scale_fmt", R"(["float", null])"},
    {"expert_dtype", R"(["fp8", null])"},
    {"dequantize", "[false, true]"},
};

// Notes of the programs that make codes, about how they did.
constexpr std::string_view kMakersNotes[] = {"quant_method",
                                             "method",
                                             "meta",
                                             "version",
                                             "backend",
                                             "modules_to_not_convert",
                                             "modules_in_block_to_quantize",
                                             "block_name_to_quantize",
                                             "module_name_preceding_first_block",
                                             "lm_head",
                                             "damp_percent",
                                             "damp_auto_increment",
                                             "static_groups",
                                             "true_sequential",
                                             "act_group_aware",
                                             "mse",
                                             "model_name_or_path",
                                             "model_file_base_name",
                                             "dataset",
                                             "tokenizer",
                                             "batch_size",
                                             "pad_token_id",
                                             "cache_block_outputs",
                                             "cache_examples_on_gpu",
                                             "model_seqlen",
                                             "max_input_length",
                                             "use_exllama",
                                             "disable_exllama",
                                             "exllama_config",
                                             "use_cuda_fp16",
                                             "do_fuse",
                                             "modules_to_fuse",
                                             "fuse_max_seq_len",
                                             "quantization_status",
                                             "global_compression_ratio",
                                             "ignore",
                                             "observer",
                                             "observer_kwargs",
                                             "scale_dtype",
                                             "zp_dtype"};

constexpr CodesMember kGptqMembers[] = {
    {"bits", "[4, 8]"},
    {"group_size", ""},
    {"sym", "[true, false]"},
    {"desc_act", "[false, true]"},
    {"checkpoint_format", R"(["gptq", "gptq_v2", null])"},
    {"format", R"(["gptq", "gptq_v2", null])"},
    {"pack_dtype", R"(["int32", null])"},
    {"is_marlin_format", "[false, null]"},
    {"rotation", "[null]"},
    {"adapter", "[null]"},
    {"dynamic", ""},
};
constexpr CodesMember kAwqMembers[] = {
    {"bits", "[4]"},
    {"w_bit", "[4]"},
    {"group_size", ""},
    {"q_group_size", ""},
    {"zero_point", "[true]"},
    {"version", R"(["gemm", "GEMM", null])"},
    {"format", R"(["gemm", "GEMM", null])"},
    {"backend", R"(["autoawq", "auto", "auto_trainable", "marlin", "machete", null])"},
    {"checkpoint_format", R"(["gemm", null])"},
    {"pack_dtype", R"(["int32", null])"},
    {"desc_act", "[false, null]"},
    {"sym", "[false, true, null]"},
};
constexpr std::string_view kFormatsOfCodes = R"(["pack-quantized", "int-quantized", "float-quantized",
                                                 "naive-quantized", "mixed-precision"])";
constexpr CodesMember kCompressedMembers[] = {
    {"format", kFormatsOfCodes},        {"config_groups", ""},
    {"kv_cache_scheme", "[null]"},      {"sparsity_config", "[null, {}]"},
    {"transform_config", "[null, {}]"}, {"moe_sparsity_config", "[null]"},
};
constexpr CodesMember kGroupMembers[] = {
    {"targets", ""},
    {"weights", ""},
    {"input_activations", ""},
    {"output_activations", "[null]"},
    {"format", R"(["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", null])"},
};
constexpr CodesMember kWeightMembers[] = {
    {"num_bits", "[8, 4]"},
    {"type", R"(["int", "float"])"},
    {"symmetric", "[true, false]"},
    {"strategy", R"(["channel", "group", "tensor", "block", null])"},
    {"group_size", ""},
    {"block_structure", ""},
    {"dynamic", "[false]"},
    {"actorder", R"([null, false, "static", "weight", "group", "dynamic"])"},
};
// Static scales depend on texts of a calibration, and those of a tensor on the other texts of a batch.
constexpr CodesMember kInputMembers[] = {
    {"num_bits", "[8]"},           {"type", R"(["int", "float"])"}, {"symmetric", "[true]"},
    {"strategy", R"(["token"])"},  {"dynamic", "[true]"},           {"group_size", "[null]"},
    {"block_structure", "[null]"}, {"actorder", "[null, false]"},
};

// Reads the members of an object, and collects those that are refused.
class CodesReader {
 public:
  CodesReader(std::string method, std::vector<std::string>& refused, std::vector<std::string>& unknown)
      : method_(std::move(method)), refused_(refused), unknown_(unknown) {}

  void refuse(const std::string& key, const Json& value, std::string_view there_is) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    refused_.push_back(fmt::format("\"{}\" {} of weights in \"{}\" ({})", key, text, method_, there_is));
  }
  // Refuses values that are not in the table.
  void check(const Json& object, std::span<const CodesMember> members, const std::string& prefix) {
    for (const auto& [name, value] : object.items()) {
      const auto member = std::ranges::find(members, name, &CodesMember::key);
      if (member == members.end()) {
        if (!value.is_null() && std::ranges::find(kMakersNotes, name) == std::end(kMakersNotes))
          unknown_.push_back(prefix + name);
        continue;
      }
      if (member->values.empty()) continue;
      const Json values = Json::parse(member->values);
      if (std::ranges::find(values, value) != values.end()) continue;
      std::vector<std::string> shown;
      for (const Json& v : values) shown.push_back(v.dump());
      refuse(prefix + name, value, fmt::format("there is {}", fmt::join(shown, ", ")));
    }
  }
  // Refuses two members that state the same and differ; none, or null, states nothing.
  void check_equal(const Json& object, const char* one, const char* other) {
    const Json a = object.value(one, Json()), b = object.value(other, Json());
    if (!a.is_null() && !b.is_null() && a != b)
      refuse(one, a, fmt::format("but \"{}\" is {}", other, b.dump(-1, ' ', false, Json::error_handler_t::replace)));
  }
  // -1, which stands for all columns, or a positive number; `otherwise` if there is none.
  i64 group_size(const Json& object, const char* key, i64 otherwise, const std::string& prefix = "") {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null()) return otherwise;
    const i64 size = it->is_number_integer() ? it->get<i64>() : 0;
    const bool good = size == -1 || (size > 0 && size <= kMostColumns);
    if (!good) refuse(prefix + key, *it, "it is -1 for all columns, or a positive number of columns");
    return good ? size : otherwise;
  }

  static constexpr i64 kMostColumns = i64{1} << 31;

 private:
  std::string method_;
  std::vector<std::string>& refused_;
  std::vector<std::string>& unknown_;
};

template <class T>
T member_or(const Json& object, const char* key, T otherwise) {
  const auto it = object.find(key);
  if (it == object.end()) return otherwise;
  const bool fits = std::is_same_v<T, bool>  ? it->is_boolean()
                    : std::is_same_v<T, int> ? it->is_number_integer()
                                             : it->is_string();
  return fits ? it->get<T>() : otherwise;
}

void read_fp8(const Json& section, std::vector<std::string>& refused) {
  if (!section.contains("weight_block_size"))
    refused.emplace_back("\"quant_method\" \"fp8\" without a weight_block_size (it is [128, 128])");
  for (const auto& [name, value] : section.items()) {
    if (name == "scale_fmt" && value == "ue8m0") {
      refused.emplace_back(
          "\"scale_fmt\" \"ue8m0\" of weights in \"fp8\": scales of type E8M0 are not read; if the file has its "
          "weight_scale_inv in fp32, remove the key, else convert the weights to bf16");
      continue;
    }
    const auto* const member = std::ranges::find(kFp8Members, name, &CodesMember::key);
    if (member == std::end(kFp8Members)) {
      if (!value.is_null()) refused.push_back(fmt::format("\"{}\" of weights in \"fp8\"", name));
      continue;
    }
    if (member->values.empty()) continue;
    const Json values = Json::parse(member->values);
    if (std::ranges::find(values, value) == values.end())
      refused.push_back(
          fmt::format("\"{}\" {} of weights in \"fp8\" (there is {})", name, value.dump(), values[0].dump()));
  }
}

// GPTQModel's rules for single modules: some change the form of codes, and "-:" leaves weights plain.
void check_rules(const Json& rules, CodesReader& r) {
  const bool changes_nothing =
      rules.is_null() || (rules.is_object() && std::ranges::all_of(rules.items(), [](const auto& rule) {
                            return rule.key().starts_with("-:") || rule.value().empty();
                          }));
  if (!changes_nothing) r.refuse("dynamic", rules, "there are modules that are not coded, \"-:\"");
}

void read_gptq(const Json& section, CodesReader& r, WeightCodes& codes) {
  r.check(section, kGptqMembers, "");
  r.check_equal(section, "format", "checkpoint_format");
  check_rules(section.value("dynamic", Json()), r);
  if (!section.contains("bits")) r.refuse("bits", nullptr, "there is 4, 8");
  codes.bits = member_or(section, "bits", 4);
  codes.group = r.group_size(section, "group_size", 128);
  codes.symmetric = member_or(section, "sym", true);
  codes.act_order = member_or(section, "desc_act", false);
  const std::string format = member_or(section, "format", std::string("gptq"));
  codes.zeros_minus_one = member_or(section, "checkpoint_format", format) != "gptq_v2";
}

void read_awq(const Json& section, CodesReader& r, WeightCodes& codes) {
  r.check(section, kAwqMembers, "");
  r.check_equal(section, "group_size", "q_group_size");
  codes.bits = 4;
  codes.group = r.group_size(section, "group_size", r.group_size(section, "q_group_size", 128));
  codes.symmetric = false;
  codes.zeros_minus_one = false;
}

// Columns, or rows and columns, that share a scale.
void read_strategy(const Json& weights, const std::string& prefix, CodesReader& r, CodesGroup& group) {
  const i64 size = r.group_size(weights, "group_size", 0, prefix);
  const std::string strategy = member_or(weights, "strategy",
                                         std::string(size > 0     ? "group"
                                                     : size == -1 ? "channel"
                                                                  : "tensor"));
  if (size > 0 && (strategy == "tensor" || strategy == "channel" || strategy == "block"))
    r.refuse(prefix + "group_size", size, fmt::format("but \"strategy\" is {}", Json(strategy).dump()));
  if (strategy != "block" && !weights.value("block_structure", Json()).is_null())
    r.refuse(prefix + "block_structure", weights["block_structure"],
             fmt::format("but \"strategy\" is {}", Json(strategy).dump()));
  if (strategy == "tensor") group.scales = CodesGroup::Scales::Tensor;
  if (strategy == "channel") group.scales = CodesGroup::Scales::Channel;
  if (strategy == "group") {
    group.scales = CodesGroup::Scales::Group;
    group.group = size;
    if (size <= 0)
      r.refuse(prefix + "group_size", weights.value("group_size", Json()), "it is positive for \"strategy\" \"group\"");
  }
  if (strategy != "block") return;
  group.scales = CodesGroup::Scales::Block;
  const Json block = weights.value("block_structure", Json());
  const auto is_size = [](const Json& v) {
    return v.is_number_integer() && v.get<i64>() > 0 && v.get<i64>() <= CodesReader::kMostColumns;
  };
  if (block.is_array() && block.size() == 2 && is_size(block[0]) && is_size(block[1])) {
    group.block = {block[0].get<i64>(), block[1].get<i64>()};
  } else {
    r.refuse(prefix + "block_structure", block, "it is a list of two positive numbers");
  }
}

void read_targets(const Json& targets, const std::string& prefix, CodesReader& r, CodesGroup& group) {
  constexpr std::string_view kExpression = "re:";
  const bool is_list = targets.is_array() && std::ranges::all_of(targets, [](const Json& t) { return t.is_string(); });
  if (!is_list) return r.refuse(prefix + "targets", targets, "it is a list of names");
  for (const Json& t : targets) {
    const std::string target = t.get<std::string>();
    if (target == "Linear") {
      group.all_linear = true;
    } else if (target.starts_with(kExpression)) {
      try {
        group.patterns.emplace_back(target.substr(kExpression.size()), Pattern::Kind::Text);
      } catch (const Error& e) {
        r.refuse(prefix + "targets", t, e.what());
      }
    } else {
      group.names.push_back(target);
    }
  }
}

void read_group(const std::string& name, const Json& object, const std::string& format, CodesReader& r,
                WeightCodes& codes) {
  const std::string prefix = fmt::format("config_groups.{}.", name);
  if (!object.is_object()) return r.refuse("config_groups." + name, object, "it is an object");
  r.check(object, kGroupMembers, prefix);
  const Json weights = object.value("weights", Json());
  if (!weights.is_object()) return r.refuse(prefix + "weights", weights, "it is an object");
  r.check(weights, kWeightMembers, prefix + "weights.");
  CodesGroup group{.name = name};
  group.bits = member_or(weights, "num_bits", 8);
  group.floats = member_or(weights, "type", std::string("int")) == "float";
  group.symmetric = member_or(weights, "symmetric", true);
  const std::string own_format = member_or(object, "format", format);
  group.packed = own_format == "pack-quantized";
  if (format != "mixed-precision" && own_format != format)
    r.refuse(prefix + "format", own_format, fmt::format("but \"format\" is {}", Json(format).dump()));
  if (own_format == "mixed-precision")
    r.refuse(prefix + "format", object.value("format", Json()), "a group of \"mixed-precision\" has one of its own");
  if (group.floats && (group.packed || group.bits != 8 || !group.symmetric))
    r.refuse(prefix + "weights", weights, "\"type\" \"float\" has 8 bits, symmetric, and is not packed");
  if (own_format == "float-quantized" && !group.floats)
    r.refuse(prefix + "weights.type", weights.value("type", Json()), "\"float-quantized\" has \"float\"");
  if (own_format == "int-quantized" && group.floats)
    r.refuse(prefix + "weights.type", weights.value("type", Json()), "\"int-quantized\" has \"int\"");
  read_strategy(weights, prefix + "weights.", r, group);
  if (const Json inputs = object.value("input_activations", Json()); inputs.is_object()) {
    r.check(inputs, kInputMembers, prefix + "input_activations.");
    for (const char* key : {"dynamic", "strategy"})
      if (!inputs.contains(key)) r.refuse(fmt::format("{}input_activations.{}", prefix, key), nullptr, "it is given");
    group.dynamic_inputs = member_or(inputs, "type", std::string("int")) == "int";
  } else if (!inputs.is_null()) {
    r.refuse(prefix + "input_activations", inputs, "it is an object or null");
  }
  read_targets(object.value("targets", Json()), prefix, r, group);
  codes.groups.push_back(std::move(group));
}

void read_compressed(const Json& section, CodesReader& r, WeightCodes& codes) {
  r.check(section, kCompressedMembers, "");
  const std::string format = member_or(section, "format", std::string());
  if (!section.contains("format")) r.refuse("format", nullptr, "it is given");
  const Json groups = section.value("config_groups", Json());
  if (!groups.is_object()) return r.refuse("config_groups", groups, "it is an object");
  for (const auto& [name, object] : groups.items()) read_group(name, object, format, r, codes);
}

struct NamedMethod {
  std::string_view name;
  CodesMethod method;
};
constexpr NamedMethod kCodesMethods[] = {{"fp8", CodesMethod::Fp8},
                                         {"gptq", CodesMethod::Gptq},
                                         {"awq", CodesMethod::Awq},
                                         {"compressed-tensors", CodesMethod::CompressedTensors}};

std::string method_name(const Json& config) {
  const auto it = config.find(kCodesSection);
  return it != config.end() && it->is_object() ? member_or(*it, "quant_method", std::string()) : "";
}

// Patterns need it.
bool is_valid_text(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace

CodesMethod codes_method(const Json& config) {
  const std::string method = method_name(config);
  const auto* const known = std::ranges::find(kCodesMethods, method, &NamedMethod::name);
  return known == std::end(kCodesMethods) ? CodesMethod::None : known->method;
}

std::string other_method(const Json& config) {
  const std::string method = method_name(config);
  if (method.empty() || method == "none" || codes_method(config) != CodesMethod::None) return "";
  std::vector<std::string> names;
  for (const NamedMethod& known : kCodesMethods) names.push_back(fmt::format("\"{}\"", known.name));
  return fmt::format("\"quant_method\" {} (there is {})", Json(method).dump(), fmt::join(names, ", "));
}

bool quantizes_nothing(const Json& config) {
  const auto it = config.find(kCodesSection);
  if (it == config.end() || !it->is_object()) return false;
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

WeightCodes read_weight_codes(const Json& config, std::vector<std::string>& refused) {
  WeightCodes codes{.method = codes_method(config)};
  if (codes.method == CodesMethod::None) return codes;
  const Json& section = config.at(kCodesSection);
  CodesReader r(section.at("quant_method").get<std::string>(), refused, codes.unknown);
  switch (codes.method) {
    case CodesMethod::None: break;
    case CodesMethod::Fp8: read_fp8(section, refused); break;
    case CodesMethod::Gptq: read_gptq(section, r, codes); break;
    case CodesMethod::Awq: read_awq(section, r, codes); break;
    case CodesMethod::CompressedTensors: read_compressed(section, r, codes); break;
  }
  // GPTQ and AWQ turn such matrices before they code them.
  const Json type = config.value("model_type", Json());
  const bool turned = std::ranges::any_of(
      families(), [&](const FamilySpec* family) { return family->gguf.transposed && type == family->name; });
  if (turned && (codes.method == CodesMethod::Gptq || codes.method == CodesMethod::Awq))
    r.refuse("quant_method", section.at("quant_method"), fmt::format("of a model of type {}", type.dump()));
  return codes;
}

const CodesGroup* group_of(const WeightCodes& codes, std::string_view name) {
  const auto first = [&](auto&& has) {
    const auto it = std::ranges::find_if(codes.groups, has);
    return it == codes.groups.end() ? nullptr : &*it;
  };
  if (const auto* by_name =
          first([&](const CodesGroup& g) { return std::ranges::find(g.names, name) != g.names.end(); }))
    return by_name;
  const bool is_text = is_valid_text(name);
  const auto is_matched = [&](const Pattern& pattern) {
    try {
      const auto match = is_text ? pattern.find(name) : std::nullopt;
      return match && match->first == 0;
    } catch (const Error& e) {
      throw Error(e.code(),
                  fmt::format("quantization_config: an expression among the targets of config_groups, on {}: {}", name,
                              e.what()));
    }
  };
  if (const auto* by_pattern = first([&](const CodesGroup& g) { return std::ranges::any_of(g.patterns, is_matched); }))
    return by_pattern;
  return first([](const CodesGroup& g) { return g.all_linear; });
}

}  // namespace ds
