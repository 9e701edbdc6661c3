// SPDX-License-Identifier: Apache-2.0
#include "common/inference.h"

#include <algorithm>
#include <limits>

namespace ds::tools {
namespace {

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }

// Sections and keys that change what inference computes, or where.
constexpr std::string_view kOfInference[] = {"tensor_parallel",
                                             "pipeline",
                                             "zero_optimization",
                                             "sequence_parallel_size",
                                             "sequence_parallel_mode",
                                             "expert_parallel",
                                             "communication",
                                             "device",
                                             "cuda",
                                             "threads",
                                             "bf16",
                                             "fp16",
                                             "fp8",
                                             "sparse_attention"};

using Form = WeightsConfig::Form;
constexpr std::pair<std::string_view, Form> kForms[] = {
    {"stored", Form::Stored}, {"work", Form::Work}, {"int8", Form::Int8}, {"int4", Form::Int4}, {"w8a8", Form::W8A8}};

void check_key(const std::string& set, bool names_dtype, bool names_tokenizer) {
  const std::string key = set.substr(0, set.find('='));
  const auto is_in = [&](std::string_view section) {
    return key == section || (key.starts_with(section) && key[section.size()] == '.');
  };
  const auto refuse = [&](std::string_view why) { throw Error(Errc::Config, fmt::format("--set {}: {}", key, why)); };
  if (key == "data.tokenizer") {
    if (names_tokenizer) refuse("--tokenizer says it already");
    return;
  }
  if (is_in("model")) refuse("the model is MODEL's");
  if (names_dtype && (is_in("bf16") || is_in("fp16"))) refuse("--dtype says it already");
  if (std::ranges::none_of(kOfInference, is_in)) refuse("this key has no effect on inference");
}

}  // namespace

void Inference::add_options(CLI::App& app, bool with_sizes) {
  app.add_option("MODEL", model,
                 "a model directory, a run or step of ds-train, a GGUF file, or a file beside a config.json")
      ->type_name("DIR");
  app.add_option("--tokenizer", tokenizer, "the tokenizer (default: the model's own)")->type_name("DIR");
  app.add_option("--dtype", dtype, "numbers of the computation (default: as the model was published or trained)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--weights", weights,
                 "the form in which matrices are kept: as in the model's files, in the dtype of the computation, or "
                 "coded when they are read (default: stored)")
      ->check(CLI::IsMember({"stored", "work", "int8", "int4", "w8a8"}));
  app.add_option("--group", group, "elements of a row that share a scale, with --weights int8 or int4 (default 32)")
      ->check(CLI::IsMember({32, 128}));
  app.add_option("--set", set, "set a key of ds-config(5): a.b=value; may be given again")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  constexpr i64 kMostRows = 65536, kMostTokens = std::numeric_limits<i32>::max();
  const auto size = [&](const char* name, i64& value, i64 most, const char* text) {
    add_number(app, name, value, 1, most, text)->type_name("N")->group("Sizes");
  };
  size("--chunk", chunk, kMostRows, "tokens of a pass (default 512)");
  app.add_option("--cache-dtype", cache_dtype,
                 "keys and values in the caches: in the dtype of the computation, or 8-bit codes (default: work)")
      ->check(CLI::IsMember({"work", "int8"}))
      ->group("Sizes");
  if (!with_sizes) return;
  size("--batch", batch, kMostRows, "texts in progress at one time (default 64)");
  size("--context", context, kMostTokens, "most tokens of a text with its prompt (default: the model's, at most 4096)");
  size("--cache", cached, kMostTokens,
       "tokens in the caches of all texts (default: a quarter of --batch times --context)");
}

OpenModel Inference::open(const RankInfo& ranks) const {
  if (model.empty()) throw Error(Errc::Config, "MODEL is missing: --help shows the usage");
  for (const std::string& key : set) check_key(key, !dtype.empty(), !tokenizer.empty());
  const InferenceModel found = find_model(model);
  std::vector<std::string> keys;
  if (!tokenizer.empty()) keys.push_back("data.tokenizer=" + quoted(tokenizer));
  if (!dtype.empty()) {
    keys.push_back(fmt::format("bf16.enabled={}", dtype == "bf16"));
    keys.push_back(fmt::format("fp16.enabled={}", dtype == "fp16"));
  }
  keys.insert(keys.end(), set.begin(), set.end());
  const ConfigResult loaded = parse_config(found.config, found.name, keys, ranks.world_size, ConfigUse::Generate);
  std::string error;  // the last is thrown
  for (const Diagnostic& d : loaded.diagnostics) {
    if (ranks.rank > 0) break;
    if (d.severity != Severity::Error) {
      report_warning(to_string(d));
      continue;
    }
    if (!error.empty()) report_error(error);
    error = to_string(d);
  }
  if (!loaded.ok()) throw Error(loaded.code(), error);
  OpenModel open{.config = loaded.config, .options = {.resume = found.resume, .weights = found.weights}};
  const auto form = std::ranges::find(kForms, weights, &std::pair<std::string_view, Form>::first);
  open.config.weights.form = form->second;
  if (group > 0 && form->second != Form::Int8 && form->second != Form::Int4)
    throw Error(Errc::Config, fmt::format("--group {}: only --weights int8 and int4 have groups", group));
  if (group > 0) open.config.weights.group = group;
  find_codes(open.config, open.options.weights);
  open.config.data.train.clear();
  open.options.read_only = true;
  const i64 positions = loaded.config.model.max_positions;
  constexpr i64 kContext = 4096, kShare = 4;
  if (context > positions && !loaded.config.model.any_length())
    throw Error(Errc::Config, fmt::format("--context {} exceeds the {} positions of the model", context, positions));
  open.sizes = {.at_once = batch, .chunk = chunk, .cached = cached, .codes_cache = cache_dtype == "int8"};
  open.sizes.context = context > 0 ? context : std::min(positions, kContext);
  if (cached > 0 && cached < open.sizes.context)
    throw Error(Errc::Config, fmt::format("--cache {} is less than --context, {}", cached, open.sizes.context));
  // Most texts are much shorter than the context.
  if (cached == 0) open.sizes.cached = std::max(open.sizes.context, open.sizes.context * batch / kShare);
  open.options.session = open.sizes;
  // Everything that may change a bit; of parallelism, the parts into which tensor parallelism cuts sums.
  open.identity =
      fmt::format("{}; bf16 {} fp16 {} fp8 {}; tokenizer {}; tp {}; {}", found.identity, open.config.bf16.enabled,
                  open.config.fp16.enabled, open.config.fp8.enabled, tokenizer, open.config.tensor_parallel.tp_size,
                  open.config.device == DeviceKind::Cpu ? "cpu" : "cuda");
  if (open.sizes.codes_cache) open.identity += "; caches int8";
  // Stored codes change no bit.
  if (open.config.weights.asks_for_codes())
    open.identity += fmt::format("; weights {} {}", weights, open.config.weights.group);
  for (const std::string& key : set)
    if (key.starts_with("sparse_attention")) open.identity += "; " + key;
  return open;
}

}  // namespace ds::tools
