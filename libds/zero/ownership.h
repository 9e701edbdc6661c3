// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ownership over a mesh: which rank saves which elements of a model. A pure function of the model, the mesh, the layers
// of each pipeline stage and the ZeRO stage, for runs and for ds-shard.
//
//   tp        cuts parameters into slices (model::ParamRow); if ranks hold copies, the first one saves them
//   pp        assigns layers to stages; a matrix that both ends share is saved by the stage with the first layer
//   dp x sp   ranks with the same parameters, over which ZeRO cuts them (zero::Layout)

#include <span>
#include <vector>

#include "ds/layer.h"
#include "mesh/mesh.h"
#include "zero/layout.h"

namespace ds::zero {

// Units of a model: Model::shared, then layer by layer.
inline constexpr i64 kSharedUnit = 0;
constexpr i64 unit_of(i64 layer) noexcept { return layer + 1; }
using Units = std::vector<std::span<const model::ParamRow>>;
Units units_of(const model::Model& model);

// Options for the layout of balancing biases (model::ParamRow::balances), given those of dp: they are not cut.
LayoutOptions balance_options(LayoutOptions options, const model::Model& model);
bool has_balances(const model::Model& model) noexcept;

// Layers [begin, end). A pipeline stage may have several such ranges.
struct LayerRange {
  i64 begin = 0, end = 0;
};
// By unit: whether a stage with these layers has it (LayoutOptions::here).
std::vector<bool> units_here(const model::Model& model, std::span<const LayerRange> layers);

// The number of ranks over which ZeRO cuts parameters, and a rank's number among them, as in Mesh::dp().
constexpr int num_shards(const MeshShape& mesh) noexcept { return mesh.dp * mesh.sp; }
constexpr int shard_rank(const MeshShape& mesh, const MeshCoord& coord) noexcept {
  return coord.dp * mesh.sp + coord.sp;
}

// Whether the owner of a piece of parameter number `param` saves it and counts its gradient: no lower rank holds the
// same. row: the parameter's row in the owner's model; has_first_layer: whether the owner's stage has the first layer.
bool is_saved(const model::Model& model, const model::ParamRow& row, i64 param, bool has_first_layer) noexcept;

// By rank of the mesh: the pieces that it saves, in the order of parameters. Every element of every parameter is in one
// of them. shards: the model of each rank of tp, in order; cuts: the first layer of each stage, then the number of
// layers; options: its num_ranks and `here` are filled in.
std::vector<std::vector<Piece>> saved_pieces(std::span<const model::Model> shards, const MeshShape& mesh,
                                             std::span<const i64> cuts, LayoutOptions options);

}  // namespace ds::zero
