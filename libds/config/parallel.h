// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a run is split over its ranks: whether the keys of pipeline, tensor and sequence parallelism and of activation
// checkpointing agree with each other, with the model and with the number of ranks.

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

// Empty if there is such a schedule; else a sentence that names the keys and values that would work.
std::string schedule_problem(const PipelineConfig& pipeline, i64 micro_batches);

// Passes of half a stage whose activations a stage keeps at most under "zb-v": memory_limit of the 2 * stages of 1F1B's
// first stage; and the fewest with which there is such a schedule. Qi et al. 2024: a third of 1F1B's, and a few.
i64 most_kept_passes(const PipelineConfig& pipeline) noexcept;
constexpr i64 least_kept_passes(i64 stages) noexcept { return 2 * ((stages + 4) / 3); }

// Layers of a model, as pipelines cut and calls count them: its blocks, an embedding before them and a head after them.
constexpr i64 num_layers(const ModelConfig& model) noexcept { return model.layers + 2; }

// Types of layers, which pipeline.partition "type:REGEX" matches: a model consists of an embedding, blocks and a head.
inline constexpr std::string_view kEmbeddingType = "Embedding", kHeadType = "Head";
std::string_view block_type(Family family) noexcept;
std::array<std::string_view, 3> layer_types(Family family) noexcept;  // these, in the model's order
// Which of `types` the REGEX of "type:REGEX" matches, as in DeepSpeed, which searches class names with Python's re and
// IGNORECASE. problem: empty, or a sentence without the key: the REGEX is invalid, or matches none of them.
struct TypeMatch {
  std::vector<bool> matches;
  std::string problem;
};
TypeMatch match_types(std::string_view regex, std::span<const std::string_view> types);

// Why a model cannot be split into `stages` pipeline stages, or over `tp` ranks: empty, or a sentence that states what
// would work; the caller names the key or option.
std::string stages_problem(const ModelConfig& model, i64 stages);
std::string tp_problem(const ModelConfig& model, i64 tp);
// The same for experts over `ep` of `dp` data-parallel ranks.
std::string ep_problem(const ModelConfig& model, i64 tp, i64 dp, i64 ep);
// The same for sequences of `length` tokens, by how sequences and their rows are split.
std::string length_problem(const Config& config, i64 length);

// Fills in defaults; returns the data-parallel ranks of `world`, 1 where they do not fit it.
// A run that does not train ignores an arrangement that does not fit them, with a warning.
i64 resolve_parallel(Config& config, i64 world, Reader& reader);

// Reports whether model, sequence length and batch fit the arrangement, with so many data-parallel ranks. Generation
// has neither micro-batches nor split sequences.
void check_parallel(const Config& config, i64 dp, Reader& reader);

}  // namespace ds
