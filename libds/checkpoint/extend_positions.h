// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model for longer sequences: its learned position embedding repeated, as DeepSpeed does for sparse attention
// (SparseAttentionUtils.extend_position_embedding).

#include <memory>
#include <string>

#include "checkpoint/state_source.h"

namespace ds {

// `state` with `positions` rows in the position embedding of its model: row r is the old row r mod P, in the weights
// and in every other state. Its config.json, which is `named` or found by model_config_of, has the new length. Masks
// and position numbers that old files contain as tensors of the old length are left out with a warning. Everything else
// is unchanged. Throws like model_config_of; Errc::Config (fewer rows than before; a model without such an embedding,
// as with rotary ones), Errc::Unavailable (an unsupported model), Errc::Mismatch (the parameter is missing, or its
// length differs from config.json).
std::unique_ptr<StateSource> extend_positions(std::unique_ptr<StateSource> state, i64 positions,
                                              const std::string& named);

}  // namespace ds
