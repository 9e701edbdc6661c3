// SPDX-License-Identifier: Apache-2.0
#pragma once
// Assigns layers to the blocks of a pipeline: `parts` runs of layers, none of them empty. The cuts are parts + 1
// numbers; part k contains the layers from cuts[k] up to cuts[k + 1]. With several chunks per stage there are stages *
// chunks parts, and part b is block b (schedule.h: Placement).
//
// All functions throw Errc::Config if there are more parts than layers.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "ds/config.h"
#include "ds/layer.h"

namespace ds::pipeline {

// Equal numbers of layers; the first items % parts parts have one more.
std::vector<i64> uniform_cuts(i64 items, int parts);

// Cuts with the least possible weight of the heaviest part; among those, each part from the front on is as long as
// possible. Weights must not be negative. Takes n + parts log n log(sum of weights) operations.
std::vector<i64> balanced_cuts(std::span<const i64> weights, int parts);

// For each layer 1 if its type name contains a match of `regex`, else 0. Throws Errc::Config, naming `key`, for an
// invalid expression or one that matches no type.
std::vector<i64> match_weights(std::span<const std::string> type_names, std::string_view regex,
                               std::string_view key = "pipeline.partition");

struct LayerCost {
  std::string type;
  i64 params = 0;
};

// The costs of a model's layers, with all their parameters regardless of sharding; tied parameters count for each use.
std::vector<LayerCost> layer_costs(const model::Model& model);

// Cuts by the value of "pipeline.partition": "uniform", "parameters" (balanced parameters) or "type:REGEX" (balanced
// number of layers whose type matches). Throws Errc::Config for other values, naming `key`.
std::vector<i64> partition(std::string_view method, std::span<const LayerCost> layers, int parts,
                           std::string_view key = "pipeline.partition");

// The cuts that a configuration asks for, the same on every rank: those of partition(), or with "memory" those that
// balance what parameters with their gradients and Adam's states, and a micro-batch's activations, take; with "compute"
// those that balance the operations of matrix products and attention.
std::vector<i64> cuts_of(const Config& config, const model::Model& model);

}  // namespace ds::pipeline
