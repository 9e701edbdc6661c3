// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reader of model configurations behind both load_model_config and the `model` section.

#include "config/family.h"

namespace ds {

// Reads `object` (config.json, or the inline section without "path"), whose paths begin with `prefix`; appends every
// mistake. The result is meaningful only if no error was appended.
ModelConfig read_model(const Json& object, ModelSource source, const ConfigText& text, const std::string& prefix,
                       std::vector<Diagnostic>& diagnostics);

// The rows of a family. Their root is private to the reader.
std::vector<Key> model_keys(Family family, ModelSource source);

// Opens config.json, the one in a directory, or a GGUF file, and reads it.
ModelConfig read_model_file(const std::string& dir_or_file, std::vector<Diagnostic>& diagnostics);

// The model that a config.json describes, if its `architectures` name a supported one. Nothing if not, or, with the
// reason in `why`, if this library cannot build it.
std::optional<ModelConfig> known_model(const Json& config, std::string& why);

// The family's name, or that of a model that a program brings.
std::string type_name(const ModelConfig& model);
// The identity of the program's model that a config.json describes; empty: it describes another one.
std::string program_model(const Json& config);
// Empty, or why a run cannot use a program's model, whose sizes are resolved.
std::string program_model_problem(const ModelConfig& model);

// Throws Errc::Mismatch, naming the key, if two models differ in properties that the shapes of their parameters do not
// show, such as the number of heads or the rotary embedding. Dropout, the range of initial weights and the maximum
// length may differ between runs. `saved` is the config.json of a checkpoint; an unsupported model is not compared with
// one of the zoo. Models that programs bring are compared by their names and sizes.
void check_same_model(const Json& saved, const ModelConfig& now, const std::string& step_dir);

// The keys of config.json for the model, "model_type" first.
Json model_json(const ModelConfig& model);
// Takes what describes a published file, and not one that is written here, out of its config.json: codes of weights,
// which are decoded, and layers that predict tokens further ahead.
void forget_published_form(Json& config);
// A published config.json in which the model's keys are replaced by those of model_config_json, and the rest is kept.
// No key appears under two names.
Json publish_model(const Json& published, const ModelConfig& model);

}  // namespace ds
