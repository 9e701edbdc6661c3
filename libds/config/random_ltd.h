// SPDX-License-Identifier: Apache-2.0
#pragma once
// Random layerwise token dropping: DeepSpeed's section data_efficiency.data_routing.random_ltd. Yao and others:
// "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (2022).

#include "config/reader.h"

namespace ds {

// Tokens of each sample that the listed layers process in training step `step`, from 1, as in DeepSpeed's
// RandomLTDScheduler, which counts steps from 0.
//   floor((step - 1) / require_steps (max - min) + min), rounded down to a multiple of seq_per_step, at most max
// With require_steps 0, more than any sample has.
i64 random_ltd_kept(const RandomLtdConfig& config, i64 step);

// Resolves the list of layers, and checks the keys together and with the rest, which is resolved.
void resolve_random_ltd(Config& config, Reader& r);

}  // namespace ds
