// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file or directory of whole tensors as a training state, and the reverse.

#include "checkpoint/state_source.h"
#include "formats/tensor_io.h"

namespace ds {

// The metadata key under which a file with optimizer states contains the meta of their step.
inline constexpr std::string_view kMetaKey = "libds";
// The metadata key for the optimizer and states of each parameter, if parameters differ in them.
inline constexpr std::string_view kOptimizersKey = "libds.optimizers";

// "optimizer.exp_avg.<name>": the name of a parameter's state in a file of whole tensors.
std::string state_tensor_name(State state, std::string_view param);

// Tensors become parameters in the order of the source, and those named like states become states. A metadata key that
// maps a name to a tensor makes a tied parameter. Throws Errc::Mismatch (no tensors; states that fit no parameter, or
// are missing for some).
std::unique_ptr<StateSource> make_tensor_state(std::unique_ptr<TensorSource> tensors, std::string model_config_json);

// Selects the parts of a state to show as whole tensors.
struct StateView {
  std::optional<DType> dtype = {};     // of weights of float types; empty: as stored
  bool optimizer = false;              // also the states in fp32, with the names above
  std::vector<std::string> only = {};  // glob patterns of parameter names; empty: all
};
// `state` outlives it. Tied parameters are left out. Throws Errc::Mismatch if a pattern matches nothing, or there is no
// optimizer state; Errc::Unavailable if a tensor cannot be read, or cannot be converted to that type.
std::unique_ptr<TensorSource> make_state_tensors(StateSource& state, const StateView& view);

// The weights of `path` as whole tensors: as stored for a file or model directory; in fp32, from the masters if there
// are any, for a file with optimizer states and for a checkpoint, ours or DeepSpeed's. Throws like open_state and
// StateSource::check.
std::unique_ptr<TensorSource> open_weights(const std::string& path);

}  // namespace ds
