// SPDX-License-Identifier: Apache-2.0
#pragma once
// What makes a directory of weights one that transformers loads: config.json, generation_config.json, the tokenizer.

#include <optional>
#include <string>
#include <vector>

#include "ds/kernels/dtype.h"

namespace ds {

class StateSource;

// config.json of a directory, on one line; empty if there is none. Throws Errc::Corrupt unless it is a JSON object.
std::string read_hf_config(const std::string& dir);
// The same of a directory that may hold other things: empty unless it is one of a model, with a `model_type`.
std::string find_hf_config(const std::string& dir);

// The config.json of the model that `state` is one of: the file `named`, or that of the directory `named`; without one,
// what the state knows, or what stands beside its file. Throws Errc::Config where there is none, or it is no object.
std::string model_config_of(const StateSource& state, const std::string& named);
// The same, but empty where there is none.
std::string find_model_config(const StateSource& state, const std::string& named);

// Writes config.json: `config` (a JSON document) with the dtype of the weights; and, where `config` names begin and end
// tokens and the directory has none yet, generation_config.json.
void write_hf_config(const std::string& dir, const std::string& config, std::optional<DType> dtype);

// Copies the tokenizer's files out of the first of `from` that has some (a directory, or a file of it). Returns that
// directory; empty if none has. Throws Errc::Io.
std::string copy_tokenizer(const std::vector<std::string>& from, const std::string& dir);
// The same for generation_config.json.
void copy_generation_config(const std::vector<std::string>& from, const std::string& dir);

}  // namespace ds
