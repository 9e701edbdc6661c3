// SPDX-License-Identifier: Apache-2.0
#include "common/inference.h"

#include <algorithm>
#include <limits>
#include <span>

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

Form form_of(std::string_view name) {
  return std::ranges::find(kForms, name, &std::pair<std::string_view, Form>::first)->second;
}

// Keys of ZeRO that --stream leaves to the user; it sets the others.
constexpr std::string_view kBesideStream[] = {
    "zero_optimization.stage3_param_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_tile_size", "zero_optimization.offload_param.pin_memory"};

void check_key(const std::string& set, bool names_dtype, bool names_tokenizer, bool streams) {
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
  if (streams && is_in("zero_optimization") && std::ranges::find(kBesideStream, key) == std::end(kBesideStream))
    refuse("--stream sets the keys of ZeRO");
  if (names_dtype && (is_in("bf16") || is_in("fp16"))) refuse("--dtype says it already");
  if (std::ranges::none_of(kOfInference, is_in)) refuse("this key has no effect on inference");
}

// Throws a mistake; if it speaks, reports the others, and warnings.
ConfigResult load(const InferenceModel& found, std::span<const std::string> keys, int world_size, bool speaks) {
  ConfigResult loaded = parse_config(found.config, found.name, keys, world_size, ConfigUse::Generate);
  std::string error;
  for (const Diagnostic& d : loaded.diagnostics) {
    if (d.severity != Severity::Error) {
      if (speaks) report_new_warning(to_string(d));
      continue;
    }
    if (speaks && !error.empty()) report_error(error);
    error = to_string(d);
  }
  if (!loaded.ok()) throw Error(loaded.code(), error);
  return loaded;
}

// A draft, which is whole on each rank. Its tokenizer is its own, unless it is published without one.
DraftModel load_draft(const std::string& path, std::vector<std::string> keys, const std::string& tokenizer,
                      const std::string& weights, const SessionSizes& sizes, bool speaks) {
  const InferenceModel found = find_model(path);
  const auto has_own = [&] {
    try {
      const Config own = load(found, keys, 1, false).config;
      return own.data.tokenizer != "bytes" || !found.resume.empty() || own.published.path.empty();
    } catch (const Error&) {  // a GGUF file without one; other errors come again
      return false;
    }
  };
  if (!tokenizer.empty() && !has_own()) keys.push_back("data.tokenizer=" + quoted(tokenizer));
  DraftModel draft{.name = path,
                   .config = load(found, keys, /*world_size=*/1, speaks).config,
                   .resume = found.resume,
                   .weights = found.weights};
  if (!weights.empty()) draft.config.weights.form = form_of(weights);
  find_codes(draft.config, draft.weights);
  if (const i64 positions = draft.config.model.max_positions;
      speaks && positions < sizes.context && !draft.config.model.any_length())
    report_warning(
        fmt::format("--draft: the model has {} positions: it proposes nothing for longer texts (--context {})",
                    positions, sizes.context));
  return draft;
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
  app.add_option("--activations", activations,
                 "the other operand of products with codes: numbers of the computation, or codes of 8 bits, whose "
                 "products with codes are summed as integers (default: work, but int8 with w8a8)")
      ->check(CLI::IsMember({"work", "int8"}));
  app.add_option(
         "--stream", stream,
         "keep the weights in a file in DIR, or with \"cpu\" in host memory beside a GPU, and in memory only those "
         "of a few layers")
      ->type_name("DIR|cpu");
  app.add_option("--set", set, "set a key of ds-config(5): a.b=value; may be given again")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  constexpr i64 kMostRows = kMostAtOnce, kMostTokens = std::numeric_limits<i32>::max();
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

void Inference::add_draft(CLI::App& app) {
  constexpr i64 kMost = 64;
  app.add_option("--draft", draft, "a small model with the same tokenizer, which proposes tokens for MODEL to verify")
      ->type_name("MODEL")
      ->group("Draft");
  app.add_option("--draft-weights", draft_weights, "as --weights, for the draft")
      ->check(CLI::IsMember({"stored", "work", "int8", "int4", "w8a8"}))
      ->group("Draft");
  add_number(app, "--draft-tokens", draft_tokens, 1, kMost, "tokens that it proposes at a time (default 3)")
      ->type_name("N")
      ->group("Draft");
}

void Inference::choose_products(WeightsConfig& chosen) const {
  if (activations.empty()) return;
  const bool integers = activations == "int8";
  const auto refuse = [&](std::string_view why) {
    throw Error(Errc::Config, fmt::format("--activations {}: {}", activations, why));
  };
  if (!integers && chosen.form == Form::W8A8)
    refuse("--weights w8a8 codes them in 8 bits; --weights int8 codes the weights alone");
  if (integers && chosen.form == Form::Work)
    refuse("--weights work has no codes to multiply; --weights int8 or int4 codes the weights");
  if (integers && !chosen.any())
    refuse(
        "MODEL contains no codes, or none that products read, such as those of GPTQ in the order of activations; "
        "--weights int8 or int4 codes its weights");
  chosen.integers = integers;
}

OpenModel Inference::open(const RankInfo& ranks) const {
  if (model.empty()) throw Error(Errc::Config, "MODEL is missing: --help shows the usage");
  if (draft.empty() && draft_tokens > 0) throw Error(Errc::Config, "--draft-tokens needs --draft, the model");
  if (draft.empty() && !draft_weights.empty()) throw Error(Errc::Config, "--draft-weights needs --draft, the model");
  for (const std::string& key : set) check_key(key, !dtype.empty(), !tokenizer.empty(), !stream.empty());
  const InferenceModel found = find_model(model);
  std::vector<std::string> dtypes;
  if (!dtype.empty()) {
    dtypes.push_back(fmt::format("bf16.enabled={}", dtype == "bf16"));
    dtypes.push_back(fmt::format("fp16.enabled={}", dtype == "fp16"));
  }
  std::vector<std::string> keys = dtypes;
  if (!tokenizer.empty()) keys.push_back("data.tokenizer=" + quoted(tokenizer));
  if (!stream.empty()) {
    const std::string section = "zero_optimization.offload_param.";
    keys.push_back("zero_optimization.stage=3");
    keys.push_back(section + "buffer_count=0");
    keys.push_back(fmt::format("{}device={}", section, stream == "cpu" ? "cpu" : "nvme"));
    if (stream != "cpu") keys.push_back(section + "nvme_path=" + quoted(stream));
  }
  keys.insert(keys.end(), set.begin(), set.end());
  const ConfigResult loaded = load(found, keys, ranks.world_size, ranks.rank == 0);
  OpenModel open{.config = loaded.config, .options = {.resume = found.resume, .weights = found.weights}};
  const Form form = open.config.weights.form = form_of(weights);
  if (group > 0 && form != Form::Int8 && form != Form::Int4)
    throw Error(Errc::Config, fmt::format("--group {}: only --weights int8 and int4 have groups", group));
  if (group > 0) open.config.weights.group = group;
  // Data-parallel ranks stream parts of matrices, and tiles are parts: both have numbers, to which codes of files are
  // decoded.
  const bool in_parts =
      !stream.empty() && (ranks.world_size > open.config.ranks_per_replica() || open.config.zero.tile_size > 0);
  if (in_parts && open.config.weights.asks_for_codes())
    throw Error(Errc::Config,
                fmt::format("--weights {}: --stream has codes on one data-parallel rank alone, and without "
                            "zero_optimization.stage3_tile_size",
                            weights));
  find_codes(open.config, open.options.weights);
  choose_products(open.config.weights);
  const bool integers = open.config.weights.sums_integers();
  if (in_parts && integers)
    throw Error(Errc::Config,
                activations.empty()
                    ? "--stream has products of integers, for which MODEL is made, on one data-parallel "
                      "rank alone: --weights work decodes its matrices"
                    : "--activations int8: --stream has codes on one data-parallel rank alone, and without "
                      "zero_optimization.stage3_tile_size");
  if (in_parts) open.config.weights = {.form = Form::Work};
  open.config.data.train.clear();
  open.options.read_only = true;
  const bool sparse = loaded.config.sparse_attention.mode != SparseAttentionMode::None;
  const i64 layout = sparse ? loaded.config.data.seq_length : std::numeric_limits<i64>::max();
  const i64 positions = std::min(loaded.config.model.max_positions, layout);
  if (context > layout)
    throw Error(Errc::Config, fmt::format("--context {} exceeds the {} tokens (data.seq_length) that sparse_attention "
                                          "has a layout of",
                                          context, layout));
  if (context > positions && !loaded.config.model.any_length())
    throw Error(Errc::Config, fmt::format("--context {} exceeds the {} positions of the model", context, positions));
  open.sizes = {.at_once = batch, .chunk = chunk, .cached = cached, .codes_cache = cache_dtype == "int8"};
  open.sizes.context = context > 0 ? context : std::min(positions, kMostDefaultContext);
  if (cached > 0 && cached < open.sizes.context)
    throw Error(Errc::Config, fmt::format("--cache {} is less than --context, {}", cached, open.sizes.context));
  if (cached == 0) open.sizes.cached = default_cached(open.sizes);
  if (!draft.empty()) {
    constexpr i64 kDraftTokens = 3;
    open.sizes.draft_tokens = draft_tokens > 0 ? draft_tokens : kDraftTokens;
    open.options.draft = load_draft(draft, dtypes, tokenizer, draft_weights, open.sizes, ranks.rank == 0);
  }
  open.options.session = open.sizes;
  // Everything that may change a bit; of parallelism, the parts into which tensor parallelism cuts sums.
  open.identity =
      fmt::format("{}; bf16 {} fp16 {} fp8 {}; tokenizer {}; tp {}; {}", found.identity, open.config.bf16.enabled,
                  open.config.fp16.enabled, open.config.fp8.enabled, tokenizer, open.config.tensor_parallel.tp_size,
                  open.config.device == DeviceKind::Cuda ? "cuda" : kernels_of_cpu());
  if (open.sizes.codes_cache) open.identity += "; caches int8";
  // Other codes of files change no bit.
  if (integers) open.identity += "; integers";
  if (open.config.weights.asks_for_codes())
    open.identity += fmt::format("; weights {} {}", weights, open.config.weights.group);
  for (const std::string& key : set)
    if (key.starts_with("sparse_attention")) open.identity += "; " + key;
  return open;
}

}  // namespace ds::tools
