// SPDX-License-Identifier: Apache-2.0
#pragma once
// Initial weights from a published model: safetensors or HDF5 under Hugging Face names.

#include <string>

#include "engine/engine.h"

namespace ds::engine {

// The weights that a Hugging Face directory holds beside its config.json; empty when `model_path` is a config.json
// itself (train from scratch), or a directory without weights.
std::string published_weights(const std::string& model_path);

// Every parameter of the model from `path` (a file or a directory), in any float dtype. Names match with or without
// "transformer."; known non-parameters (GPT-2's attention masks, Llama's old inv_freq, a tied head's copy) are passed
// over. Throws Errc::Mismatch naming every parameter that is missing, too many, or of another shape. Collective.
void load_weights(Engine& engine, const std::string& path);

}  // namespace ds::engine
