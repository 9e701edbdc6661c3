// SPDX-License-Identifier: Apache-2.0
// The source of a configuration: a file of it, a model, a checkpoint.

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "base/content_kind.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/manifest.h"
#include "config/model_config.h"
#include "ds/checkpoint.h"
#include "ds/memreport.h"
#include "memreport/metrics_file.h"
#include "monitor/monitor.h"

namespace ds::memreport {
namespace fs = std::filesystem;
namespace {

constexpr i64 kMaxConfig = i64{16} << 20, kMaxManifest = i64{1} << 30;

struct Text {
  std::string text, name;
  int ranks = 0;  // that it is of; 0: not told
};

// The keys that a model alone does not give.
Text of_model(const Json& model, std::string name) {
  const Json config = {{"model", model}, {"bf16", {{"enabled", true}}}, {"train_micro_batch_size_per_gpu", 1}};
  return {config.dump(), std::move(name)};
}
Text of_model_file(const std::string& path) { return of_model({{"path", path}}, path); }

Text of_checkpoint(const std::string& dir, const ProgramParts& parts) {
  DS_CHECK(!is_deepspeed(dir), Errc::Unavailable,
           "{}: a DeepSpeed checkpoint does not say which model it is of: give its config.json, with the ranks and the "
           "ZeRO stage",
           dir);
  std::string step;
  try {
    step = find_checkpoint(dir);
  } catch (const Error& e) {
    if (e.code() != Errc::Io) throw;
    throw Error(Errc::Io, fmt::format("{}, nor a config.json of a model", e.what()));
  }
  const std::string path = fmt::format("{}/{}", step, kManifestName);
  const CheckpointMeta meta = parse_manifest(read_text_file(path, kMaxManifest), path).meta;
  const std::string program = meta.model_config_json.empty() ? "" : program_model(Json::parse(meta.model_config_json));
  DS_CHECK(program.empty() || (parts.model && type_name(*parts.model) == program), Errc::Unavailable,
           "{}: the model \"{}\" is built by the program that trained it, and only that program can predict it", step,
           program);
  if (!meta.config_json.empty()) return {meta.config_json, path, narrow<int>(meta.world_size)};
  DS_CHECK(!meta.model_config_json.empty(), Errc::Unavailable, "{} does not say which model it is of", step);
  std::string why;
  const std::optional<ModelConfig> model = known_model(Json::parse(meta.model_config_json), why);
  DS_CHECK(model.has_value(), Errc::Unavailable, "{}: {}", step, why);
  return of_model(model_json(*model), path);
}

bool is_model(const Json& json) {
  return json.is_object() && !json.contains("model") &&
         (json.contains("model_type") || json.contains("hidden_size") || json.contains("n_embd"));
}

Text text_of(const std::string& path, const ProgramParts& parts) {
  if (path == "-") {
    try {
      return {read_standard_input(kMaxConfig), "standard input"};
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("standard input {}", e.what()));
    }
  }
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    return fs::exists(path + "/config.json", ignored) ? of_model_file(path) : of_checkpoint(path, parts);
  }
  const std::string kind = kind_of_content(File::open_read(path));
  DS_CHECK(kind.empty(), Errc::Config,
           "{}: is {}: give a configuration, the directory or the config.json of a model, a run or a step of one, or a "
           "metrics.jsonl",
           path, kind);
  Text t{read_text_file(path, kMaxConfig, Errc::Config), path};
  try {
    if (is_model(parse_json(t.text, path, {.places = false}).root)) return of_model_file(path);
  } catch (const JsonError&) {  // which the reader of configurations tells as one of its own
  }
  return t;
}

}  // namespace

void take_expert_loads(Source& source, const std::string& metrics) {
  const ExpertsConfig& x = source.config.config.model.experts;
  DS_CHECK(x.count > 0, Errc::Config, "{}: the model has no experts", source.name);
  const MetricsFile file = read_metrics(metrics);
  DS_CHECK(!file.expert_loads.empty(), Errc::Config, "{}: no step has {}", file.path, step_field::kExpertTokens);
  std::vector<std::vector<i64>> loads(x.layers.size());
  auto next = file.expert_loads.begin();
  const i64 sparse = std::ranges::count(x.layers, true);
  DS_CHECK(std::ssize(file.expert_loads) == sparse, Errc::Config,
           "{}: counts of experts in {} layers, and the model has {}", file.path, file.expert_loads.size(), sparse);
  for (size_t l = 0; l < loads.size(); ++l) {
    if (!x.layers[l]) continue;
    const i64 count = x.count_of(narrow<i64>(l));
    DS_CHECK(std::ssize(next->tokens) == count, Errc::Config, "{}: {} has {} experts, and the model has {}", file.path,
             next->layer, next->tokens.size(), count);
    loads[l] = (next++)->tokens;
  }
  source.expert_loads = loads;
  source.config.config.model.experts.loads = std::move(loads);
}

Source open_source(const std::string& path, std::span<const std::string> overrides, int ranks,
                   const ProgramParts& parts) {
  const Text t = text_of(path, parts);
  Source source;
  source.ranks = ranks > 0 ? ranks : std::max(t.ranks, 1);
  source.text = t.text;
  source.name = t.name;
  source.overrides.assign(overrides.begin(), overrides.end());
  source.config = parse_config(t.text, t.name, overrides, source.ranks, ConfigUse::Inspect, parts);
  source.parts = parts;
  // Beside what else is wrong, unless that is said of it already, or nothing could be read.
  const bool said = std::ranges::any_of(source.config.diagnostics, [](const Diagnostic& d) {
    return d.severity == Severity::Error && (d.key.empty() || d.key.starts_with("model"));
  });
  if (!said && source.config.config.model.layers == 0)
    source.config.diagnostics.push_back(
        {.source = t.name, .key = "model", .message = "is missing: {\"path\": ...}, or {\"type\": ...} with sizes"});
  return source;
}

}  // namespace ds::memreport
