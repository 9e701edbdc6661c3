// SPDX-License-Identifier: Apache-2.0
#pragma once
// The zoo: from a model's configuration to its list of layers.

#include <vector>

#include "ds/config.h"
#include "model/layer.h"

namespace ds::model {

// seq_length: the longest sequence of the run. Throws Errc::Config if the model has fewer positions. shard: the part of
// it that a rank computes; check_shard must have nothing against it.
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
// Llama, Qwen2, Qwen3: one family that differs in biases, head norms and RoPE scaling.
Model make_llama(const ModelConfig& config, const Shard& shard);
// An encoder with the head of masked language modelling (Hugging Face's BertForMaskedLM): no pooler.
Model make_bert(const ModelConfig& config, const Shard& shard);

// Initial values of elements [begin, begin + count) of parameter number `param` (counted over the whole model), of the
// whole parameter: from the element's number alone, so that every layout starts from the same weights.
void init_values(const ParamRow& row, i64 param, u32 seed, i64 begin, i64 count, float* out);

// Hugging Face's RoPE with its scalings: half rotation, angles in fp32. length: rows of the tables, and the longest
// sequence that they serve, which the scalings "dynamic" and "longrope" go by. Empty for models with learned positions.
RopeTables make_rope_tables(const ModelConfig& config, i64 length);
i64 rope_table_elems(const ModelConfig& config, i64 length);  // of each of them

}  // namespace ds::model
