// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model for longer sequences: its learned position embedding repeated, as DeepSpeed does it for sparse attention
// (SparseAttentionUtils.extend_position_embedding).

#include <memory>
#include <string>

#include "checkpoint/state_source.h"

namespace ds {

// `state` with `positions` rows in the position embedding of its model, of which row r is row r mod P of the P that
// were there, in the weights and in every other state; its config.json, the one that is `named` or as model_config_of
// finds it, says so. Masks and numbers of positions, which old files have as tensors of the old length, are left out
// with a warning. All else is as it was. Throws as model_config_of; Errc::Config (fewer rows than there are; a model
// that has none, as rotary ones), Errc::Unavailable (a model whose embedding is not known), Errc::Mismatch (no such
// parameter, or not of the length that config.json says).
std::unique_ptr<StateSource> extend_positions(std::unique_ptr<StateSource> state, i64 positions,
                                              const std::string& named);

}  // namespace ds
