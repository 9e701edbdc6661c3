// SPDX-License-Identifier: Apache-2.0
#pragma once
// Layers that see a random part of the tokens, which grows: DeepSpeed's section
// data_efficiency.data_routing.random_ltd. Yao and others: "Random-LTD: Random and Layerwise Token Dropping Brings
// Efficient Training for Large-scale Transformers" (2022).

#include "config/reader.h"

namespace ds {

// Tokens of each sample that the listed layers see in training step `step`, from 1: those of DeepSpeed's
// RandomLTDScheduler, which numbers steps from 0.
//   floor((step - 1) / require_steps (max - min) + min), rounded down to a multiple of seq_per_step, at most max
i64 random_ltd_kept(const RandomLtdConfig& config, i64 step);

// Whether a key of data_efficiency means anything with what the others say.
bool random_ltd_takes(const RandomLtdConfig& config, std::string_view key);

// Resolves the list of layers and checks what the keys say together, and with the rest, which is resolved.
void resolve_random_ltd(Config& config, bool model_is_sound, Reader& r);

}  // namespace ds
