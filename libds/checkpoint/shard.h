// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sharding: without a model, units and ownership from the names and shapes of parameters alone; with one, over any
// mesh.

#include <vector>

#include "checkpoint/state_source.h"
#include "ds/checkpoint.h"
#include "ds/model_config.h"
#include "model/layer.h"
#include "zero/layout.h"

namespace ds {

// The untied parameters as units of a layout: neighbours of one numbered block ("h.0.") together, and so what stands
// before, between and behind the blocks. For the models of our zoo these are its layers.
std::vector<std::vector<model::ParamRow>> units_of(const std::vector<ParamEntry>& params);

// Who gets what.
struct Sharding {
  std::string layout_id;
  int zero_stage = 0;
  MeshShape mesh;
  std::vector<std::vector<PieceRange>> ranks;  // by rank; together they cover as save_checkpoint's pieces do
};
// Whole parameters cut as a layout of data-parallel ranks cuts them.
Sharding shard_whole(const std::vector<ParamEntry>& params, const zero::LayoutOptions& options);

// The model of `state`, by its config.json or the one that is `named`. Throws as model_config_of, and Errc::Unavailable
// where it is not one of the zoo.
ModelConfig model_to_cut(const StateSource& state, const std::string& named);
// The parameters of that model cut as a run of it on this mesh cuts them (zero/ownership); `partition`: as
// "pipeline.partition". Throws Errc::Config where a degree does not fit the model, naming ds-shard's option, and
// Errc::Mismatch where the parameters are not the model's.
Sharding shard_model(StateSource& state, const ModelConfig& config, const MeshShape& mesh, std::string_view partition,
                     const zero::LayoutOptions& options);

// Writes `state` into the run directory `dir` as those ranks would, and commits it. Fills in `m`. After an error `dir`
// holds part of it. Throws as StateSource::read; Errc::Io, Errc::Internal (ranks that do not cover).
void write_sharded(StateSource& state, const std::string& dir, Manifest& m, const Sharding& sharding,
                   const CopyProgress& progress);

}  // namespace ds
