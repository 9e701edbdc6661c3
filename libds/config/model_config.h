// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reader of model configurations behind both load_model_config and the `model` section.

#include "config/reader.h"

namespace ds {

// Where a model configuration stands decides what a missing key means: in a config.json Hugging Face's default, inline
// the sizes must be said and dropout is 0.
enum class ModelSource { File, Inline };

// Reads `object` (config.json, or the inline section without "path"), whose paths begin with `prefix`; appends every
// mistake. The result is meaningful only if no error was appended.
ModelConfig read_model(const Json& object, ModelSource source, const ConfigText& text, const std::string& prefix,
                       std::vector<Diagnostic>& diagnostics);

// The rows of a family. They are relative to a root of the reader's own.
std::vector<Key> model_keys(Family family, ModelSource source);

// Opens config.json, or the one in a directory, and reads it.
ModelConfig read_model_file(const std::string& dir_or_file, std::vector<Diagnostic>& diagnostics);

// The model that a config.json describes, where it is one of the zoo by its `architectures`. Nothing where it is none,
// and, with the reason, where this library cannot build it.
std::optional<ModelConfig> known_model(const Json& config, std::string& why);

// What the shapes of a model's parameters do not tell: how many heads share them, how positions turn them. Dropout and
// the spread of first weights are a run's own business, and so is the length that a rotation could have. `saved` is the
// config.json of a checkpoint; one of no model of the zoo is not compared. Throws Errc::Mismatch, which names the key.
void check_same_model(const Json& saved, const ModelConfig& now, const std::string& step_dir);

// The keys of config.json for the model, "model_type" first.
Json model_json(const ModelConfig& model);
// A published config.json with the model's keys as model_config_json writes them, and the rest as it was: no key twice
// under two names.
Json publish_model(const Json& published, const ModelConfig& model);

}  // namespace ds
