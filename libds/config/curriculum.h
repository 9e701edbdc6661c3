// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sequence length warm-up: DeepSpeed's legacy section `curriculum_learning` with the type "seqlen". Li,
// Zhang, He: "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models" (2022).

#include <vector>

#include "config/reader.h"

namespace ds {

// Tokens of each sample in training step `step`, from 1, as in DeepSpeed's CurriculumScheduler.
//   FixedLinear, FixedRoot   floor((step / total)^(1/degree) (max - min) + min), rounded down to a multiple of
//                            difficulty_step, at least the first one from min on, at most max
//   FixedDiscrete            difficulty[i] of the first i with step <= max_step[i]; after these, the last difficulty
i64 curriculum_length(const CurriculumConfig& config, i64 step);

// The lengths below `most` that occur in some step, ascending, and the longest of all.
std::vector<i64> curriculum_lengths(const CurriculumConfig& config, i64 most);

// Checks its keys together and with the rest of the configuration, which is resolved.
void check_curriculum(const Config& config, Reader& r);

}  // namespace ds
