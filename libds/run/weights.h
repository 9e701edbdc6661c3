// SPDX-License-Identifier: Apache-2.0
#pragma once
// Initial weights from a published model: safetensors, HDF5 or a file of torch.save under Hugging Face names.

#include <map>
#include <string>

#include "engine/engine.h"

namespace ds::run {

// The Hugging Face directory that holds weights next to its config.json; `model_path` is that directory or that
// config.json; a GGUF file is its own weights. Empty: there are none, and model.path only describes a model. Throws
// Errc::Unavailable if the directory holds weights only in formats that are not supported.
std::string published_weights(const std::string& model_path);

// Every parameter of the model from `path` (a file or a directory), in fp64, fp32, bf16 or fp16; rounded to fp32 once.
// Names match as in match_weights(), which ignores known non-parameters; a tied name whose values equal those of its
// parameter is ignored too. Parts of names that wrappers add are removed with a warning. BERT's pooler and heads of
// next-sentence prediction, which masked language modelling does not train, are left out with a warning. Throws
// Errc::Mismatch naming every parameter that is missing, superfluous or of another shape, or a tied name with values of
// its own; Errc::Unavailable naming parameters of other types. With model.new_head, parameters of the last layer may be
// missing: they are initialised as by init_weights(), with a warning. Matrices that are kept in the form in which the
// file stores them are copied. Collective.
void load_weights(engine::Engine& engine, const std::string& path);
// The forms of matrices that are stored as codes (TensorSource::codes_of), by the name of the parameter. Throws as
// check_weights().
std::map<std::string, CodedForm> codes_of_weights(const model::Model& model, const std::string& path);
// Throws what load_weights() would throw for this model before it reads the bulk. warns: prints its warning about
// names.
void check_weights(const model::Model& model, const std::string& path, bool new_head, bool warns);

}  // namespace ds::run
