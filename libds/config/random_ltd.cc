// SPDX-License-Identifier: Apache-2.0
#include "config/random_ltd.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ds {
namespace {

namespace ltd_key {
#define DS_RANDOM_LTD "data_efficiency.data_routing.random_ltd."
constexpr std::string_view kEnabled = DS_RANDOM_LTD "enabled", kTotal = DS_RANDOM_LTD "total_layer_num",
                           kNumber = DS_RANDOM_LTD "random_ltd_layer_num",
                           kLayers = DS_RANDOM_LTD "random_ltd_layer_id",
                           kMin = DS_RANDOM_LTD "random_ltd_schedule.min_value",
                           kMax = DS_RANDOM_LTD "random_ltd_schedule.max_value",
                           kSteps = DS_RANDOM_LTD "random_ltd_schedule.schedule_config.require_steps",
                           kPerStep = DS_RANDOM_LTD "random_ltd_schedule.schedule_config.seq_per_step";
#undef DS_RANDOM_LTD
}  // namespace ltd_key

void resolve_layers(Config& config, Reader& r) {
  RandomLtdConfig& c = config.random_ltd;
  if (r.any_broken({ltd_key::kTotal, ltd_key::kNumber, ltd_key::kLayers})) return;
  const i64 blocks = config.model.layers;
  if (r.given(ltd_key::kTotal) && c.total_layer_num != blocks)
    r.error(ltd_key::kTotal, fmt::format("is {}, and the model has {} layers", c.total_layer_num, blocks));
  if (!r.given(ltd_key::kLayers)) {
    c.layers.resize(static_cast<size_t>(std::max<i64>(blocks - 2, 0)));
    std::iota(c.layers.begin(), c.layers.end(), 1);
  }
  std::ranges::sort(c.layers);
  const bool twice = std::ranges::adjacent_find(c.layers) != c.layers.end();
  if (c.layers.empty() || twice || c.layers.back() >= blocks) {
    r.error(ltd_key::kLayers, twice ? "names a layer twice"
                              : c.layers.empty()
                                  ? fmt::format("names no layer; the model has {}", blocks)
                                  : fmt::format("names layer {}; the model has {}, from 0", c.layers.back(), blocks));
    return;
  }
  if (r.given(ltd_key::kNumber) && c.random_ltd_layer_num != std::ssize(c.layers))
    r.error(ltd_key::kNumber,
            fmt::format("is {}, and there are {} layers that drop tokens", c.random_ltd_layer_num, c.layers.size()));
  for (const i64 layer : c.layers) {
    const i64 window = config.model.window(layer);
    if (window <= 0 || window >= config.data.seq_length) continue;
    return r.error(
        ltd_key::kLayers,
        fmt::format("layer {} has a sliding window of {} tokens, which is of all tokens, not of some", layer, window),
        Errc::Unavailable);
  }
}

void check_schedule(const RandomLtdConfig& c, i64 seq_length, Reader& r) {
  const auto demand = [&](std::string_view key, std::string_view what) {
    if (!r.given(key) && !r.broken(key)) r.error(key, fmt::format("is missing: {}", what));
  };
  demand(ltd_key::kMin, "tokens that layers see at first");
  demand(ltd_key::kMax, "tokens that they see at last");
  demand(ltd_key::kSteps, "steps until they see as many as at last");
  demand(ltd_key::kPerStep, "numbers of tokens are multiples of it");
  if (r.any_broken({ltd_key::kMin, ltd_key::kMax, ltd_key::kSteps, ltd_key::kPerStep})) return;
  if (c.min_value > c.max_value)
    r.error(ltd_key::kMin, fmt::format("{} is above {}, {}", c.min_value, ltd_key::kMax, c.max_value));
  else if (c.min_value < c.seq_per_step)
    r.error(ltd_key::kMin, fmt::format("{} is below {}, {}, of which numbers of tokens are multiples", c.min_value,
                                       ltd_key::kPerStep, c.seq_per_step));
  else if (c.max_value > seq_length && !r.broken("data.seq_length"))
    r.warning(ltd_key::kMax, fmt::format("{} is beyond data.seq_length {}: layers see all tokens from there on",
                                         c.max_value, seq_length));
}

}  // namespace

i64 random_ltd_kept(const RandomLtdConfig& c, i64 step) {
  if (c.require_steps == 0) return kMostCount;
  const double min = static_cast<double>(c.min_value), max = static_cast<double>(c.max_value);
  const double share = static_cast<double>(step - 1) / static_cast<double>(c.require_steps);
  const i64 tokens = static_cast<i64>(std::min(std::floor(share * (max - min) + min), 0x1p40));
  return std::min(tokens - tokens % c.seq_per_step, c.max_value);
}

void resolve_random_ltd(Config& config, Reader& r) {
  RandomLtdConfig& c = config.random_ltd;
  if (!c.on() || !trains(config.use)) return;
  check_schedule(c, config.data.seq_length, r);
  if (config.model.layers > 0) resolve_layers(config, r);
  const auto refuse = [&](std::string_view why) { r.error(ltd_key::kEnabled, std::string(why), Errc::Unavailable); };
  if (config.sparse_attention.mode != SparseAttentionMode::None)
    refuse("a layout of sparse attention is of whole sequences");
  if (config.sequence_parallel.size > 1) refuse("ranks of sequence_parallel_size share the tokens of a sequence");
  if (config.tensor_parallel.sequence_parallel && config.tensor_parallel.tp_size > 1)
    refuse("ranks of tensor_parallel.sequence_parallel share the rows of the residual stream");
}

}  // namespace ds
