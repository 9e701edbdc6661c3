// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sharding: without a model, by names and shapes of parameters only; with one, over any mesh.

#include <vector>

#include "checkpoint/state_source.h"
#include "ds/checkpoint.h"
#include "ds/layer.h"
#include "ds/model_config.h"
#include "zero/layout.h"

namespace ds {

// The untied parameters as units of a layout: consecutive parameters of one numbered block ("h.0.") are a unit, and so
// are those before, between and after the blocks. For supported models these are the layers.
std::vector<std::vector<model::ParamRow>> units_of(const std::vector<ParamEntry>& params);

// The pieces of each rank.
struct Sharding {
  std::string layout_id;
  int zero_stage = 0;
  MeshShape mesh;
  std::vector<std::vector<PieceRange>>
      ranks;  // by rank; together they cover all elements like save_checkpoint's pieces
};
// Cuts whole parameters like a layout of data-parallel ranks.
Sharding shard_whole(const std::vector<ParamEntry>& params, const zero::LayoutOptions& options);

// The model of `state`, by its config.json or the one `named`. Throws like model_config_of, and Errc::Unavailable if
// the model is not supported.
ModelConfig model_to_cut(const StateSource& state, const std::string& named);
// Cuts the parameters of that model like a run on this mesh (zero/ownership); `partition`: as "pipeline.partition".
// Throws Errc::Config if a degree does not fit the model, naming ds-shard's option, and Errc::Mismatch if the
// parameters are not the model's.
Sharding shard_model(StateSource& state, const ModelConfig& config, const MeshShape& mesh, std::string_view partition,
                     const zero::LayoutOptions& options);

// Writes `state` to the run directory `dir` as those ranks would, and commits it. Fills in `m`. After an error `dir`
// contains a part of it. Throws like StateSource::read; Errc::Io, Errc::Internal (ranks that do not cover all
// elements).
void write_sharded(StateSource& state, const std::string& dir, Manifest& m, const Sharding& sharding,
                   const CopyProgress& progress);

}  // namespace ds
