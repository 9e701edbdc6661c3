// SPDX-License-Identifier: Apache-2.0
// The configuration by which a model is run for inference, from what the user has: a directory, a run, a file.

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/gguf.h"
#include "base/json.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "ds/checkpoint.h"
#include "ds/infer.h"
#include "ds/kernels/ops.h"
#include "model/models.h"
#include "run/weights.h"

namespace ds {
namespace {

namespace fs = std::filesystem;

// The keys of a run's configuration that decide what its model computes. The others are about training, and about ranks
// that need not be there.
constexpr std::string_view kOfRuns[] = {"model", "bf16", "fp16", "fp8", "sparse_attention"};

// The files of a model, by name and size, and the text of those that are small.
std::string identity_of(const std::string& path) {
  constexpr u64 kSmall = u64{1} << 22;
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  } else {
    files.emplace_back(path);
  }
  std::ranges::sort(files);
  std::string identity;
  for (const fs::path& file : files) {
    if (!fs::is_regular_file(file)) continue;
    const u64 size = fs::file_size(file);
    identity += fmt::format("{} {}", file.filename().string(), size);
    if (size <= kSmall) identity += " " + text_digest(read_text_file(file.string(), kSmall));
    identity += "; ";
  }
  return identity;
}

InferenceModel of_run(const std::string& path) {
  const std::string step = find_checkpoint(path);
  const std::string name = (fs::path(step) / std::string(kManifestName)).string();
  const Json run = parse_json(CheckpointReader(step).meta().config_json, name, {.error = Errc::Corrupt}).root;
  Json config = Json::object();
  for (const std::string_view key : kOfRuns) {
    if (run.contains(key)) config[std::string(key)] = run[key];
  }
  for (const char* key : {"tokenizer", "seq_length"}) {
    if (run.contains("data") && run["data"].contains(key)) config["data"][key] = run["data"][key];
  }
  return {.config = config.dump(), .name = name, .resume = step, .identity = identity_of(step)};
}

// A model directory or its config.json. Its numbers are computed in the dtype in which they are published, fp32 if that
// is not said.
InferenceModel of_published(const std::string& folder, const std::string& weights) {
  const std::string name = (fs::path(folder) / "config.json").string();
  const Json published = parse_json(read_text_file(name, i64{16} << 20), name, {.error = Errc::Config}).root;
  Json config = {{"model", {{"path", folder}}}};
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto dtype = published.is_object() ? published.find(key) : published.end();
    if (dtype == published.end() || !dtype->is_string()) continue;
    const std::string text = dtype->get<std::string>();
    if (text == "bfloat16") config["bf16"]["enabled"] = true;
    if (text == "float16") config["fp16"]["enabled"] = true;
    break;
  }
  return {.config = config.dump(),
          .name = name,
          .weights = weights,
          .identity = identity_of(weights.empty() ? folder : weights)};
}

}  // namespace

std::string text_digest(std::string_view text) { return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())); }

InferenceModel find_model(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  DS_CHECK(fs::exists(status), Errc::Config, "{}: {}", path, error ? error.message() : "no such file or directory");
  if (fs::is_directory(status)) {
    if (is_checkpoint(path)) return of_run(path);
    DS_CHECK(fs::exists(fs::path(path) / "config.json"), Errc::Config,
             "{}: neither a run or a step of ds-train nor a model directory, which has a config.json", path);
    DS_CHECK(!run::published_weights(path).empty(), Errc::Config, "{}: contains a config.json but no weights", path);
    return of_published(path, "");
  }
  if (is_gguf(path)) {
    const Json config = {{"model", {{"path", path}}}, {"bf16", {{"enabled", true}}}};
    return {.config = config.dump(), .name = path, .identity = identity_of(path)};
  }
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  DS_CHECK(fs::exists(folder / "config.json"), Errc::Config,
           "{}: weights without a config.json beside them, which describes their model; ds-ckpt-merge --format hf "
           "writes both",
           path);
  return of_published(folder.string(), path);
}

std::string kernels_of_cpu() {
  const OpTable* const ops = cpu_ops();
  return std::string(ops != nullptr ? ops->name : "cpu");
}

void find_codes(Config& config, const std::string& weights) {
  if (trains(config.use) || config.weights.form != WeightsConfig::Form::Stored) return;
  const std::string path = weights.empty() ? run::published_weights(config.published.path) : weights;
  if (path.empty() || is_checkpoint(path)) return;
  config.weights.stored = run::codes_of_weights(model::make_model(config), path);
}

}  // namespace ds
