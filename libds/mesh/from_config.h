// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mesh that a configuration asks for.

#include <vector>

#include "ds/config.h"
#include "ds/mesh.h"

namespace ds {

// The sizes of the axes. dp is what the others leave of world_size, which they must divide: the reader of
// configurations has checked it.
MeshShape mesh_shape(const Config& config, int world_size);

// The splits of dp that ZeRO++ needs: "near", of ranks side by side, where parameters have second shards, and "across",
// of the ranks with the same number in each "near", where gradients travel as codes too. A run that does not train has
// none.
std::vector<DpSplit> zeropp_splits(const Config& config);

// All splits of dp: the model's, then those of ZeRO++.
std::vector<DpSplit> mesh_splits(const Config& config, std::vector<DpSplit> of_model);

}  // namespace ds
