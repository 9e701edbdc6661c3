// SPDX-License-Identifier: Apache-2.0
#pragma once
// Turns the instructions of a schedule into calls of a chunk's layers: which layers run, are recomputed and
// differentiated, in which order. The engine executes these lists; the plans of gathers and memory read them.

#include <vector>

#include "ds/config.h"
#include "ds/layer.h"

namespace ds::pipeline {

struct LayerCall {
  enum class Kind : u8 { Forward, BackwardInput, BackwardWeight };
  Kind kind;
  i64 layer;
  bool again = false;  // BackwardInput: first recomputes what the layer has not kept
  // For runs that keep inputs of recomputed layers elsewhere. stash: the call's output is such an input, and is moved
  // there afterwards; restore: the layer's input is one, and is fetched before the call.
  bool stash = false, restore = false;
  friend bool operator==(const LayerCall&, const LayerCall&) = default;
};

// How much each layer keeps, and which layers are recomputed together: a group keeps the input of its first layer.
struct Checkpointing {
  model::Keep keep = model::Keep::All;  // by blocks
  i64 interval = 1;                     // Keep::Input: layers per group
};
Checkpointing checkpointing_of(const Config& config);

// Layers [begin, end) of the model, run by one instruction.
struct Chunk {
  i64 begin = 0, end = 0;
  std::vector<model::Keep> keep = {};  // by layer
  std::vector<bool> continues = {};    // by layer: it belongs to the group of the previous layer
  bool has_backward() const noexcept { return !keep.empty() && keep.back() != model::Keep::Nothing; }
  model::Keep keep_of(i64 layer) const noexcept { return keep[layer - begin]; }
  bool continues_group(i64 layer) const noexcept { return layer < end && continues[layer - begin]; }
  // Whether a layer and the rest of its group are computed again from the layer's input, the output of another layer of
  // the chunk.
  bool restarts_at(i64 layer) const noexcept {
    return layer > begin && layer < end && keep_of(layer) == model::Keep::Input && !continues_group(layer);
  }
};
Chunk make_chunk(const model::Model& model, i64 begin, i64 end, const Checkpointing& checkpointing);

std::vector<LayerCall> forward_calls(const Chunk& chunk);
// The calls of Op::Backward, or of Op::BackwardInput if `split`. Layers before Model::backward_end() have none, and
// layers without trained rows have no weight gradients.
std::vector<LayerCall> backward_calls(const model::Model& model, const Chunk& chunk, bool split);
// The parts of a layer that a call runs, in order.
std::vector<model::Products> products_of(const Chunk& chunk, const LayerCall& call);
// The calls of Op::BackwardWeight.
std::vector<LayerCall> weight_calls(const model::Model& model, const Chunk& chunk);

}  // namespace ds::pipeline
