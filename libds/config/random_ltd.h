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
// With require_steps 0, more than any sample has.
i64 random_ltd_kept(const RandomLtdConfig& config, i64 step);

// Resolves the list of layers and checks what the keys say together, and with the rest, which is resolved.
void resolve_random_ltd(Config& config, Reader& r);

}  // namespace ds
