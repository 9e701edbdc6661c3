// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sharding without a model: units and ownership from the names and shapes of parameters alone.

#include <vector>

#include "checkpoint/state_source.h"
#include "ds/checkpoint.h"
#include "model/layer.h"
#include "zero/layout.h"

namespace ds {

// The untied parameters as units of a layout: neighbours of one numbered block ("h.0.") together, and so what stands
// before, between and behind the blocks. For the models of our zoo these are its layers.
std::vector<std::vector<model::ParamRow>> units_of(const std::vector<ParamEntry>& params);

// Writes `state` into the run directory `dir` as the ranks of a layout would, and commits it. Fills in `m`. After an
// error `dir` holds part of it. Throws as StateSource::read, and Errc::Io.
void write_sharded(StateSource& state, const std::string& dir, Manifest& m, const zero::LayoutOptions& options,
                   const CopyProgress& progress);

}  // namespace ds
