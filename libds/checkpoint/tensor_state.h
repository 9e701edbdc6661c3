// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file or directory of whole tensors as training state, and the other way round.

#include "checkpoint/state_source.h"
#include "formats/tensor_io.h"

namespace ds {

// Under this name the metadata of a file keeps the meta of the step whose optimizer state it holds.
inline constexpr std::string_view kMetaKey = "libds";
// And under this one, where parameters differ in it, whose states they have, and which.
inline constexpr std::string_view kOptimizersKey = "libds.optimizers";

// "optimizer.exp_avg.<name>": where files of whole tensors keep the states of a parameter.
std::string state_tensor_name(State state, std::string_view param);

// Tensors are parameters, in the order of the source; those named as states are states. Metadata that maps a name to a
// tensor makes it a tied parameter. Throws Errc::Mismatch (no tensors; states that fit no parameter, or not all of
// them).
std::unique_ptr<StateSource> make_tensor_state(std::unique_ptr<TensorSource> tensors, std::string model_config_json);

// What of a state is shown as whole tensors, and how.
struct StateView {
  std::optional<DType> dtype = {};     // of the weights of float types; empty: as they are stored
  bool optimizer = false;              // also the states, named as above, in fp32
  std::vector<std::string> only = {};  // glob patterns of parameter names; empty: all
};
// `state` outlives it. Tied parameters are left out. Throws Errc::Mismatch where a pattern matches nothing, or there is
// no optimizer state; Errc::Unavailable where a tensor cannot be read, or not be shown in that type.
std::unique_ptr<TensorSource> make_state_tensors(StateSource& state, const StateView& view);

// The weights of `path` as whole tensors: of a file or model directory as they stand; of one that holds the
// optimizer's state too, and of a checkpoint, ours or DeepSpeed's, in fp32, from the masters where there are any.
// Throws as open_state and StateSource::check.
std::unique_ptr<TensorSource> open_weights(const std::string& path);

}  // namespace ds
