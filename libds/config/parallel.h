// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a run is cut over its ranks: what the keys of pipeline, tensor and sequence parallelism and of activation
// checkpointing say about each other, the model and the ranks that were started.

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"

namespace ds {

class Reader;

// As "pipeline.schedule" and "activation_checkpointing.granularity" spell them: "1f1b", "layer".
std::string_view schedule_name(PipelineSchedule) noexcept;
std::string_view granularity_name(CheckpointGranularity) noexcept;

// Empty if there is such a schedule; else a sentence that names the keys and what would work. The one place that knows.
std::string schedule_problem(const PipelineConfig& pipeline, i64 micro_batches);

// Types of layers, which pipeline.partition "type:REGEX" is matched with: a model has an embedding, blocks and a head.
inline constexpr std::string_view kEmbeddingType = "Embedding", kHeadType = "Head";
std::string_view block_type(Family family) noexcept;
std::array<std::string_view, 3> layer_types(Family family) noexcept;  // these, in the model's order
// Which of `types` a REGEX of "type:REGEX" matches: as DeepSpeed, which searches the names of classes with Python's re
// and IGNORECASE. problem: empty; or, without the key, why there is no answer, or that it matches none of them.
struct TypeMatch {
  std::vector<bool> matches;
  std::string problem;
};
TypeMatch match_types(std::string_view regex, std::span<const std::string_view> types);

// What a model has against being cut in `stages` parts of a pipeline, or shared by `tp` ranks: empty, or
// a sentence that says what would work, and leaves it to the caller to name the key or option. The one place that
// knows.
std::string stages_problem(const ModelConfig& model, i64 stages);
std::string tp_problem(const ModelConfig& model, i64 tp);
// The same of sequences of so many tokens, by how these and their rows are cut.
std::string length_problem(const Config& config, i64 length);

// Fills in defaults; returns the data-parallel ranks of `world`, 1 where they do not fit it.
// For what does not train, an arrangement that does not fit them is left aside with a warning.
i64 resolve_parallel(Config& config, i64 world, Reader& reader);

// What model, sequence length and batch have against it; `model_is_sound`: the model has been read without errors.
// Generation has neither micro-batches nor cut sequences.
void check_parallel(const Config& config, Reader& reader);

}  // namespace ds
