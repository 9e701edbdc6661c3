// SPDX-License-Identifier: Apache-2.0
#pragma once
// Initial weights from a published model: safetensors, HDF5 or a file of torch.save under Hugging Face names.

#include <string>

#include "engine/engine.h"

namespace ds::run {

// The Hugging Face directory whose weights stand beside its config.json; `model_path` is that directory or that
// config.json. Empty: there are none, and model.path only describes a model. Throws Errc::Unavailable where the
// directory has weights only in a format that is not read.
std::string published_weights(const std::string& model_path);

// Every parameter of the model from `path` (a file or a directory), in fp64, fp32, bf16 or fp16; rounded to fp32 once.
// Names match as match_weights() says, which passes over known non-parameters; so is a tied name passed over whose
// values are those of its parameter. What wrappers have put into names is removed with a warning. BERT's
// pooler and heads of next-sentence prediction, which masked language modelling does not train, are left out with a
// warning. Throws Errc::Mismatch naming every parameter that is missing, too many, or of another shape, or a tied name
// with values of its own; Errc::Unavailable naming parameters of other types. With Config::new_head, parameters of the
// last layer may be missing: they begin as init_weights() would have them, which a warning says. Collective.
void load_weights(engine::Engine& engine, const std::string& path);
// Throws what load_weights would throw for this model before it reads the bulk. `warns`: with its warning about names.
void check_weights(const model::Model& model, const std::string& path, bool new_head, bool warns);

}  // namespace ds::run
