// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files besides weights that transformers needs: config.json, generation_config.json, the tokenizer.

#include <optional>
#include <string>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

class StateSource;

// config.json of a directory, on one line; empty if there is none. Throws Errc::Corrupt unless it is a JSON object.
std::string read_hf_config(const std::string& dir);
// The same for a directory that may contain something else: empty unless config.json is that of a model, with a
// `model_type`.
std::string find_hf_config(const std::string& dir);

// The config.json of a GGUF file; empty for any other file.
std::string stored_config(const std::string& path);

// The config.json of the model of `state`: the file `named`, or that in the directory `named`; if empty, the one in the
// state or in the directory of its file. `named` may also be a GGUF file. Throws Errc::Config if there is none, or it
// is not an object.
std::string model_config_of(const StateSource& state, const std::string& named);
// The same, but empty if there is none.
std::string find_model_config(const StateSource& state, const std::string& named);

// Writes config.json: `config` (a JSON document) with the dtype of the weights. Also writes generation_config.json if
// `config` names begin and end tokens and the directory does not contain that file yet.
void write_hf_config(const std::string& dir, const std::string& config, std::optional<DType> dtype);

// Copies the tokenizer's files from the first of `from` (directories, files in them, or GGUF files, whose tokenizers
// become files) that contains some. Returns that directory or GGUF file; empty if there is none. Throws Errc::Io.
std::string copy_tokenizer(const std::vector<std::string>& from, const std::string& dir);
// The same for generation_config.json.
void copy_generation_config(const std::vector<std::string>& from, const std::string& dir);

}  // namespace ds
