// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which layers go into which block of a pipeline: `parts` runs of layers, none of them empty. Cuts are parts + 1
// numbers; part k is the layers from cuts[k] to before cuts[k + 1]. With several chunks per stage there are
// stages * chunks parts, and part b is block b (schedule.h: block_of).
//
// Throws, all of these: Errc::Config if there are more parts than layers.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "ds/config.h"
#include "model/layer.h"

namespace ds::pipeline {

// As many layers for each, the first items % parts parts one more.
std::vector<i64> uniform_cuts(i64 items, int parts);

// The least possible weight of the heaviest part; among such cuts, parts are as long as they can be from the front on.
// Weights are not negative. Takes n + parts log n log(sum of weights).
std::vector<i64> balanced_cuts(std::span<const i64> weights, int parts);

// Per layer 1 if its type's name contains a match of `regex` (match_types), else 0.
// Throws Errc::Config, naming `key`, for a broken expression or one that matches no type.
std::vector<i64> match_weights(std::span<const std::string> type_names, std::string_view regex,
                               std::string_view key = "pipeline.partition");

struct LayerCost {
  std::string type;
  i64 params = 0;
};

// Of the layers of a model, with all their parameters whatever its shard; tied ones count for each use.
std::vector<LayerCost> layer_costs(const model::Model& model);

// What "pipeline.partition" says: "uniform", "parameters" (balanced number of parameters) or "type:REGEX" (balanced
// number of layers whose type matches). Throws Errc::Config for anything else, naming `key`.
std::vector<i64> partition(std::string_view method, std::span<const LayerCost> layers, int parts,
                           std::string_view key = "pipeline.partition");

// The cuts that a configuration asks for, the same on every rank: those of partition(), or with "memory" those that
// balance what parameters with their gradients and Adam's states, and a micro-batch's activations, take.
std::vector<i64> cuts_of(const Config& config, const model::Model& model);

}  // namespace ds::pipeline
