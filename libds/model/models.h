// SPDX-License-Identifier: Apache-2.0
#pragma once
// Builds the list of layers from a model's configuration: the zoo, or a program's source (ModelConfig::source).

#include <span>
#include <vector>

#include "ds/config.h"
#include "ds/layer.h"
#include "ds/mesh.h"

namespace ds::model {

// The part of the model that a rank of the mesh computes.
Shard shard_of(const Config& config, const MeshShape& mesh, const MeshCoord& coord);
// The splits of dp of a model with experts: "edp", the ranks with the same experts, and "ep", those with different
// ones. None if ep is 1.
std::vector<DpSplit> expert_splits(const Shard& shard);
inline constexpr size_t kExpertGroup = 1;  // ParamRow::group of experts if ep is more than 1
// ParamRow::group of balancing biases, the one after all groups that reduce gradients.
inline size_t balance_group(std::span<const DpSplit> splits) noexcept { return splits.size() + 1; }

// seq_length: the longest sequence of the run. Throws Errc::Config if the model has fewer positions, or if a program's
// source breaks its contract. shard: the part of the model that a rank computes; it must pass check_shard.
Model make_model(const ModelConfig& config, i64 seq_length, const Shard& shard = {});
// The lengths of the passes of a training step, in tokens of each sample.
struct PassLengths {
  i64 sequence = 0;  // at most data.seq_length
  i64 kept = 0;      // tokens that layers of random_ltd process; 0: all of them
  bool operator==(const PassLengths&) const = default;
};
// The model of a run, with the layout of its attention (make_attention_layout, and what it throws), for passes of these
// lengths or for whole sequences.
Model make_model(const Config& config, const Shard& shard, const PassLengths& lengths);
Model make_model(const Config& config, const Shard& shard = {});

Model make_gpt2(const ModelConfig& config, const Shard& shard);
// Llama, Qwen2, Qwen3, and the families whose blocks have experts: variants that differ in biases, head norms, RoPE
// scaling and feed-forward parts.
Model make_llama(const ModelConfig& config, const Shard& shard);
// An encoder with the head of masked language modelling (Hugging Face's BertForMaskedLM), without a pooler.
Model make_bert(const ModelConfig& config, const Shard& shard);

// Initial values of elements [begin, begin + count) of the whole parameter number `param` (counted over the whole
// model). They depend only on the element's number, so every layout starts from the same weights.
void init_values(const ParamRow& row, i64 param, u32 seed, i64 begin, i64 count, float* out);

// The rotation of a family whose layers all use the same.
Rotation rotation_of(const ModelConfig& config);
// Hugging Face's RoPE with its scalings: half rotation, angles in fp32. length: rows of the tables, and the longest
// sequence that they are for, on which the scalings "dynamic" and "longrope" depend.
RopeTables make_rope_tables(const Rotation& rotation, i64 length);

}  // namespace ds::model
