// SPDX-License-Identifier: Apache-2.0
#include "pipeline/layer_calls.h"

#include <algorithm>

namespace ds::pipeline {

using Kind = LayerCall::Kind;
using model::Keep;

Checkpointing checkpointing_of(const Config& config) {
  const ActivationCheckpointingConfig& c = config.activation_checkpointing;
  switch (c.granularity) {
    case CheckpointGranularity::None: return {};
    case CheckpointGranularity::Layer: return {Keep::Input, c.interval};
    case CheckpointGranularity::Selective: return {Keep::AllButAttention};
  }
  return {};
}

Chunk make_chunk(const model::Model& model, i64 begin, i64 end, const Checkpointing& checkpointing) {
  Chunk chunk{.begin = begin, .end = end};
  i64 grouped = 0;  // layers in the group so far
  for (i64 l = begin; l < end; ++l) {
    chunk.keep.push_back(l < model.backward_end()      ? Keep::Nothing
                         : model.layers[l]->is_block() ? checkpointing.keep
                                                       : Keep::All);
    const bool joins = chunk.keep.back() == Keep::Input && grouped > 0 && grouped < checkpointing.interval;
    chunk.continues.push_back(joins);
    grouped = chunk.keep.back() != Keep::Input ? 0 : joins ? grouped + 1 : 1;
  }
  return chunk;
}

std::vector<LayerCall> forward_calls(const Chunk& chunk) {
  std::vector<LayerCall> calls;
  for (i64 l = chunk.begin; l < chunk.end; ++l)
    calls.push_back({.kind = Kind::Forward, .layer = l, .stash = chunk.restarts_at(l + 1)});
  return calls;
}

std::vector<LayerCall> backward_calls(const model::Model& model, const Chunk& chunk, bool split) {
  std::vector<LayerCall> calls;
  for (i64 l = chunk.end; l-- > std::max(chunk.begin, model.backward_end());) {
    bool again = chunk.keep_of(l) != Keep::All;
    if (chunk.keep_of(l) == Keep::Input) {
      again = !chunk.continues_group(l + 1);  // the others were recomputed on the way to the last layer of the group
      i64 first = l;
      while (again && chunk.continues_group(first)) --first;
      for (; first < l; ++first)
        calls.push_back({.kind = Kind::Forward, .layer = first, .restore = chunk.restarts_at(first)});
    }
    calls.push_back(
        {.kind = Kind::BackwardInput, .layer = l, .again = again, .restore = again && chunk.restarts_at(l)});
    if (model.trains(l) && (!split || !model.layers[l]->splits())) calls.push_back({Kind::BackwardWeight, l});
  }
  return calls;
}

std::vector<LayerCall> weight_calls(const model::Model& model, const Chunk& chunk) {
  std::vector<LayerCall> calls;
  for (i64 l = chunk.end; l-- > chunk.begin;) {
    if (model.trains(l) && model.layers[l]->splits()) calls.push_back({Kind::BackwardWeight, l});
  }
  return calls;
}

std::vector<model::Products> products_of(const Chunk& chunk, const LayerCall& call) {
  using model::Products;
  switch (call.kind) {
    case LayerCall::Kind::Forward: return {Products::Forward};
    case LayerCall::Kind::BackwardWeight: return {Products::BackwardWeight};
    case LayerCall::Kind::BackwardInput: break;
  }
  if (!call.again) return {Products::BackwardInput};
  return {chunk.keep_of(call.layer) == model::Keep::Input ? Products::Recompute : Products::RecomputeAttention,
          Products::BackwardInput};
}

}  // namespace ds::pipeline
