// SPDX-License-Identifier: Apache-2.0
#include "pipeline/partition.h"

#include <algorithm>
#include <optional>
#include <set>

#include "config/parallel.h"
#include "pipeline/layer_calls.h"

namespace ds::pipeline {
namespace {

void check_parts(i64 items, int parts) {
  DS_ASSERT(items >= 0 && parts >= 1);
  DS_CHECK(parts <= items, Errc::Config,
           "{} layers cannot be cut into {} parts, for each needs one: pipeline.stages (times pipeline.virtual_stages) "
           "must be at most {}",
           items, parts, items);
}

// Cuts in which each part takes as many items as fit within `most` while leaving one for each later part; empty if
// items remain. before[i] is the sum of the weights before item i; no single weight exceeds `most`.
std::optional<std::vector<i64>> cuts_within(std::span<const i64> before, int parts, i64 most) {
  const i64 items = narrow<i64>(before.size()) - 1;
  std::vector<i64> cuts = {0};
  for (i64 to_come = parts - 1; to_come >= 0; --to_come) {
    const auto end = std::upper_bound(before.begin(), before.end(), before[cuts.back()] + most);
    cuts.push_back(std::min<i64>(end - before.begin() - 1, items - to_come));
  }
  if (cuts.back() < items) return std::nullopt;
  return cuts;
}

// By layer: the multiplications of a token's forward pass, with whole matrices, and attention to half of the tokens, or
// to all that a window shows. An embedding multiplies nothing.
std::vector<i64> multiplied_of(const model::Model& model, i64 tokens) {
  std::vector<i64> multiplied = {0};
  for (i64 l = 1; l < std::ssize(model.layers); ++l) {
    const model::Layer& layer = *model.layers[l];
    i64 n = 0;
    for (const model::ParamRow& row : layer.rows()) n += row.matrices().count > 0 ? row.whole_numel() : 0;
    if (l + 1 == std::ssize(model.layers)) {
      for (const model::ParamRow& row : model.shared) n += row.whole_numel();
    } else if (layer.is_block()) {
      const i64 window = layer.cache().window, seen = model.causal ? div_ceil(tokens, 2) : tokens;
      n += (window > 0 ? std::min(window, seen) : seen) * model.num_heads * (model.head_dim + model.value_dim);
    }
    multiplied.push_back(n);
  }
  return multiplied;
}

}  // namespace

std::vector<i64> uniform_cuts(i64 items, int parts) {
  check_parts(items, parts);
  std::vector<i64> cuts;
  for (i64 k = 0; k <= parts; ++k) cuts.push_back(items / parts * k + std::min(items % parts, k));
  return cuts;
}

std::vector<i64> balanced_cuts(std::span<const i64> weights, int parts) {
  check_parts(narrow<i64>(weights.size()), parts);
  DS_ASSERT(*std::min_element(weights.begin(), weights.end()) >= 0);
  std::vector<i64> before = {0};
  for (const i64 weight : weights) before.push_back(before.back() + weight);
  i64 low = *std::max_element(weights.begin(), weights.end()), high = before.back();
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (cuts_within(before, parts, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return cuts_within(before, parts, low).value();
}

std::vector<i64> match_weights(std::span<const std::string> type_names, std::string_view regex, std::string_view key) {
  const std::set<std::string_view> distinct(type_names.begin(), type_names.end());
  const std::vector<std::string_view> types(distinct.begin(), distinct.end());
  const TypeMatch match = match_types(regex, types);
  DS_CHECK(match.problem.empty(), Errc::Config, "{}: {}", key, match.problem);
  std::vector<i64> weights;
  for (const std::string& name : type_names)
    weights.push_back(match.matches[std::ranges::lower_bound(types, name) - types.begin()] ? 1 : 0);
  return weights;
}

std::vector<LayerCost> layer_costs(const model::Model& model) {
  std::vector<LayerCost> costs;
  for (const auto& layer : model.layers) {
    i64 params = 0;
    for (const model::ParamRow& row : layer->rows()) params += row.whole_numel();
    const bool end = layer == model.layers.front() || layer == model.layers.back();
    for (const model::ParamRow& row : model.shared) params += end ? row.whole_numel() : 0;
    costs.push_back({std::string(layer->type()), params});
  }
  return costs;
}

std::vector<i64> partition(std::string_view method, std::span<const LayerCost> layers, int parts,
                           std::string_view key) {
  constexpr std::string_view kType = "type:";
  if (method == "uniform") return uniform_cuts(narrow<i64>(layers.size()), parts);
  if (method == "parameters") {
    std::vector<i64> weights;
    for (const LayerCost& layer : layers) weights.push_back(layer.params);
    return balanced_cuts(weights, parts);
  }
  DS_CHECK(method.starts_with(kType), Errc::Config,
           "{}: \"{}\" is none of \"uniform\", \"parameters\" and \"type:REGEX\"", key, method);
  std::vector<std::string> types;
  for (const LayerCost& layer : layers) types.push_back(layer.type);
  return balanced_cuts(match_weights(types, method.substr(kType.size()), key), parts);
}

std::vector<i64> cuts_of(const Config& config, const model::Model& model) {
  const PipelineConfig& p = config.pipeline;
  const int parts = narrow<int>(p.stages * p.virtual_stages);
  if (parts == 1) return {0, std::ssize(model.layers)};
  const Checkpointing checkpointing = checkpointing_of(config);
  const std::vector<LayerCost> layers = layer_costs(model);
  if (p.partition == "compute") return balanced_cuts(multiplied_of(model, config.data.seq_length), parts);
  std::vector<i64> bytes;
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto& layer = model.layers[l];
    // Weights, gradients and Adam's states, and the activations of a micro-batch.
    model::ActivationPlanner planner;
    planner.begin_layer(layer->is_block() ? checkpointing.keep : model::Keep::All, false);
    layer->plan(planner,
                {.work = config.work_dtype(), .B = config.batch.micro, .T = config.data.seq_length / model.shard.sp});
    bytes.push_back(layers[l].params * (2 * dtype_bytes(config.work_dtype()) + 12) / model.shard.tp +
                    planner.kept_bytes());
  }
  return p.partition == "memory" ? balanced_cuts(bytes, parts) : partition(p.partition, layers, parts);
}

}  // namespace ds::pipeline
